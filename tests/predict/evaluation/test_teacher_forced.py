import dataclasses
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from haliax.partitioning import set_mesh
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from relative_codec import bonded, relative_codec

from tomat.base.errors import TomatError
from tomat.data.codec.relative import cell_codec
from tomat.data.tokens.patch import tiling_anchors
from tomat.data.tokens.vocabulary import DENSITY_START
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.evaluation.patches import lorenzo, make_patches
from tomat.predict.evaluation.result import FIGURES
from tomat.predict.evaluation.teacher_forced import TeacherForcedConfig, TeacherForcedEvaluator, decode_logits
from tomat.predict.inference.decoding import of_voxels

N_BINS = 64


def evaluate(model, grids, codec, layout, **config):
    by_name = {grid.material_id: grid for grid in grids}
    evaluator = TeacherForcedEvaluator(codec, layout, TeacherForcedConfig(**{"batch_size": 4, **config}))
    return evaluator.evaluate(model, list(by_name), by_name.__getitem__)


def test_oracle_has_exactly_the_codec_floor_and_a_whole_cell_its_electrons(grid, codec, layout, make_oracle):
    found = evaluate(make_oracle(), [grid], codec, layout, whole_cell=True).materials[0]
    assert 0 < found.codec_floor_nmae < 0.1
    assert found.teacher_forced_nmae_median == found.teacher_forced_nmae_mode == found.codec_floor_nmae
    assert found.teacher_forced_nemd == pytest.approx(found.codec_floor_nmae, rel=1e-5)
    assert found.teacher_forced_cross_entropy_nats == pytest.approx(0, abs=1e-6)
    means = codec.decode(codec.encode(grid.rho), decoder="mean")
    assert found.teacher_forced_nmae_mean == pytest.approx(nmae(means, grid.rho), rel=1e-5)
    assert (found.patches, found.voxels) == (3 * 2 * 2, 7 * 5 * 4)
    assert found.reference_charge_e == pytest.approx(grid.electron_count, rel=1e-6)
    rounded = codec.decode(codec.encode(grid.rho)).sum(dtype=np.float64) * grid.voxel_volume_a3
    assert found.teacher_forced_charge_e == pytest.approx(rounded, rel=1e-6)
    assert found.teacher_forced_charge_relative_error == pytest.approx(rounded / grid.electron_count - 1, rel=1e-3)


def test_of_a_relative_codec_all_figures_are_of_densities(layout, make_oracle):
    codec, grid = relative_codec(), bonded(4, (7, 5, 8), 3.5)
    found = evaluate(make_oracle(codec.n_density_tokens), [grid], codec, layout, whole_cell=True).materials[0]
    cell = cell_codec(codec, grid)
    floor = nmae(cell.rounded(grid.rho), grid.rho)
    assert found.teacher_forced_nmae_median == found.codec_floor_nmae == pytest.approx(floor, rel=1e-6)
    assert found.teacher_forced_nemd == pytest.approx(floor, rel=1e-4)
    means = cell.decode(cell.encode(grid.rho), decoder="mean")
    assert found.teacher_forced_nmae_mean == pytest.approx(nmae(means, grid.rho), rel=1e-4)
    rounded = cell.rounded(grid.rho).sum(dtype=np.float64) * grid.voxel_volume_a3
    assert found.teacher_forced_charge_e == pytest.approx(rounded, rel=1e-6)
    # The baselines read densities, as those of any codec, and are rounded to its bins.
    patches = make_patches(grid, tiling_anchors(grid.grid_shape, (3, 3, 3)), layout, codec, tiling=True)
    expected = patches.codec.rounded(lorenzo(patches.visible, float(np.median(grid.rho))))
    counted = patches.counted.reshape(expected.shape)
    assert found.lorenzo_nmae == pytest.approx(nmae(expected[counted], patches.reference[counted]), rel=1e-6)


def test_model_that_knows_nothing_answers_the_middle_bin(grid, codec, layout, decoder):
    blind = eqx.tree_at(lambda m: m.embeddings.token_embeddings.weight, decoder, replace_fn=hax.zeros_like)
    found = evaluate(blind, [grid], codec, layout, whole_cell=True).materials[0]
    table = codec.decode(np.arange(codec.n_density_tokens, dtype=np.uint16))
    # Uniform over an even number of bins: the smallest bin with CDF >= 1/2 is the lower of the two in the middle.
    middle = np.full(grid.grid_shape, table[codec.n_density_tokens // 2 - 1])
    assert found.teacher_forced_nmae_median == nmae(middle, grid.rho)
    expected = np.abs(table[None, :].astype(np.float64) - grid.rho.reshape(-1, 1)).mean(axis=1).sum()
    assert found.teacher_forced_nemd == pytest.approx(expected / grid.rho.sum(dtype=np.float64), rel=1e-5)
    assert found.teacher_forced_cross_entropy_nats == pytest.approx(np.log(codec.n_density_tokens), rel=1e-5)


def test_answer_for_a_voxel_depends_on_earlier_voxels_alone(grid, codec, layout, decoder):
    evaluator = TeacherForcedEvaluator(codec, layout, TeacherForcedConfig(patches_per_material=2, batch_size=4))
    patches = evaluator.patches(decoder, grid)
    voxel = 11
    tokens = patches.tokens.copy()
    position = patches.density_start + voxel
    tokens[:, position] = DENSITY_START + (tokens[:, position].astype(int) + 1) % N_BINS
    before, after = evaluator.predict(decoder, [patches, dataclasses.replace(patches, tokens=tokens)])
    for name in ("mean_e_per_a3", "emd_e_per_a3", "cross_entropy_nats"):
        first, second = (getattr(p, name).reshape(2, -1) for p in (before, after))
        np.testing.assert_array_equal(first[:, : voxel + 1], second[:, : voxel + 1])
        assert (first[:, voxel + 1] != second[:, voxel + 1]).all()


def test_figures_do_not_depend_on_batch_block_or_company(codec, layout, decoder, make_grid):
    grids = [make_grid(shape, name) for shape, name in (((7, 5, 4), "a"), ((6, 6, 5), "b"), ((4, 4, 4), "c"))]
    together = evaluate(decoder, grids, codec, layout, patches_per_material=3, batch_size=4, block_voxels=5)
    assert [m.material_id for m in together.materials] == ["a", "b", "c"]
    for grid, found in zip(grids, together.materials, strict=True):
        alone = evaluate(decoder, [grid], codec, layout, patches_per_material=3, batch_size=1).materials[0]
        for name in FIGURES:
            assert getattr(found, name) == pytest.approx(getattr(alone, name), rel=1e-4), name


def test_smaller_patches_of_a_crowded_cell_share_a_batch(grid, codec, layout, make_oracle):
    crowded = dataclasses.replace(
        grid,
        material_id="crowded",
        atomic_numbers=np.array([14, 8, 8]),
        frac_coords=np.array([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5], [0.8, 0.1, 0.1]]),
    )
    found = evaluate(make_oracle(), [grid, crowded], codec, layout, patches_per_material=2)
    assert [m.voxels for m in found.materials] == [2 * 27, 2 * 8]
    for material in found.materials:
        assert material.teacher_forced_nmae_median == material.codec_floor_nmae


def test_sharded_over_two_devices_equals_one(grid, codec, layout, decoder):
    config = TeacherForcedConfig(patches_per_material=5, batch_size=4)
    plain = TeacherForcedEvaluator(codec, layout, config).evaluate(decoder, ["g"], lambda _: grid)
    with set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))):
        evaluator = TeacherForcedEvaluator(codec, layout, config, axis_mapping={"batch": "data"})
        sharded = evaluator.evaluate(hax.shard(decoder, {}), ["g"], lambda _: grid)
    for name in FIGURES:
        assert getattr(sharded.materials[0], name) == pytest.approx(getattr(plain.materials[0], name), rel=1e-4), name


def test_a_hook_compiles_once(grid, codec, layout, decoder, caplog):
    evaluator = TeacherForcedEvaluator(codec, layout, TeacherForcedConfig(patches_per_material=2, batch_size=4))
    first = evaluator.evaluate(decoder, ["g"], lambda _: grid)
    moved = jax.tree.map(lambda a: a * 1.5 if eqx.is_inexact_array(a) else a, decoder)
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        second = evaluator.evaluate(moved, ["g"], lambda _: grid)
    assert not [message for message in caplog.messages if "_decode_batch" in message or "lambda" in message]
    assert second.materials != first.materials


def test_policy_decides_the_precision(grid, codec, layout, decoder):
    config = TeacherForcedConfig(patches_per_material=2, batch_size=4)
    policy = jmp.get_policy("compute=bfloat16,params=float32,output=bfloat16")
    exact = TeacherForcedEvaluator(codec, layout, config).evaluate(decoder, ["g"], lambda _: grid).materials[0]
    rough = TeacherForcedEvaluator(codec, layout, config, policy=policy)
    found = rough.evaluate(decoder, ["g"], lambda _: grid).materials[0]
    assert found.teacher_forced_nemd != exact.teacher_forced_nemd
    assert found.teacher_forced_nemd == pytest.approx(exact.teacher_forced_nemd, rel=0.05)


def test_errors(grid, codec, layout, make_oracle):
    evaluator = TeacherForcedEvaluator(codec, layout)
    oracle = make_oracle()
    with pytest.raises(TomatError, match="no material"):
        evaluator.evaluate(oracle, [], lambda _: grid)
    small = make_oracle(codec.n_density_tokens - 1)
    with pytest.raises(TomatError, match="2,249 ids and the codec needs 2,250"):
        evaluator.evaluate(small, ["g"], lambda _: grid)
    empty = dataclasses.replace(grid, rho=np.zeros_like(grid.rho))
    with pytest.raises(TomatError, match="material vacuum: .*zero on all"):
        evaluator.evaluate(oracle, ["vacuum"], lambda _: empty)


# 128 bins are one group; 127, 129 and 300 leave a ragged last one.
@settings(max_examples=8, deadline=None)
@given(st.sampled_from([1, 2, 127, 128, 129, 300]), st.integers(0, 2**31))
def test_decoded_figures_equal_their_definitions_and_the_median_has_the_least_error(n_bins, seed):
    generator = np.random.default_rng(seed)
    logits = 4 * generator.normal(size=(5, n_bins)).astype(np.float32)
    medians = np.cumsum(generator.exponential(size=n_bins)).astype(np.float32)
    means = medians + 0.25
    reference = generator.uniform(0, medians[-1], size=5).astype(np.float32)
    bins = generator.integers(0, n_bins, size=5).astype(np.int32)
    found = decode_logits(*(jnp.asarray(a) for a in (logits, reference, bins, medians, means)))
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(axis=-1, keepdims=True)
    scale = float(means[-1])
    np.testing.assert_allclose(found.mean_e_per_a3, p @ means, atol=1e-5 * scale)
    distance = np.abs(medians[None, :] - reference[:, None])
    np.testing.assert_allclose(found.emd_e_per_a3, (p * distance).sum(-1), atol=1e-5 * scale)
    np.testing.assert_allclose(found.cross_entropy_nats, -np.log(p[np.arange(len(bins)), bins]), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found.mode_bin, logits.argmax(-1))
    # Expected error of answering bin k, [voxel, k].
    expected = np.einsum("vj,kj->vk", p, np.abs(medians[:, None] - medians[None, :]).astype(np.float64))
    least = expected.min(axis=-1)
    assert (expected[np.arange(len(bins)), np.asarray(found.median_bin)] <= least + 1e-5 * medians[-1]).all()


def test_large_logits_do_not_overflow():
    tables = jnp.array([1.0, 2.0, 3.0])
    found = decode_logits(jnp.array([[1e4, -1e4, 0.0]]), jnp.array([1.0]), jnp.array([0]), tables, tables)
    assert [float(x[0]) for x in found] == [0, 0, 1.0, 0.0, 0.0]


def test_memory_grows_with_the_block_and_not_with_the_patch():
    def temp_bytes(voxels: int, block: int) -> int:
        def decoded(hidden, head, places, reference, bins, medians, means):
            decode = partial(decode_logits, medians=medians, means=means)
            return of_voxels(hidden, head, places, decode, reference, bins, block_voxels=block)

        shapes = [(2, voxels + 8, 16), (4096, 16), (2, voxels), (2, voxels), (2, voxels), (4096,), (4096,)]
        dtypes = [jnp.float32, jnp.float32, jnp.int32, jnp.float32, jnp.int32, jnp.float32, jnp.float32]
        inputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        compiled = jax.jit(decoded).lower(*inputs).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    block_bytes = 2 * 32 * 4096 * 4
    assert temp_bytes(1024, 32) < temp_bytes(128, 32) + block_bytes
    # All logits at once would be 32 blocks.
    assert temp_bytes(1024, 32) < 8 * block_bytes
    assert temp_bytes(1024, 1024) > 32 * block_bytes
