"""Matrices in few bits: numbers are those of the formula, products those of the whole matrix; and a model whose
matrices stay so predicts as the one that was unpacked, in less memory."""

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from small_models import memory_bytes
from tiny_run import DEMO, tiny_run

from tomat.model.any_decoder import causal_activations
from tomat.predict.weights.arrays import (
    TILE_ROWS,
    PackedEmbedding,
    PackedLinear,
    PackedMatrix,
    model_of,
    named_arrays,
    with_packed,
)
from tomat.predict.weights.quantise import packed, quantise
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import load_config

RANDOM = np.random.default_rng(0)


def matrix_of(rows: int, columns: int, bits: int, groups: int = 2) -> tuple[PackedMatrix, np.ndarray]:
    """Packed, and by the formula: the table's value of a code times the scale of its group."""
    codes = RANDOM.integers(0, 2**bits, (rows, columns)).astype(np.uint8)
    scales, table = RANDOM.random((rows, groups)).astype(np.float16), RANDOM.normal(size=2**bits).astype(np.float32)
    values = table[codes] * np.repeat(scales.astype(np.float32), columns // groups, axis=1)
    parts = (jnp.asarray(part) for part in (packed(codes, bits), scales, table))
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
    embedding = PackedEmbedding(matrix, Vocab, Embed)
    ids = hax.named(jnp.asarray([[0, 8, 3], [3, 1, 2]]), ("batch", "position"))
    assert np.array_equal(embedding(ids).array, plain(ids).array.astype(np.float32))
    assert np.array_equal(embedding.weight.array, values)


@pytest.mark.parametrize(("scan_layers", "layers"), [("true", 2), ("false", 1)])
def test_a_model_stays_packed_and_says_the_same(scan_layers, layers):
    words = tiny_run(1, 1, "--model.scan_layers", scan_layers, "--model.num_layers", str(layers))
    config = load_config(DEMO, words)
    model = model_initialiser(config, jax.random.PRNGKey(0))()
    arrays = named_arrays(model)
    names = [name for name, array in arrays.items() if array.ndim == 2]
    quantised = {name: quantise(arrays[name], 3, "lut") for name in names}
    assert len(names) == layers * 7 + 1
    compact = with_packed(model, quantised)
    # 3 bits of 32 and a little: scales, tables, norms.
    assert memory_bytes(compact) < 0.16 * memory_bytes(model)

    whole = {name: quantised[name].values() if name in quantised else array for name, array in arrays.items()}
    trainer = config.trainer_config()
    with trainer.use_device_mesh():
        unpacked = model_of(whole, config, trainer.parameter_axis_mapping, trainer.device_mesh)
    tokens = hax.named(jnp.asarray([[4, 7, 2500, 3, 9, 1]] * 2), ("batch", "position"))
    found, expected = (
        np.asarray(causal_activations(each, tokens).rearrange(("batch", "position", "embed")).array)
        for each in (compact, unpacked)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert np.array_equal(compact.get_lm_head().rearrange(("vocab", "embed")).array, whole["model.embed_tokens.weight"])
    if scan_layers == "true":
        other = {**quantised, "model.layers.1.mlp.up_proj.weight": quantise(arrays[names[1]], 2, "lut")}
        assert memory_bytes(with_packed(model, other)) > memory_bytes(compact)
