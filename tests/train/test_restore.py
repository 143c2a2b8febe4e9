"""What is loaded is what was saved: stacked or unrolled, and the averaged weights where there are any."""

import dataclasses
import shutil
import weakref
from functools import partial
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from levanter.checkpoint import load_checkpoint
from levanter.optim.config import OptimizerConfig
from levanter.trainer_state import TrainerState
from run_facts import arrays, events, losses
from tiny_run import demo_config, tiny_run

from tomat.base.errors import TomatError
from tomat.predict.inference.trained import load_trained
from tomat.train import restore
from tomat.train.guards.loss import guard_updates
from tomat.train.loop import TrainingLoop
from tomat.train.origins import Continuation
from tomat.train.restore import model_initialiser, rearrange
from tomat.train.run import train
from tomat.train.settings import adafactor as adafactor  # registered by its import

TINY = tiny_run(
    6, 2, "--model.num_layers", "2", "--trainer.mp", "f32", "--trainer.model_averaging",
    "{type: ema, beta: 0.5}",
)  # fmt: skip
UNROLLED = ("--model.scan_layers", "false")
tiny = partial(demo_config, TINY)


@pytest.fixture(scope="module")
def stacked(tmp_path_factory) -> Path:
    """A run that is through, with its layers stacked: checkpoints 2, 4 and 5."""
    return train(tiny(tmp_path_factory.mktemp("runs"))).run_dir


def forget(run_dir: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step}")


def test_a_run_goes_on_unrolled_and_back_as_if_it_had_never_changed(stacked, tmp_path):
    run = tmp_path / "demo"
    shutil.copytree(stacked, run)
    forget(run, 4, 5)
    assert train(tiny(tmp_path, *UNROLLED)).first_step == 3
    np.testing.assert_allclose(losses(run), losses(stacked), rtol=1e-5)
    forget(run, 5)  # step 4 was saved unrolled
    assert train(tiny(tmp_path)).first_step == 5
    np.testing.assert_allclose(losses(run), losses(stacked), rtol=1e-5)
    for one, other in zip(arrays(load_trained(run).model), arrays(load_trained(stacked).model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)
    # A checkpoint of before the change, as the run's configuration of now would have it.
    assert train(tiny(tmp_path, *UNROLLED)).first_step == 6
    unrolled: Any = load_trained(run, step=2).model
    assert len(unrolled.transformer.layers.blocks) == 2
    weight = unrolled.transformer.layers.blocks[1].mlp.up_proj.weight.array
    before: Any = load_trained(stacked, step=2).model
    whole = before.transformer.layers.stacked.mlp.up_proj.weight.array
    np.testing.assert_array_equal(weight, whole[1])


def test_averaged_weights_are_the_ones_that_are_used(stacked, tmp_path, capsys, monkeypatch):
    run = load_trained(stacked)
    assert run.weights == "averaged"
    assert "averaged" in " ".join(capsys.readouterr().out.split())
    shape = eqx.filter_eval_shape(model_initialiser(run.config, jax.random.PRNGKey(0)))
    trainer = run.config.trainer_config()
    path = str(stacked / "checkpoints" / "step-5")
    with trainer.use_device_mesh():
        averaged, last = (
            cast(Any, load_checkpoint)(shape, path, subpath=name, axis_mapping={}, mesh=trainer.device_mesh)
            for name in ("model_averaging/model", "model")
        )
    for one, other in zip(arrays(run.model), arrays(averaged), strict=True):
        np.testing.assert_array_equal(one, other)
    assert any((one != other).any() for one, other in zip(arrays(averaged), arrays(last), strict=True))
    # A warm start begins with them too.
    begun: list[TrainerState] = []

    def far_enough(self: TrainingLoop, state: TrainerState) -> None:
        begun.append(state)
        raise AssertionError("far enough")

    monkeypatch.setattr(TrainingLoop, "run", far_enough)
    with pytest.raises(AssertionError, match="far enough"):
        train(tiny(tmp_path, "--run_name", "warm", *UNROLLED), Continuation(warm_start=str(stacked)))
    (event,) = events(tmp_path / "warm", "warm_start")
    assert event["weights"] == "averaged"
    for model in (begun[0].model, cast(Any, begun[0].model_averaging).model):
        weight = cast(Any, model).transformer.layers.blocks[1].mlp.up_proj.weight.array
        np.testing.assert_array_equal(weight, averaged.transformer.layers.stacked.mlp.up_proj.weight.array[1])


@pytest.mark.parametrize("optimizer, fields", [("muon", {}), ("adafactor", {"min_dim_size_to_factor": 8})])
def test_the_state_of_an_optimizer_is_rearranged_there_and_back_bit_for_bit(tmp_path, optimizer, fields):
    """Each array is drawn, so that a swapped layer or moment shows."""
    chosen = cast(Any, OptimizerConfig.get_choice_class(optimizer))(**fields)
    configs = {
        scan: dataclasses.replace(tiny(tmp_path, "--model.scan_layers", str(scan).lower()), optimizer=chosen)
        for scan in (True, False)
    }
    trainer = configs[True].trainer_config()
    transform = guard_updates(configs[True].optimizer.build(6), configs[True].guards)

    def state(scan: bool) -> TrainerState:
        key = jax.random.PRNGKey(0)
        return TrainerState.init(
            transform,
            model_initialiser(configs[scan], key)(),
            key=key,
            mp=trainer.mp,
            model_averaging=trainer.model_averaging,
        )

    with trainer.use_device_mesh():
        random = np.random.default_rng(0)

        def draw(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            floats = jnp.issubdtype(leaf.dtype, jnp.floating)
            return jnp.asarray(random.normal(size=leaf.shape) if floats else np.zeros(leaf.shape), leaf.dtype)

        begun = jax.tree.map(draw, eqx.filter_eval_shape(state, True))
        there = eqx.filter_eval_shape(state, False)
        unrolled = rearrange(begun, there, {}, trainer.device_mesh)
        assert jax.tree.structure(unrolled) == jax.tree.structure(there)
        layers = begun.model.transformer.layers.stacked.self_attn.q_proj.weight.array
        for index, block in enumerate(unrolled.model.transformer.layers.blocks):
            np.testing.assert_array_equal(block.self_attn.q_proj.weight.array, layers[index])
        back = rearrange(unrolled, eqx.filter_eval_shape(state, True), {}, trainer.device_mesh)
        assert jax.tree.structure(back) == jax.tree.structure(begun)
        for one, other in zip(arrays(back), arrays(begun), strict=True):
            np.testing.assert_array_equal(one, other)


def test_what_is_rearranged_is_let_go_of_on_the_way(stacked, monkeypatch):
    """Both forms of every layer at once would be too much for devices that the run fills."""
    loaded: list[weakref.ref[jax.Array]] = []
    held: list[int] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        model: Any = load_checkpoint(*args, **kwargs)
        loaded.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(model.transformer.layers))
        return model

    take_apart = restore._take_apart

    def watched(*args: Any) -> list[jax.Array]:
        held.append(sum(array() is not None for array in loaded))
        return take_apart(*args)

    monkeypatch.setattr(restore, "load_checkpoint", load)
    monkeypatch.setattr(restore, "_take_apart", watched)
    config = tiny(stacked.parent, *UNROLLED)
    trainer = config.trainer_config()
    with trainer.use_device_mesh():
        restore.load_weights(config, str(stacked / "checkpoints" / "step-5"), {}, trainer.device_mesh)
    assert held == list(range(len(loaded), 0, -1)) and len(held) > 5


def test_what_has_no_counterpart_in_the_other_form_is_refused(tmp_path):
    """As the state of an optimizer that keeps its moments in another form than the parameters."""

    def shapes(scan: bool, layers: int) -> Any:
        config = tiny(tmp_path, "--model.scan_layers", str(scan).lower(), "--model.num_layers", str(layers))
        return eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))

    mesh = tiny(tmp_path).trainer_config().device_mesh
    stacked = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes(True, 2))
    for layers in (1, 3):
        with pytest.raises(TomatError, match=r"no counterpart. Set model\.scan_layers as it was when"):
            rearrange(stacked, shapes(False, layers), {}, mesh)
    assert len(rearrange(stacked, shapes(False, 2), {}, mesh).transformer.layers.blocks) == 2
