import dataclasses

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.predict.evaluation.picture import DensityPlane, draw_plane, most_structured_plane, teacher_forced_plane
from tomat.predict.evaluation.teacher_forced import TeacherForcedConfig, TeacherForcedEvaluator
from tomat.predict.inference.slices import atoms_near, corners_a


@pytest.fixture(scope="module")
def plane(grid, codec, layout, decoder) -> DensityPlane:
    evaluator = TeacherForcedEvaluator(codec, layout, TeacherForcedConfig(batch_size=4))
    return teacher_forced_plane(evaluator, decoder, grid)


def test_plane_holds_the_reference_and_the_models_answer(plane, grid, codec):
    assert plane.plane == most_structured_plane(grid)
    np.testing.assert_array_equal(plane.reference, grid.rho[:, :, plane.plane])
    assert plane.predicted.shape == (7, 5)
    assert np.isin(plane.predicted, codec.decode(np.arange(64, dtype=np.uint16))).all()


@pytest.mark.parametrize(("chosen", "boxes"), [(0, False), (2, True)])
def test_tiles_lie_where_they_belong(grid, codec, layout, chosen, boxes, make_oracle):
    if boxes:
        layout = dataclasses.replace(layout, context=64, max_side_difference=1)
        assert layout.patch_shape(len(grid.atomic_numbers)) == (2, 3, 3)
    evaluator = TeacherForcedEvaluator(codec, layout, TeacherForcedConfig(batch_size=4))
    shifted = dataclasses.replace(grid, rho=np.roll(grid.rho, chosen - most_structured_plane(grid), axis=2))
    found = teacher_forced_plane(evaluator, make_oracle(), shifted)
    assert found.plane == chosen
    np.testing.assert_array_equal(found.predicted, codec.decode(codec.encode(shifted.rho[:, :, chosen])))


def test_a_voxel_is_drawn_around_its_place_where_an_atom_there_is(grid):
    nx, ny, nz = grid.grid_shape
    there = dataclasses.replace(grid, atomic_numbers=np.array([8]), frac_coords=np.array([[2 / nx, 3 / ny, 1 / nz]]))
    ((_, place),) = atoms_near(there, 1)
    middles = [each[2:4, 3:5].mean() for each in corners_a(there)]
    np.testing.assert_allclose(middles, place, atol=1e-9)


def test_same_plane_gives_the_same_bytes(plane, tmp_path):
    other = dataclasses.replace(plane, predicted=plane.predicted + np.float32(0.1))
    written = set()
    for ending in (".png", ".svg", ".pdf"):
        first, second = (draw_plane(plane, tmp_path / f"{name}{ending}").read_bytes() for name in ("a", "b"))
        assert first == second and len(first) > 10_000
        written |= {f"a{ending}", f"b{ending}"}
    assert draw_plane(other, tmp_path / "c.png").read_bytes() != (tmp_path / "a.png").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == written | {"c.png"}


def test_refuses_no_such_format_and_a_model_that_does_not_reach_the_plane(
    plane, grid, codec, layout, make_decoder, tmp_path
):
    evaluator = TeacherForcedEvaluator(codec, layout)
    with pytest.raises(TomatError, match="expected one of .png, .svg, .pdf"):
        draw_plane(plane, tmp_path / "plane.bmp")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TomatError, match="too few for whole patches of 3"):
        teacher_forced_plane(evaluator, make_decoder(max_seq_len=60), grid)
