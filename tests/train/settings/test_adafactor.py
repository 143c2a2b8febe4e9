"""Adafactor: the formula of optax for each layer, and where its state lies."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from haliax import Axis, NamedArray
from haliax.nn.scan import BlockSeq, Stacked
from haliax.partitioning import pspec_for_axis
from run_facts import arrays

from tomat.base.errors import TomatError
from tomat.train.settings.adafactor import AdafactorConfig, scale_by_adafactor

Layers, Heads, Wide, Narrow = Axis("layer", 3), Axis("head", 2), Axis("embed", 6), Axis("mlp", 4)
STEADY: dict[str, Any] = dict(lr_schedule="constant", warmup=0, learning_rate=0.02, min_dim_size_to_factor=3)


class Layer(eqx.Module):
    weight: NamedArray
    norm: NamedArray
    plain: jax.Array

    @staticmethod
    def init(*, key) -> "Layer":
        keys = jax.random.split(key, 3)
        return Layer(
            hax.random.normal(keys[0], (Heads, Narrow, Wide)),
            hax.random.normal(keys[1], Wide),
            jax.random.normal(keys[2], (5, 4)),
        )


def model(container=Stacked) -> Any:
    return container.init(Layers, Layer)(key=jax.random.split(jax.random.PRNGKey(0), Layers.size))


def trained(optimizer: optax.GradientTransformation, parameters: Any) -> tuple[Any, Any]:
    """Parameters and state after four steps on the fourth powers of the parameters."""

    @jax.jit
    def step(parameters: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.tree.map(lambda x: x**3, parameters), state, parameters)
        return optax.apply_updates(parameters, updates), state

    state = optimizer.init(parameters)
    for _ in range(4):
        parameters, state = step(parameters, state)
    return parameters, state


@pytest.mark.parametrize(
    "fields, theirs",
    [
        ({}, {}),
        ({"parameter_scale": False, "decay_rate": 0.5}, {"multiply_by_parameter_scale": False, "decay_rate": 0.5}),
        ({"clipping_threshold": 0.3}, {"clipping_threshold": 0.3}),
        ({"momentum": 0.9, "clipping_threshold": None}, {"momentum": 0.9, "clipping_threshold": None}),
        ({"min_dim_size_to_factor": 128}, {"min_dim_size_to_factor": 128}),
        ({"weight_decay": 0.1, "default_weight_decay_mask": False}, {"weight_decay_rate": 0.1 * 0.02}),
    ],
)
def test_each_layer_is_updated_as_optax_does(fields, theirs):
    """Plain arrays of one layer at a time, which know nothing of names and stacks."""
    ours, _ = trained(AdafactorConfig(**STEADY | {"weight_decay": 0.0} | fields).build(100), model())
    plain = [[jnp.asarray(array) for array in arrays(layer)] for layer in model().unstacked()]
    expected, _ = trained(optax.adafactor(0.02, **{"min_dim_size_to_factor": 3} | theirs), plain)
    for one, other in zip(arrays(list(ours.unstacked())), arrays(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    assert any((one != other).any() for one, other in zip(arrays(ours), arrays(model()), strict=True))


def test_stacked_and_unrolled_layers_are_updated_alike():
    stacked, _ = trained(AdafactorConfig(**STEADY).build(100), model())
    unrolled, _ = trained(AdafactorConfig(**STEADY).build(100), model(BlockSeq))
    for one, other in zip(*(arrays(list(layers.unstacked())) for layers in (stacked, unrolled)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_rows_and_columns_are_kept_in_the_place_of_a_matrix_and_split_as_it_is():
    found = scale_by_adafactor(AdafactorConfig(**STEADY)).init(model()).moments.stacked
    weight, norm, plain = found.weight, found.norm, found.plain
    assert weight.rows.axes == (Layers, Heads, Narrow) and weight.columns.axes == (Layers, Heads, Wide)
    assert weight.whole is None
    assert norm.rows is None and norm.columns is None and norm.whole.axes == (Layers, Wide)
    assert [axis.size for axis in plain.rows.axes] == [3, 4] and [axis.size for axis in plain.columns.axes] == [3, 5]
    # Under FSDP and ZeRO-1 `embed` is split over the data axis.
    with hax.axis_mapping({"embed": "data"}):
        assert pspec_for_axis(weight.columns.axes)[-1] == "data"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"momentum": 1.0}, "momentum is 1.0; expected at least 0 and below 1"),
        ({"clipping_threshold": 0.0}, "clipping_threshold is 0"),
        ({"clipping_threshold": -1.0}, "clipping_threshold is -1.0; expected at least 0"),
        ({"decay_rate": -0.8}, "decay_rate is -0.8"),
        ({"min_dim_size_to_factor": 0}, "min_dim_size_to_factor is 0"),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(fields, message):
    with pytest.raises(TomatError, match=f"optimizer.{message}"):
        AdafactorConfig(**fields)
