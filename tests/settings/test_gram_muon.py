"""Muon by way of Gram matrices: the updates of Levanter's Muon, in fewer products."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis
from haliax.nn.scan import BlockSeq, Stacked
from levanter.optim.muon import MuonConfig
from levanter.optim.util import NEWTON_SCHULZ_COEFFICIENTS, zeropower_via_newtonschulz5

from tomat.settings.gram_muon import GRAM_STEPS, GramMuonConfig, newton_schulz

Layers, Heads, Embed, Mlp, Out = Axis("layer", 3), Axis("head", 2), Axis("embed", 8), Axis("mlp", 32), Axis("out", 10)
STEADY: dict[str, Any] = dict(lr_schedule="constant", warmup=0, learning_rate=0.02, adam_lr=0.01)


class Layer(eqx.Module):
    wide: hnn.Linear
    tall: hnn.Linear
    square: hnn.Linear
    near: hnn.Linear
    norm: hax.NamedArray

    @staticmethod
    def init(*, key) -> "Layer":
        keys = jax.random.split(key, 5)
        make = lambda In, Out, key: hnn.Linear.init(In, Out, key=key, use_bias=True)  # noqa: E731
        return Layer(
            make(Mlp, Embed, keys[0]),
            make(Embed, (Heads, Axis("size", 16)), keys[1]),
            make(Embed, Axis("embed_out", 8), keys[2]),
            make(Embed, Out, keys[3]),
            hax.random.normal(keys[4], Embed),
        )


def model(container: Any) -> Any:
    return container.init(Layers, Layer)(key=jax.random.split(jax.random.PRNGKey(0), Layers.size))


def trained(config: MuonConfig, parameters: Any, steps: int = 4) -> tuple[Any, Any]:
    """Parameters and state after some steps of x^4 / 4 - x / 10 of each number."""
    optimizer = config.build(10)

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, Any]:
        gradients = jax.tree.map(lambda x: x**3 - 0.1, parameters)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = optimizer.init(parameters)
    for _ in range(steps):
        parameters, state = step(parameters, state)
    return parameters, state


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"weight_decay": 0.1, "use_kimi_scaling": True},
        {"adam_weight_decay": 0.1, "nesterov": False, "max_grad_norm": 0.0},
        {"coefficient_type": "polar_express", "backend_steps": 8},
        {"backend_steps": 2},
    ],
)
def test_a_training_is_that_of_muon(container, fields):
    parameters = eqx.filter(model(container), eqx.is_array)
    expected, _ = trained(MuonConfig(**STEADY, **fields), parameters)
    found, _ = trained(GramMuonConfig(**STEADY, **fields), parameters)
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(other).max() > 0.03
        np.testing.assert_allclose(one, other, atol=2e-6, err_msg=jax.tree_util.keystr(path))


def test_what_is_kept_between_steps_is_what_muon_keeps():
    """So that a checkpoint of one continues as the other: arrays and their paths."""
    parameters = eqx.filter(model(Stacked), eqx.is_array)
    states = [trained(kind(**STEADY), parameters, steps=1)[1] for kind in (MuonConfig, GramMuonConfig)]
    paths = [[jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)] for state in states]
    assert paths[0] == paths[1] and any("momentum_buffer" in path for path in paths[0])


@pytest.mark.parametrize("decades", [0, 2, 4, 8])
def test_small_singular_values_are_kept_as_newton_schulz_keeps_them(decades):
    random = np.random.default_rng(0)
    left, _ = np.linalg.qr(random.normal(size=(64, 64)))
    right, _ = np.linalg.qr(random.normal(size=(256, 64)))
    matrix = left @ np.diag(np.logspace(0, -decades, 64)) @ right.T
    matrix /= np.linalg.norm(matrix)
    coefficients = NEWTON_SCHULZ_COEFFICIENTS["quintic"]
    expected = matrix
    for a, b, c in coefficients:
        gram = expected @ expected.T
        expected = a * expected + (b * gram + c * gram @ gram) @ expected

    def error(found: Any) -> float:
        return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))

    by_muon = error(zeropower_via_newtonschulz5(jnp.asarray(matrix, jnp.float32)))
    by_gram = error(newton_schulz(jnp.asarray(matrix, jnp.float32)[None], coefficients)[0])
    assert by_muon < 1e-5
    assert by_gram < 3 * by_muon + 1e-6


def flops(function: Any, *shapes: tuple[int, ...]) -> float:
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return cast(Any, jax.jit(function).lower(*arguments).cost_analysis())["flops"]


@pytest.mark.parametrize(("columns", "share"), [(256, 60 / 90), (128, 44 / 50), (64, 1.0)])
def test_wide_matrices_take_fewer_flops(columns, share):
    """In products of 64 x 64 x 64: 4 columns / rows + 2 a step, or 4 columns / rows + 8 n - 6 for n of them."""
    coefficients = NEWTON_SCHULZ_COEFFICIENTS["quintic"]
    by_muon = flops(lambda x: zeropower_via_newtonschulz5(x), (64, columns))
    by_gram = flops(lambda x: newton_schulz(x[None], coefficients), (64, columns))
    assert by_gram / by_muon == pytest.approx(share, rel=0.02)


def test_matrices_of_one_shape_are_one_product():
    """Whatever lies: 3 layers of 5 matrices in 3 shapes."""
    parameters = eqx.filter(model(BlockSeq), eqx.is_array)
    config = GramMuonConfig(**STEADY)
    optimizer = config.build(10)
    text = jax.jit(optimizer.update).lower(parameters, optimizer.init(parameters), parameters).as_text()
    rectangular = sum(2 + 1 + 4 * (n - 1) for n in (GRAM_STEPS, config.backend_steps - GRAM_STEPS))
    plain = 3 * config.backend_steps
    assert text.count("stablehlo.dot_general") == rectangular + 2 * plain


def test_the_configuration_names_it(tmp_path):
    from tomat.settings.config import load_config

    config = load_config("configs/train/demo.yaml", ["--optimizer.type", "gram_muon"])
    muon = load_config("configs/train/demo.yaml").optimizer
    assert isinstance(config.optimizer, GramMuonConfig)
    assert dataclasses.asdict(config.optimizer) == dataclasses.asdict(cast(Any, muon))
