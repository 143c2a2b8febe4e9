"""Keys and values that decoding keeps: as attention takes them, or in 8 bits.

In 8 bits every vector of a head at a position is codes, whole numbers from -127 to 127, and one scale, a 127th of its
largest magnitude. The scale can be taken out of the sum over the vector, so the cache as a whole is never turned back
into floats: the score of a key is the query times the codes, times the scale; a weight is multiplied by the scale of
its value, and then by the codes. On a CPU XLA would still turn a whole cache into floats to multiply it (measured: as
many bytes as the cache that it replaces), so products take `TILE_POSITIONS` at a time, or all if they are fewer than
twice as many.

Shapes: B batch, H key-value heads, G queries of a head, P queried positions, K kept positions, D head size.
"""

import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax import lax
from levanter.layers.attention import AttentionBackend, AttentionConfig, dot_product_attention

from tomat.model.causal_blocks import MASKED

TILE_POSITIONS = 128
"""Kept positions whose floats exist at once in a product. (A choice: the lanes of a TPU's vector registers.)"""

LARGEST_CODE = 127
"""Codes are symmetric: -128 is not used."""

_F32 = jnp.float32


class KeysValues(eqx.Module):
    """Keys and values of a layer as attention takes them; with paired heads half the heads, and twice the positions."""

    keys: NamedArray
    """[batch, kv_head, key_position, head_size], normalised and rotated."""
    values: NamedArray

    def written(self, keys: NamedArray, values: NamedArray, position: jax.Array) -> "KeysValues":
        """The cache with the given keys and values in the positions from `position` on."""
        return KeysValues(_put(self.keys, keys, position), _put(self.values, values, position))

    def attended(self, q: NamedArray, seen: NamedArray, dtype) -> NamedArray:
        """What attention gives for `q`, [batch, kv_head, q_heads_per_group, position, head_size], normalised and
        rotated, not scaled; `seen` is bool [key_position], or [position, key_position]."""
        arrays, how = (q, self.keys, self.values, seen), AttentionBackend.VANILLA
        names = "position", "key_position", "head_size"
        return dot_product_attention(*names, *arrays, attention_dtype=dtype, attn_backend=how)


class Int8KeysValues(eqx.Module):
    """As `KeysValues`, in 8 bits. Scales are float32: in bfloat16 their rounding error, up to 2^-9, would add to that
    of every code, up to 1/254 of the largest, to save 2 of the 132 bytes of a vector of 128."""

    keys: NamedArray
    """int8 [batch, kv_head, key_position, head_size]."""
    values: NamedArray
    key_scales: NamedArray
    """float32 [batch, kv_head, key_position]."""
    value_scales: NamedArray

    def written(self, keys: NamedArray, values: NamedArray, position: jax.Array) -> "Int8KeysValues":
        """As `KeysValues.written`: what is given is quantised, what is there stays as it is."""
        (key_codes, key_scales), (value_codes, value_scales) = quantised(keys), quantised(values)
        before = self.keys, self.values, self.key_scales, self.value_scales
        new = key_codes, value_codes, key_scales, value_scales
        return Int8KeysValues(*(_put(whole, part, position) for whole, part in zip(before, new, strict=True)))

    def attended(self, q: NamedArray, seen: NamedArray, dtype) -> NamedArray:
        """As `KeysValues.attended`, in float32; factors of products are `dtype`, which holds every code exactly."""
        axes = ("batch", "kv_head", "q_heads_per_group", "position", "head_size")
        bhgpd = q.rearrange(axes)
        scaled = (bhgpd.array.astype(_F32) / math.sqrt(q.axis_size("head_size"))).astype(dtype)
        key_scales, value_scales = (scales.array[:, :, None, None] for scales in (self.key_scales, self.value_scales))
        scores = _scores(scaled, self.keys.array) * key_scales
        weights = jax.nn.softmax(jnp.where(seen.array, scores, MASKED), axis=-1) * value_scales
        read = _weighted_sum(weights.astype(dtype), self.values.array)
        return hax.auto_sharded(NamedArray(read.astype(q.dtype), bhgpd.axes))


KvCache = KeysValues | Int8KeysValues


def empty_cache(config: AttentionConfig, Batch: Axis, length: int, dtype, kv_cache_dtype: str) -> KvCache:
    """Zeros for one layer and `length` positions: in 8 bits if `kv_cache_dtype` is int8, else in `dtype`."""
    # Heads before positions, as attention contracts them: the other order is copied at each step.
    heads = 2 if getattr(config, "paired_heads", False) else 1
    Heads = config.KVHeads.resize(config.KVHeads.size // heads)
    axes = Batch, Heads, Axis("key_position", heads * length), config.HeadSize

    def two(axes: tuple[Axis, ...], dtype) -> list[NamedArray]:
        return [hax.auto_sharded(hax.zeros(axes, dtype)) for _ in range(2)]

    if kv_cache_dtype == "int8":
        return Int8KeysValues(*two(axes, jnp.int8), *two(axes[:-1], _F32))
    return KeysValues(*two(axes, dtype))


def kv_cache_bytes(config: AttentionConfig, batch: int, length: int, dtype, kv_cache_dtype: str) -> int:
    """Bytes of `empty_cache` for one layer, from its shapes."""
    shapes = eqx.filter_eval_shape(empty_cache, config, Axis("batch", batch), length, dtype, kv_cache_dtype)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def quantised(vectors: NamedArray) -> tuple[NamedArray, NamedArray]:
    """Codes and scales of vectors along `head_size`: int8 with their axes, and float32 without `head_size`. Up to
    rounding, a code times its scale is within half a scale of the number; a vector of zeros has scale 0."""
    exact = vectors.astype(_F32)
    scales = hax.max(hax.abs(exact), "head_size") / LARGEST_CODE
    codes = hax.round(exact / hax.where(scales > 0, scales, 1.0))
    return hax.clip(codes, -LARGEST_CODE, LARGEST_CODE).astype(jnp.int8), scales


def _put(whole: NamedArray, part: NamedArray, position: jax.Array) -> NamedArray:
    """`whole` with `part` from `position` on."""
    axis = [axis.name for axis in whole.axes].index("key_position")
    part = part.rearrange([axis.name for axis in whole.axes]).astype(whole.dtype)
    array = lax.dynamic_update_slice_in_dim(whole.array, part.array, position, axis)
    return hax.auto_sharded(NamedArray(array, whole.axes))


def _scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """float32 [B, H, G, P, K] of queries [B, H, G, P, D] and codes [B, H, K, D]."""

    def of(start: jax.Array | int, size: int) -> jax.Array:
        tile = lax.dynamic_slice_in_dim(keys, start, size, axis=2).astype(q.dtype)
        return jnp.einsum("bhgpd,bhkd->bhgpk", q, tile, preferred_element_type=_F32)

    whole, rest = divmod(keys.shape[2], TILE_POSITIONS)
    if whole <= 1:
        return of(0, keys.shape[2])
    tiles = lax.map(lambda tile: of(tile * TILE_POSITIONS, TILE_POSITIONS), jnp.arange(whole))
    scores = jnp.moveaxis(tiles, 0, -2).reshape(*q.shape[:-1], whole * TILE_POSITIONS)
    return scores if rest == 0 else jnp.concatenate([scores, of(whole * TILE_POSITIONS, rest)], axis=-1)


def _weighted_sum(weights: jax.Array, values: jax.Array) -> jax.Array:
    """float32 [B, H, G, P, D] of weights [B, H, G, P, K] and codes [B, H, K, D]."""

    def of(start: jax.Array | int, size: int) -> jax.Array:
        tile = lax.dynamic_slice_in_dim(values, start, size, axis=2).astype(weights.dtype)
        part = lax.dynamic_slice_in_dim(weights, start, size, axis=4)
        return jnp.einsum("bhgpk,bhkd->bhgpd", part, tile, preferred_element_type=_F32)

    whole, rest = divmod(values.shape[2], TILE_POSITIONS)
    if whole <= 1:
        return of(0, values.shape[2])
    last = of(whole * TILE_POSITIONS, rest) if rest else jnp.zeros((*weights.shape[:-1], values.shape[-1]), _F32)
    return lax.fori_loop(0, whole, lambda tile, sum_: sum_ + of(tile * TILE_POSITIONS, TILE_POSITIONS), last)
