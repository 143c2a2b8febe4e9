"""Arrays that are trained in few bits: what is computed with is what is stored, and the gradients are as said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tomat.predict.distillation.arrays import TrainedArrays, straight_through
from tomat.predict.weights.quantise import BITS, Quantised, quantise

MATRIX = np.random.default_rng(0).normal(size=(6, 32)).astype(np.float32)
EVERY = [(scheme, bits) for scheme in BITS for bits in BITS[scheme]]


def trained(scheme="lut", bits=3, numbers=None) -> tuple[TrainedArrays, dict]:
    stored = {
        "a.weight": quantise(MATRIX, bits, scheme, 16),
        "b.weight": quantise(MATRIX, bits, scheme),
        "norm": MATRIX[0],
    }
    return TrainedArrays.of(stored, numbers or {}, lambda name: name == "a.weight"), stored


@pytest.mark.parametrize("scheme, bits", EVERY)
def test_what_begins_and_is_stored_at_once_is_the_same(scheme, bits):
    arrays, stored = trained(scheme, bits)
    again = arrays.stored(stored)
    for name, its in stored.items():
        if isinstance(its, Quantised):
            assert np.array_equal(again[name].codes, its.codes) and again[name].description == its.description
            np.testing.assert_allclose(again[name].values(), its.values(), rtol=1e-6)
        else:
            assert np.array_equal(again[name], its)
    assert again["b.weight"] is stored["b.weight"]


@pytest.mark.parametrize("scheme, bits", EVERY)
def test_what_is_computed_with_is_what_is_stored(scheme, bits):
    arrays, stored = trained(scheme, bits, {"a.weight": MATRIX})
    key = jax.random.PRNGKey(bits)
    # As a training may leave it: scales that float16 has not, a table out of order.
    moved = TrainedArrays(
        arrays.whole,
        {name: its + 0.3 * jax.random.normal(key, its.shape) for name, its in arrays.numbers.items()},
        {name: its + 0.2345 for name, its in arrays.growth.items()},
        arrays.scales,
        {name: its if scheme == "affine" else its[::-1] * 0.9 for name, its in arrays.tables.items()},
    )
    result = moved.stored(stored)["a.weight"]
    np.testing.assert_allclose(result.values(), moved.values()["a.weight"], rtol=2e-6)
    again = Quantised.of_arrays(result.arrays(), result.description)
    assert np.array_equal(again.values(), result.values())


def test_gradients_go_to_numbers_scales_and_table():
    scales, table = jnp.full((6, 2), 0.5), jnp.asarray([-2.0, -0.5, 0.5, 2.0])
    numbers, growth = jnp.asarray(MATRIX), jnp.full((6, 2), jnp.log(2.0))
    weights = jax.random.normal(jax.random.PRNGKey(1), MATRIX.shape)

    def total(numbers, growth, table):
        return jnp.sum(weights * straight_through(numbers, growth, scales, table))

    by_numbers, by_growth, by_table = jax.grad(total, argnums=(0, 1, 2))(numbers, growth, table)
    # A number is over the first scale, 0.5; the scale now is 1.
    np.testing.assert_allclose(by_numbers, 0.5 * weights, rtol=1e-5)
    values = straight_through(numbers, growth, scales, table)
    lsq = (weights * (values - numbers / 2)).reshape(6, 2, 16).sum(axis=-1)
    np.testing.assert_allclose(by_growth, lsq, rtol=1e-4, atol=1e-4)
    for index, value in enumerate(table):
        own = np.isclose(values, value, rtol=1e-5)
        np.testing.assert_allclose(by_table[index], np.asarray(weights)[own].sum(), rtol=1e-4)


def test_a_group_of_zeros_is_no_number_that_is_none():
    table, zero = jnp.asarray([-1.0, 0.0, 1.0, 2.0]), jnp.zeros((2, 1))
    gradient = jax.grad(lambda x: straight_through(x, zero, zero, table).sum())(jnp.zeros((2, 8)))
    assert np.isfinite(gradient).all()
    none = {"a": quantise(np.zeros((2, 8), np.float32), 2, "lut")}
    arrays = TrainedArrays.of(none, {}, lambda name: True)
    assert not np.asarray(arrays.values()["a"]).any() and not arrays.stored(none)["a"].values().any()
