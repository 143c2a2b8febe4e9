import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.predict.evaluation.decoding import decode_hidden, decode_logits
from tomat.predict.inference.choice import quantile_bin

# 128 bins are one group; 127, 129 and 300 leave a ragged last one.
SIZES = [1, 2, 127, 128, 129, 300]


def example(n_bins: int, seed: int, voxels: int = 5):
    generator = np.random.default_rng(seed)
    logits = 4 * generator.normal(size=(voxels, n_bins))
    medians = np.cumsum(generator.exponential(size=n_bins)).astype(np.float32)
    reference = generator.uniform(0, medians[-1], size=voxels).astype(np.float32)
    return logits.astype(np.float32), medians, reference


def test_median_at_exactly_one_half_is_the_lower_bin():
    # Powers of two: no rounding, so the rule itself is seen.
    weights = np.zeros((3, 260), dtype=np.float32)
    weights[0, [3, 200]] = 1  # CDF reaches 1/2 at bin 3
    weights[1, [3, 7, 200]] = 1, 2, 1  # 1/4, 3/4, 1
    weights[2, [127, 128]] = 1  # the half lies at the end of a group
    np.testing.assert_array_equal(quantile_bin(jnp.asarray(weights), 0.5), [3, 7, 127])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**31))
def test_median_decoder_minimises_the_expected_absolute_error(n_bins, seed):
    logits, medians, reference = example(n_bins, seed)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    found = np.asarray(quantile_bin(jnp.asarray(np.exp(logits - logits.max(axis=-1, keepdims=True))), 0.5))
    # Expected error of answering bin k, [voxel, k].
    expected = np.einsum("vj,kj->vk", p, np.abs(medians[:, None] - medians[None, :]).astype(np.float64))
    assert (expected[np.arange(len(found)), found] <= expected.min(axis=-1) + 1e-5 * medians[-1]).all()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(SIZES), st.integers(0, 2**31))
def test_decoded_figures_equal_their_definitions(n_bins, seed):
    logits, medians, reference = example(n_bins, seed)
    means = medians + 0.25
    bins = np.random.default_rng(seed).integers(0, n_bins, size=len(reference)).astype(np.int32)
    found = decode_logits(*(jnp.asarray(a) for a in (logits, reference, bins, medians, means)))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    scale = float(means[-1])
    np.testing.assert_allclose(found.mean_e_per_a3, p @ means, atol=1e-5 * scale)
    distance = np.abs(medians[None, :] - reference[:, None])
    np.testing.assert_allclose(found.emd_e_per_a3, (p * distance).sum(-1), atol=1e-5 * scale)
    np.testing.assert_allclose(found.cross_entropy_nats, -np.log(p[np.arange(len(bins)), bins]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.mode_bin, logits.argmax(-1))


def test_large_logits_do_not_overflow():
    logits = jnp.array([[1e4, -1e4, 0.0]])
    tables = jnp.array([1.0, 2.0, 3.0])
    found = decode_logits(logits, jnp.array([1.0]), jnp.array([0]), tables, tables)
    assert (int(found.median_bin[0]), int(found.mode_bin[0])) == (0, 0)
    assert [float(x[0]) for x in found[2:]] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("block_voxels", [1, 4, 5, 27, 100])
def test_blocks_change_nothing_and_each_voxel_reads_the_position_before_it(block_voxels):
    generator = np.random.default_rng(0)
    sequences, positions, embed, voxels, n_bins = 3, 40, 8, 27, 50
    hidden = generator.normal(size=(sequences, positions, embed)).astype(np.float32)
    head = generator.normal(size=(n_bins, embed)).astype(np.float32)
    start = np.array([1, 7, 12], dtype=np.int32)
    tables = np.cumsum(generator.exponential(size=n_bins)).astype(np.float32)
    reference = generator.uniform(0, 9, size=(sequences, voxels)).astype(np.float32)
    bins = generator.integers(0, n_bins, size=(sequences, voxels)).astype(np.int32)
    arrays = (hidden, head, start, reference, bins, tables, tables)
    found = decode_hidden(*(jnp.asarray(a) for a in arrays), block_voxels=block_voxels)
    for row in range(sequences):
        logits = hidden[row, start[row] - 1 : start[row] - 1 + voxels] @ head.T
        single = (logits, reference[row], bins[row], tables, tables)
        expected = decode_logits(*(jnp.asarray(a) for a in single))
        np.testing.assert_array_equal(found.median_bin[row], expected.median_bin)
        np.testing.assert_array_equal(found.mode_bin[row], expected.mode_bin)
        np.testing.assert_allclose(found.emd_e_per_a3[row], expected.emd_e_per_a3, rtol=1e-5)
        np.testing.assert_allclose(found.cross_entropy_nats[row], expected.cross_entropy_nats, rtol=1e-4, atol=1e-5)


def test_memory_grows_with_the_block_and_not_with_the_patch():
    def temp_bytes(voxels: int, block: int) -> int:
        shapes = [(2, voxels + 8, 16), (4096, 16), (2,), (2, voxels), (2, voxels), (4096,), (4096,)]
        dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.float32, jnp.float32]
        inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        compiled = jax.jit(lambda *a: decode_hidden(*a, block_voxels=block)).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    block_bytes = 2 * 32 * 4096 * 4
    assert temp_bytes(1024, 32) < temp_bytes(128, 32) + block_bytes
    # All logits at once would be 32 blocks.
    assert temp_bytes(1024, 32) < 8 * block_bytes
    assert temp_bytes(1024, 1024) > 32 * block_bytes
