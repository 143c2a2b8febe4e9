"""The field model: the promolecule at first and far from atoms, and the same however a crystal is written."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.transform import Rotation
from small_field import CELL, GRID, PROMOLECULE, TABLES, VOXELS, fresh, learnt, row_of

from tomat.data.density.crystal import Crystal
from tomat.model.field import LEAST_DEVIATION, FieldModel
from tomat.model.nearby_atoms import ScatteredAtoms


@eqx.filter_jit
def density(model: FieldModel, row: ScatteredAtoms) -> jax.Array:
    members, _ = model.densities(row, TABLES)
    return sum(each.array[0] for each in members) / len(members)


@pytest.fixture(scope="module")
def model() -> FieldModel:
    return learnt()


def test_it_begins_as_the_promolecule(model):
    atoms = PROMOLECULE.density(CELL, GRID).ravel()[VOXELS]
    row = row_of(CELL, GRID, VOXELS)
    np.testing.assert_allclose(density(fresh(), row), atoms, rtol=1e-4)
    assert np.abs(np.log(density(model, row) / atoms)).mean() > 0.02


def written_otherwise() -> dict[str, tuple[Crystal, tuple[int, int, int], np.ndarray]]:
    lattice, numbers, coords = CELL.lattice, CELL.atomic_numbers, CELL.frac_coords
    turn = Rotation.random(random_state=1).as_matrix()
    index = np.stack(np.unravel_index(VOXELS, GRID), axis=-1)
    shift, wide = np.array([1, 3, 5]), (12, 7, 8)
    doubled = np.vstack([coords / [2, 1, 1], coords / [2, 1, 1] + [0.5, 0, 0]])
    return {
        "turned": (Crystal(lattice @ turn.T, numbers, coords), GRID, VOXELS),
        "mirrored": (Crystal(lattice * [1, 1, -1], numbers, coords), GRID, VOXELS),
        "other order": (Crystal(lattice, numbers[::-1], coords[::-1]), GRID, VOXELS),
        "shifted": (
            Crystal(lattice, numbers, coords + shift / GRID), GRID,
            np.asarray(np.ravel_multi_index(tuple(((index + shift) % GRID).T), GRID)),
        ),
        "supercell": (
            Crystal(lattice * [[2], [1], [1]], np.tile(numbers, 2), doubled), wide,
            np.asarray(np.ravel_multi_index(tuple((index + [6, 0, 0]).T), wide)),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("how", written_otherwise())
def test_however_a_crystal_is_written_its_density_is_the_same(model, how):
    expected = np.asarray(density(model, row_of(CELL, GRID, VOXELS)))
    found = np.asarray(density(model, row_of(*written_otherwise()[how])))
    assert np.abs(found - expected).sum() < 2e-4 * expected.sum()


def test_far_from_all_atoms_there_is_nothing(model):
    wide = Crystal(CELL.lattice * [[1], [1], [4]], CELL.atomic_numbers, CELL.frac_coords / [1, 1, 4])
    middle = np.ravel_multi_index(tuple(np.array([[0, 0, 22], [3, 3, 20]]).T), (6, 7, 32))
    found = density(model, row_of(wide, (6, 7, 32), np.resize(middle, 12)))
    assert (np.asarray(found) == 0).all()


def test_padding_counts_for_no_statistics(model):
    """Its places are the cell's centre."""
    padded = row_of(CELL, GRID, np.append(VOXELS, [175] * 20))
    count, *sums = eqx.filter_jit(model.moments)(padded, TABLES, np.arange(32)[None] < 12)
    assert count == 12
    alone = eqx.filter_jit(model.moments)(row_of(CELL, GRID, VOXELS), TABLES, np.ones((1, 12), bool))[1:]
    for mine, theirs in zip(sums, alone, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-4)


def test_the_statistics_are_of_the_rows_and_take_no_gradient(model):
    row = row_of(CELL, GRID, VOXELS)
    member = model.members[1]
    raw = member.invariants(model.sums(row, TABLES), TABLES)
    told, spread = np.asarray(member.norm(raw))[0], np.asarray(raw)[0].std(axis=0)
    np.testing.assert_allclose(told.mean(axis=0), 0, atol=2e-3)
    varied = told.std(axis=0) > 0.5
    np.testing.assert_allclose(told.std(axis=0)[varied], (spread / (spread + LEAST_DEVIATION))[varied], atol=0.01)
    assert varied.mean() > 0.7  # functions near a nucleus see no atom from these voxels
    gradient = eqx.filter_grad(lambda each: jnp.sum(density(each, row)))(model)
    for each in gradient.members:
        assert not np.asarray(each.norm.mean.array).any() and not np.asarray(each.norm.deviation.array).any()
        assert np.asarray(each.elements.weight.array)[[8, 12]].all()
