"""The name of Levanter's log, the allocator, the devices that a run is for. Flags and trackers: test_every_key.py."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import FoundDevices
from tomat.model.devices import found_devices
from tomat.train import startup
from tomat.train.settings.config import load_config
from tomat.train.startup import connect, refuse_other_devices, rename_log


@pytest.fixture
def log(tmp_path) -> Iterator[logging.FileHandler]:
    """A handler of the root logger that writes `run.log.log`, as Levanter opens it."""
    handler = logging.FileHandler(tmp_path / "run.log.log", mode="a")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root = logging.getLogger()
    before = list(root.handlers)
    root.addHandler(handler)
    yield handler
    for added in [each for each in root.handlers if each not in before]:
        root.removeHandler(added)
        added.close()


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_log_goes_on_under_its_right_name(tmp_path, log):
    (tmp_path / "run.log").write_text("of an earlier start\n")
    logging.getLogger().error("before")
    rename_log(tmp_path, "run")
    logging.getLogger().error("after")
    assert files(tmp_path) == {"run.log": "of an earlier start\nERROR before\nERROR after\n"}


def test_a_log_that_another_host_took_is_not_missed(tmp_path, log):
    (tmp_path / "run.log").write_text("ERROR of both\n")
    Path(log.baseFilename).unlink()
    rename_log(tmp_path, "run")
    logging.getLogger().error("after")
    assert files(tmp_path) == {"run.log": "ERROR of both\nERROR after\n"}


def test_what_cannot_be_written_is_not_swallowed(tmp_path, log):
    (tmp_path / "run.log").mkdir()
    with pytest.raises(OSError):
        rename_log(tmp_path, "run")


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


def test_the_devices_that_are_here_are_asked():
    assert found_devices() == FoundDevices("cpu", 2, 1)
    with pytest.raises(TomatError, match=r"expected 4 x TPU v6 lite on 1 host \(v6e-4\), found 2 x cpu on 1 host"):
        connect(load_config("demo", ["--slice", "v6e-4"]))
    connect(load_config("demo", ["--slice", "v6e-4", "--run_elsewhere", "true"]))
