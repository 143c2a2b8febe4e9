import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.codec.base import UNIT_RHO_TIMES_VOLUME
from tomat.data.codec.relative import cell_codec
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.tokens.patch import decode_sequence, tiling_anchors
from tomat.predict.evaluation.patches import (
    constant_median,
    copy_previous,
    inside_cell,
    lorenzo,
    make_patches,
    predict_baselines,
    random_anchors,
)

sides = st.tuples(*[st.integers(1, 9)] * 3)


@settings(max_examples=40, deadline=None)
@given(sides, sides)
def test_tiling_counts_every_voxel_once(grid_shape, patch_shape):
    anchors = tiling_anchors(grid_shape, patch_shape)
    inside = inside_cell(anchors, grid_shape, patch_shape)
    times = np.zeros(grid_shape, dtype=int)
    offsets = np.stack(np.unravel_index(np.arange(inside.shape[1]), patch_shape), axis=-1)
    for anchor, counted in zip(anchors, inside, strict=True):
        np.add.at(times, tuple((anchor + offsets[counted]).T), 1)
    assert (times == 1).all()


@pytest.mark.parametrize("tiling", [False, True])
def test_a_patch_larger_than_the_cell_counts_the_cell_once(make_grid, codec, layout, tiling):
    """2 x 5 x 2 voxels in a patch of 3 x 3 x 3: what wraps round has been read, and would be copied without error."""
    grid = make_grid((2, 5, 2))
    anchors = tiling_anchors(grid.grid_shape, (3, 3, 3)) if tiling else np.array([[1, 3, 0], [0, 4, 1]])
    patches = make_patches(grid, anchors, layout, codec, tiling=tiling)
    assert patches.n_voxels == (20 if tiling else 2 * 2 * 3 * 2)
    counted = patches.counted.reshape(patches.reference.shape)
    for row, anchor in enumerate(anchors):
        x, y, z = (anchor + np.argwhere(counted[row])).T
        voxels = list(zip(x % 2, y % 5, z % 2, strict=True))
        assert len(set(voxels)) == len(voxels)
        np.testing.assert_array_equal(patches.reference[row][counted[row]], [grid.rho[voxel] for voxel in voxels])


def test_random_anchors_belong_to_seed_and_material_alone():
    drawn = random_anchors("mp-1", (5, 6, 7), 210, seed=3)
    np.testing.assert_array_equal(drawn, random_anchors("mp-1", (5, 6, 7), 210, seed=3))
    # As many as voxels: without replacement, each once.
    assert len(np.unique(drawn, axis=0)) == 210
    assert (drawn >= 0).all() and (drawn < (5, 6, 7)).all()
    for other in (random_anchors("mp-2", (5, 6, 7), 210, seed=3), random_anchors("mp-1", (5, 6, 7), 210, seed=4)):
        assert (other != drawn).any()
    assert random_anchors("mp-1", (2, 1, 1), 5, seed=3).shape == (5, 3)


def test_patches_hold_what_the_sequence_says_and_the_true_density(grid, codec, layout):
    anchors = random_anchors(grid.material_id, grid.grid_shape, 6, seed=0)
    patches = make_patches(grid, anchors, layout, codec)
    assert (patches.n_patches, patches.n_voxels, patches.reference.shape) == (6, 6 * 27, (6, 3, 3, 3))
    for row, anchor in enumerate(anchors):
        decoded = decode_sequence(patches.tokens[row], layout, codec)
        np.testing.assert_array_equal(decoded.density_tokens.ravel(), patches.true_bins[row])
        np.testing.assert_array_equal(decoded.values, patches.visible[row])
        np.testing.assert_array_equal(patches.reference[row], grid.patch(anchor, (3, 3, 3)))
    # The reference is not the codec's value, or its own error would be left out.
    assert (patches.reference != patches.visible).mean() > 0.9


def test_voxels_beyond_the_models_sequence_are_not_counted(grid, codec, layout):
    anchors = np.zeros((1, 3), dtype=np.int64)
    whole = make_patches(grid, anchors, layout, codec)
    cut = make_patches(grid, anchors, layout, codec, seq_len=whole.density_start + 10)
    assert cut.tokens.shape == (1, whole.density_start + 10)
    np.testing.assert_array_equal(np.flatnonzero(cut.counted[0]), np.arange(10))
    with pytest.raises(TomatError, match="0 of 27 voxels"):
        make_patches(grid, anchors, layout, codec, seq_len=whole.density_start)
    with pytest.raises(TomatError, match="random patches instead of the whole cell"):
        make_patches(grid, anchors, layout, codec, seq_len=whole.density_start + 26, tiling=True)


def test_refuses_codecs_it_has_no_meaning_for(grid, codec, layout):
    anchors = np.zeros((1, 3), dtype=np.int64)
    with pytest.raises(TomatError, match="2 tokens a voxel"):
        make_patches(grid, anchors, layout, TwoTokenCodec())
    with pytest.raises(TomatError, match=UNIT_RHO_TIMES_VOLUME):
        make_patches(grid, anchors, layout, dataclasses.replace(codec, unit=UNIT_RHO_TIMES_VOLUME))


CONSTANT = 7.0
VALUES = np.random.default_rng(0).uniform(1, 2, size=(2, 4, 3, 5)).astype(np.float32)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**31))
def test_lorenzo_is_exact_where_the_mixed_third_difference_vanishes(seed):
    # a(x,y) + b(x,z) + c(y,z): any functions of two coordinates each.
    generator = np.random.default_rng(seed)
    a, b, c = (generator.uniform(1, 2, shape) for shape in ((5, 4, 1), (5, 1, 6), (4, 6)))
    values = (a + b + c)[None].astype(np.float32)
    predicted = lorenzo(values, CONSTANT)
    np.testing.assert_allclose(predicted[:, 1:, 1:, 1:], values[:, 1:, 1:, 1:], rtol=1e-5)
    # One voxel off breaks its own prediction by nothing, and that of the voxel after it by as much.
    values[0, 2, 2, 2] += 1
    moved = lorenzo(values, CONSTANT)
    assert moved[0, 2, 2, 2] == predicted[0, 2, 2, 2]
    assert moved[0, 2, 2, 3] == pytest.approx(predicted[0, 2, 2, 3] + 1, rel=1e-5)


def test_lorenzo_falls_to_lower_order_on_faces_edges_and_the_first_voxel():
    values, predicted = VALUES, lorenzo(VALUES, CONSTANT)
    assert (predicted[:, 0, 0, 0] == CONSTANT).all()
    np.testing.assert_allclose(predicted[:, 0, 0, 1:], values[:, 0, 0, :-1], rtol=1e-6)
    np.testing.assert_allclose(predicted[:, 1:, 0, 0], values[:, :-1, 0, 0], rtol=1e-6)
    plane = values[:, 0, :-1, 1:] + values[:, 0, 1:, :-1] - values[:, 0, :-1, :-1]
    np.testing.assert_allclose(predicted[:, 0, 1:, 1:], np.maximum(plane, 0), rtol=1e-5)
    steep = np.ones((1, 2, 2, 2), dtype=np.float32)
    steep[0, 0, 0, 0] = 9
    assert lorenzo(steep, CONSTANT)[0, 0, 1, 1] == 0  # 1 + 1 - 9: no density is negative


@pytest.mark.parametrize("predict", [copy_previous, lorenzo, constant_median])
def test_no_baseline_sees_a_later_voxel(predict):
    for voxel in (0, 7, 30):
        changed = VALUES.reshape(2, -1).copy()
        changed[:, voxel:] += 1
        before, after = (predict(v.reshape(VALUES.shape), CONSTANT).reshape(2, -1) for v in (VALUES, changed))
        np.testing.assert_array_equal(before[:, : voxel + 1], after[:, : voxel + 1])


def test_baselines_are_rounded_to_the_codec(grid, codec):
    cell = cell_codec(codec, grid)
    visible = cell.rounded(grid.rho[None])
    table = codec.decode(np.arange(codec.n_density_tokens, dtype=np.uint16))
    for name, predicted in predict_baselines(visible, cell, 0.5).items():
        assert predicted.shape == visible.shape, name
        assert np.isin(predicted, table).all(), name
    copied = predict_baselines(visible, cell, 0.5)["copy_previous"]
    np.testing.assert_array_equal(copied.ravel()[1:], visible.ravel()[:-1])
