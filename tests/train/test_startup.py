"""The allocator, the devices that a run is for, its trackers; flags: test_every_key.py."""

import pytest
from levanter.tracker.tensorboard import TensorboardConfig

from tomat.base.errors import TomatError
from tomat.hardware.chips import FoundDevices
from tomat.model.devices import found_devices
from tomat.train import startup
from tomat.train.settings.config import load_config
from tomat.train.startup import connect, refuse_other_devices


def test_the_allocator_is_told_where_the_run_asks_for_it(monkeypatch):
    told = []
    monkeypatch.setattr(startup, "keep_freed_memory", lambda: told.append(True))
    connect(load_config("demo"))
    assert not told
    connect(load_config("demo", ["--keep_freed_memory", "true"]))
    assert told == [True]


V6E_16, V6E_8, CPU = FoundDevices("TPU v6 lite", 16, 4), FoundDevices("TPU v6 lite", 8, 1), FoundDevices("cpu", 16, 4)


@pytest.mark.parametrize("found", [V6E_8, CPU, FoundDevices("TPU v6 lite", 16, 1), FoundDevices("NVIDIA H200", 16, 2)])
def test_a_recipe_for_a_slice_is_refused_elsewhere(found):
    with pytest.raises(TomatError, match=r"expected 16 x TPU v6 lite on 4 hosts \(v6e-16\), found ") as refused:
        refuse_other_devices(load_config("200m-v6e16"), found)
    told = str(refused.value)
    assert str(found) in told and "--run_elsewhere true" in told and "\n" not in told
    refuse_other_devices(load_config("200m-v6e16", ["--run_elsewhere", "true"]), found)
    refuse_other_devices(load_config("200m-v6e16", ["--slice", "null"]), found)
    refuse_other_devices(load_config("200m-v6e16"), V6E_16)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.mesh.axes", "{data: -1, replica: -1}"], "trainer.mesh .* does not fit 2 x cpu .*: Only one"),
        (["--trainer.mesh.axes", "{data: 3}"], "trainer.mesh .* does not fit 2 x cpu on 1 host: .* product"),
        (["--trainer.jax_config", "{jax_nope: 1}"], "trainer.jax_config sets jax_nope, which JAX .* does not have"),
    ],
)
def test_devices_and_options_that_there_are_not_are_one_line(words, said):
    with pytest.raises(TomatError, match=said):
        connect(load_config("demo", words))


def test_tensorboard_forgets_what_a_killed_process_wrote_beyond_its_checkpoint(tmp_path):
    found = startup.trackers(load_config("demo", ["--trackers.tensorboard", "true"]), tmp_path, 7)
    assert [one.purge_step for one in found if isinstance(one, TensorboardConfig)] == [7]


def test_gpus_of_two_kinds_and_a_machine_without_a_gpu_are_one_line_each():
    with pytest.raises(TomatError, match="several kinds, NVIDIA A100, NVIDIA H100, .* CUDA_VISIBLE_DEVICES"):
        refuse_other_devices(load_config("demo"), FoundDevices("NVIDIA A100, NVIDIA H100", 2, 1))
    for recipe in ("30m-h100", "200m-h100", "200m-h100-fast", "200m-h100x8"):
        with pytest.raises(TomatError, match="expected [18] x NVIDIA H100 80GB HBM3 on 1 host .*, found 16 x cpu"):
            refuse_other_devices(load_config(recipe), CPU)


def test_the_devices_that_are_here_are_asked():
    assert found_devices() == FoundDevices("cpu", 2, 1)
    with pytest.raises(TomatError, match=r"expected 4 x TPU v6 lite on 1 host \(v6e-4\), found 2 x cpu on 1 host"):
        connect(load_config("demo", ["--slice", "v6e-4"]))
    connect(load_config("demo", ["--slice", "v6e-4", "--run_elsewhere", "true"]))
