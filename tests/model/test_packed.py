"""Layers in few bits: the numbers are those of the formula, a product is that of the whole matrix."""

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray

from tomat.model.packed import TILE_ROWS, PackedEmbedding, PackedLinear, PackedMatrix, packed_rows

RANDOM = np.random.default_rng(0)


def matrix_of(rows: int, columns: int, bits: int, groups: int = 2) -> tuple[PackedMatrix, np.ndarray]:
    """Packed, and by the formula: the table's value of a code times the scale of its group."""
    codes = RANDOM.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    scales, table = RANDOM.random((rows, groups)).astype(np.float16), RANDOM.normal(size=2**bits).astype(np.float32)
    values = table[codes] * np.repeat(scales.astype(np.float32), columns // groups, axis=1)
    parts = (jnp.asarray(part) for part in (packed_rows(codes, bits), scales, table))
    return PackedMatrix(*parts, columns, bits), values


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("rows, columns", [(5, 6), (TILE_ROWS + 3, 10)])
def test_a_product_is_that_of_the_formula(bits, rows, columns):
    matrix, values = matrix_of(rows, columns, bits)
    assert matrix.codes.shape == (rows, -(-columns * bits // 8))
    np.testing.assert_array_equal(matrix.whole(jnp.float32), values)
    x = RANDOM.normal(size=(7, columns)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(lambda x: matrix.product(x))(x), x @ values.T, rtol=2e-5, atol=2e-6)


def test_a_layer_is_haliaxs():
    In, Out = (Axis("a", 4), Axis("b", 5)), (Axis("c", 3), Axis("d", 2))
    matrix, values = matrix_of(6, 20, 3)
    bias = hax.random.normal(jax.random.PRNGKey(0), Out)
    plain = hnn.Linear(NamedArray(jnp.asarray(values.reshape(3, 2, 4, 5)), (*Out, *In)), bias, In, Out)
    x = hax.random.normal(jax.random.PRNGKey(1), (In[1], Axis("position", 7), In[0], Axis("batch", 2)))
    found = PackedLinear(matrix, bias, In, Out)(x)
    expected = plain(x)
    np.testing.assert_allclose(found.array, expected.rearrange(found.axes).array, rtol=2e-5, atol=2e-6)


def test_an_embedding_is_haliaxs():
    Vocab, Embed = Axis("vocab", 9), Axis("embed", 8)
    matrix, values = matrix_of(9, 8, 4)
    plain = hnn.Embedding(NamedArray(jnp.asarray(values), (Vocab, Embed)), Vocab, Embed)
    packed = PackedEmbedding(matrix, Vocab, Embed)
    ids = hax.named(jnp.asarray([[0, 8, 3], [3, 1, 2]]), ("batch", "position"))
    assert np.array_equal(packed(ids).array, plain(ids).array.astype(np.float32))
    assert np.array_equal(packed.weight.array, values)
    x = hax.random.normal(jax.random.PRNGKey(1), (Axis("batch", 2), Embed))
    np.testing.assert_allclose(packed.unembed(x).array, plain.unembed(x).array, rtol=1e-5)
