"""Keys and values in 8 bits: what they are rounded to, what attention reads from them, what they weigh."""

import math

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from hypothesis import given, settings
from hypothesis import strategies as st
from levanter.layers.attention import AttentionConfig

from tomat.model.attention import DensityAttention, DensityAttentionConfig
from tomat.model.kv_cache import (
    LARGEST_CODE,
    TILE_POSITIONS,
    Int8KeysValues,
    KeysValues,
    empty_cache,
    kv_cache_bytes,
    quantised,
)

Batch, HeadSize = Axis("batch", 2), Axis("head_size", 16)
KvHead, Group = Axis("kv_head", 2), Axis("q_heads_per_group", 3)
VECTOR_AXES = (Axis("key_position", 8), HeadSize)


def drawn(seed: int, *axes: Axis, scale: float = 1.0) -> hax.NamedArray:
    values = np.random.default_rng(seed).normal(size=[axis.size for axis in axes], scale=scale)
    return hax.named(jnp.asarray(values, jnp.float32), axes)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000), st.integers(-20, 20))
def test_a_number_is_within_half_a_scale_and_what_8_bits_hold_comes_back_exactly(seed, exponent):
    vectors = drawn(seed, *VECTOR_AXES, scale=4.0**exponent)
    codes, scales = quantised(vectors)
    assert codes.dtype == jnp.int8 and scales.dtype == jnp.float32
    exact, back = (np.asarray(each, np.float64) for each in (vectors.array, codes.array * scales.array[:, None]))
    bound = np.asarray(scales.array, np.float64)[:, None] * (0.5 + LARGEST_CODE * 2**-22)  # and float32's rounding
    assert (np.abs(back - exact) <= bound).all()
    assert (np.abs(codes.array).max(axis=1) == LARGEST_CODE).all()

    whole = np.random.default_rng(seed).integers(-LARGEST_CODE, LARGEST_CODE + 1, (8, 16))
    whole[:, 3], whole[5] = LARGEST_CODE, 0
    exact = (whole * 2.0**exponent).astype(np.float32)
    codes, scales = quantised(hax.named(jnp.asarray(exact), VECTOR_AXES))
    np.testing.assert_array_equal(codes.array, whole)
    np.testing.assert_array_equal(codes.array * scales.array[:, None], exact)


@pytest.mark.parametrize("length", [5, TILE_POSITIONS, 2 * TILE_POSITIONS, 3 * TILE_POSITIONS + 7])
def test_what_attention_reads_is_within_the_bound_of_the_rounding(length):
    """A score moves by at most e = sum |q| x half a key's scale; so every weight by a factor between e^-2e and e^2e,
    and the sum by (e^2e - 1) of the largest value, beside half a value's scale."""
    KeyPos, Pos = Axis("key_position", length), Axis("position", 1)
    q = drawn(0, Batch, KvHead, Group, Pos, HeadSize)
    keys, values = (drawn(seed, Batch, KvHead, KeyPos, HeadSize) for seed in (1, 2))
    seen = hax.arange(KeyPos) < max(length - 3, 1)
    at, config = jnp.int32(0), attention(Embed=Axis("embed", 96), num_heads=6)
    exact = empty_cache(config, Batch, length, jnp.float32, "compute").written(keys, values, at)
    cache = empty_cache(config, Batch, length, jnp.float32, "int8").written(keys, values, at)
    assert isinstance(exact, KeysValues) and isinstance(cache, Int8KeysValues)
    axes = q.axes
    found, expected = (each.attended(q, seen, jnp.float32).rearrange(axes).array for each in (cache, exact))
    half_key, half_value = (scales.array.max(axis=-1) / 2 for scales in (cache.key_scales, cache.value_scales))
    score = np.abs(q.array).sum(axis=-1) * half_key[:, :, None, None] / math.sqrt(HeadSize.size)
    largest = np.abs(values.array).max(axis=(2, 3))[:, :, None, None]
    bound = np.expm1(2 * score) * largest + half_value[:, :, None, None] + 1e-5
    assert (np.abs(found - expected).max(axis=-1) <= bound).all()
    # Nothing but the rounding stands between them: the same from the numbers that the codes stand for.
    back = exact.written(
        *(codes * scales for codes, scales in ((cache.keys, cache.key_scales), (cache.values, cache.value_scales))), at
    )
    np.testing.assert_allclose(found, back.attended(q, seen, jnp.float32).rearrange(axes).array, atol=2e-6)
    relative = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < relative < 0.02


def attention(**changes) -> DensityAttentionConfig:
    return DensityAttentionConfig(**{"Embed": Axis("embed", 32), "num_heads": 4, "num_kv_heads": 2, **changes})


@pytest.mark.parametrize("changes", [{"sliding_window": 3, "num_kv_heads": 1}, {"paired_heads": True}])
def test_all_at_once_and_one_by_one_keep_the_same(changes):
    """The pass over all positions attends to exact keys; one by one to those that are kept, within their rounding."""
    config, length = attention(**changes), 12
    module = DensityAttention.init(config, key=jax.random.PRNGKey(0))
    x = drawn(3, Batch, Axis("position", length), config.Embed)

    def one_by_one(kind):
        def step(cache, at):
            out, cache = module.decode(x["position", hax.ds(at, 1)], cache, at)
            return cache, out.array[:, 0]

        empty = empty_cache(config, Batch, length, jnp.float32, kind)
        cache, out = jax.lax.scan(step, empty, jnp.arange(length))
        return cache, np.asarray(out).swapaxes(0, 1)

    whole, filled = module.decode(x, empty_cache(config, Batch, length, jnp.float32, "int8"), jnp.int32(0))
    kept, found = one_by_one("int8")
    exact = one_by_one("compute")[1]
    np.testing.assert_allclose(whole.array, exact, atol=1e-5)
    for one, other in zip(jax.tree.leaves(filled), jax.tree.leaves(kept), strict=True):
        # The two passes round their keys apart, which may move a code by one.
        rtol, atol = (0, 1) if one.dtype == jnp.int8 else (1e-5, 0)
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol, atol)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 0.02


def test_it_weighs_what_it_says():
    config = AttentionConfig(Axis("embed", 1024), num_heads=8, num_kv_heads=2)  # heads of 128
    vectors = 2 * 16 * 2 * 4096
    assert kv_cache_bytes(config, 16, 4096, jnp.bfloat16, "compute") == vectors * 128 * 2
    assert kv_cache_bytes(config, 16, 4096, jnp.bfloat16, "int8") == vectors * (128 + 4)
    small = empty_cache(config, Batch, 8, jnp.float32, "int8")
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(small)) == kv_cache_bytes(config, 2, 8, jnp.float32, "int8")


def test_the_cache_is_never_numbers_as_a_whole():
    """What a product needs beside its arguments is a few tiles."""
    config, length = attention(), 64 * TILE_POSITIONS
    q = jax.ShapeDtypeStruct((2, 2, 2, 1, 8), jnp.float32)
    cache = jax.eval_shape(lambda: empty_cache(config, Batch, length, jnp.float32, "int8"))

    def read(q, cache):
        axes = Batch, Axis("kv_head", 2), Axis("q_heads_per_group", 2), Axis("position", 1), Axis("head_size", 8)
        return cache.attended(hax.named(q, axes), hax.arange(Axis("key_position", length)) >= 0, jnp.float32).array

    memory = jax.jit(read).lower(q, cache).compile().memory_analysis()
    whole = kv_cache_bytes(config, 2, length, jnp.float32, "compute")
    assert memory.temp_size_in_bytes < whole / 2
