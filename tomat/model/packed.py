"""Matrices that stay in few bits in memory: unpacked where they are used, a tile of rows at a time.

A number of a row is table[code] times the scale of its group, as `predict/weights/quantise.py` has it. Rows begin at
whole bytes here, so that a tile of them, or the row of one id, can be taken out alone.
"""

from __future__ import annotations

from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import AxisSpec
from haliax.jax_utils import named_call
from haliax.util import ensure_tuple
from jax import lax

TILE_ROWS = 256
"""Rows whose numbers exist at once in a product. (A choice: 1 MiB in float32 where a row has 1,024 numbers.)"""


class PackedMatrix(eqx.Module):
    """A matrix [out, in], or a stack of such with a leading axis that a scan over layers takes apart."""

    codes: jax.Array
    """uint8 [out, bytes of a row]: codes one behind another, lowest bit first."""
    scales: jax.Array
    """float [out, in / group]; float16, until a policy of precision has made it the compute type."""
    table: jax.Array
    """float [2^bits], of the compute type."""
    columns: int = eqx.field(static=True)
    bits: int = eqx.field(static=True)

    def rows(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Numbers, [..., in], in the type of the scales, of rows of codes, uint8 [..., bytes of a row], and scales,
        [..., in / group]."""
        bits = (codes[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        bits = bits.reshape(*codes.shape[:-1], -1)[..., : self.columns * self.bits]
        each = bits.reshape(*bits.shape[:-1], self.columns, self.bits).astype(jnp.int32)
        index = jnp.sum(each << jnp.arange(self.bits, dtype=jnp.int32), axis=-1)
        return self.table.astype(scales.dtype)[index] * jnp.repeat(scales, self.columns // scales.shape[-1], axis=-1)

    def whole(self, dtype: jnp.dtype) -> jax.Array:
        return self.rows(self.codes, self.scales.astype(dtype))

    def product(self, x: jax.Array) -> jax.Array:
        """x times the transposed matrix, [n, in] to [n, out], in the type of x."""
        rows = self.codes.shape[0]
        scales = self.scales.astype(x.dtype)
        n_tiles = -(-rows // TILE_ROWS)
        if n_tiles == 1:
            return x @ self.rows(self.codes, scales).T
        tile = -(-rows // n_tiles)
        # The last tile ends with the matrix: what it shares with the one before is computed twice, and equal.
        starts = jnp.minimum(jnp.arange(n_tiles) * tile, rows - tile)

        def one(start: jax.Array) -> jax.Array:
            cut = (lax.dynamic_slice_in_dim(each, start, tile, axis=0) for each in (self.codes, scales))
            return x @ self.rows(*cut).T

        parts = lax.map(one, starts)
        out = jnp.zeros((rows, x.shape[0]), x.dtype)
        for index in range(n_tiles):
            start = min(index * tile, rows - tile)
            out = out.at[start : start + tile].set(parts[index].T)
        return out.T


def packed_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [out, ceil(in * bits / 8)]: `PackedMatrix.codes` of codes, uint8 [out, in]."""
    single = np.unpackbits(codes[..., None], axis=-1, bitorder="little", count=bits)
    return np.packbits(single.reshape(len(codes), -1), axis=-1, bitorder="little")


class PackedLinear(eqx.Module):
    """In the place of Haliax's `Linear`, with the same result to rounding."""

    matrix: PackedMatrix
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)

    @named_call
    def __call__(self, inputs: NamedArray, *, key=None) -> NamedArray:
        del key
        taken, given = (cast(tuple[Axis, ...], ensure_tuple(axes)) for axes in (self.In, self.Out))
        names = {axis.name for axis in taken}
        rest = tuple(axis for axis in inputs.axes if axis.name not in names)
        x = inputs.rearrange((*rest, *taken)).array.reshape(-1, self.matrix.columns)
        shape = tuple(axis.size for axis in (*rest, *given))
        result = hax.auto_sharded(NamedArray(self.matrix.product(x).reshape(shape), (*rest, *given)))
        return result if self.bias is None else hax.auto_sharded(result + self.bias)


class PackedEmbedding(eqx.Module):
    """In the place of Haliax's `Embedding`: rows of ids are unpacked alone; as the head of tied logits all are, while
    they are used."""

    matrix: PackedMatrix
    Vocab: Axis = eqx.field(static=True)
    Embed: Axis = eqx.field(static=True)

    def __call__(self, input_ids: NamedArray, *, key=None) -> NamedArray:
        return self.embed(input_ids)

    @named_call
    def embed(self, input_ids: NamedArray) -> NamedArray:
        """Rows of ids, integer [...], as [..., embed]."""
        ids, matrix = input_ids.array, self.matrix
        scales = matrix.scales[ids].astype(matrix.table.dtype)
        return NamedArray(matrix.rows(matrix.codes[ids], scales), (*input_ids.axes, self.Embed))

    @property
    def weight(self) -> NamedArray:
        """[vocab, embed]."""
        return NamedArray(self.matrix.whole(self.matrix.table.dtype), (self.Vocab, self.Embed))

    def unembed(self, x: NamedArray) -> NamedArray:
        return x.dot(self.weight, axis=self.Embed)
