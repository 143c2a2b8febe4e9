"""Whole cells by a field model: box by box as voxel by voxel, and of any size and writing."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from fitted_codec import fitted_codec
from pymatgen.core import Lattice, Structure
from small_field import BASIS, CELL, CONFIG, PROMOLECULE, TABLES, learnt, row_of

from tomat.data.density.crystal import Crystal
from tomat.predict.inference import field
from tomat.predict.inference.field import cell_density, first_equals
from tomat.predict.inference.predictor import RunPredictor
from tomat.predict.inference.trained import LoadedRun
from tomat.train.settings.config import load_config

GRID = (9, 10, 17)
FIELD = ["--data.layout", "scattered-512", "--loss.kind", "nmae", "--trainer.mp", "f32", "--data.source", "embedded"]


@pytest.fixture(scope="module")
def run() -> LoadedRun:
    words = ["--model.type", "field", "--model.basis.n", str(BASIS.n), "--model.basis.cutoff_a", str(BASIS.cutoff_a)]
    words += ["--model.members", "2"]
    for name in ("channels", "products", "hidden_dim", "hidden_layers"):
        words += [f"--model.{name}", str(getattr(CONFIG, name))]
    codec: Any = None  # which a field model does not look at
    loaded = LoadedRun(load_config(None, [*FIELD, *words]), learnt(), codec, PROMOLECULE, 1, "")
    object.__setattr__(loaded, "tables", TABLES)
    return loaded


def test_boxes_give_what_the_model_gives_at_each_voxel(run):
    told: list[tuple[int, int]] = []
    found, spread = cell_density(run, CELL, GRID, lambda done, total: told.append((done, total)))
    voxels = np.random.default_rng(0).choice(found.size, 40, replace=False)
    members, _ = cast(Any, run.model).densities(row_of(CELL, GRID, voxels), TABLES)
    expected = np.array([each.array[0] for each in members])
    np.testing.assert_allclose(found.ravel()[voxels], expected.mean(axis=0), rtol=2e-4)
    assert spread is not None
    np.testing.assert_allclose(spread.ravel()[voxels], expected.std(axis=0, ddof=1), rtol=2e-3, atol=1e-6)
    assert found.min() > 0 and told[-1] == (81, 81)


ROCK_SALT = Structure.from_spacegroup("Fm-3m", Lattice.cubic(4.2), ["Mg", "O"], [[0, 0, 0], [0.5, 0.5, 0.5]])
WURTZITE = Structure.from_spacegroup(
    "P6_3mc", Lattice.hexagonal(3.1, 5.0), ["Mg", "O"], [[1 / 3, 2 / 3, 0.1], [1 / 3, 2 / 3, 0.48]]
)
DIAMOND = Structure.from_spacegroup("Fd-3m", Lattice.cubic(5.4), ["O"], [[0, 0, 0]])


@pytest.mark.parametrize(
    ("structure", "grid_shape", "times"),
    [
        (ROCK_SALT, (24, 24, 24), 60), (ROCK_SALT, (24, 24, 15), 8), (ROCK_SALT * (2, 1, 1), (32, 16, 16), 60),
        (WURTZITE, (12, 12, 20), 6), (WURTZITE, (10, 15, 20), 2), (DIAMOND, (24, 24, 24), 60), (DIAMOND, (9, 9, 9), 4),
    ],
)  # fmt: skip
def test_voxels_that_a_symmetry_makes_equal_have_one_sum_of_atoms(structure, grid_shape, times):
    crystal = Crystal(structure.lattice.matrix, np.array(structure.atomic_numbers), structure.frac_coords)
    first = first_equals(crystal, grid_shape)
    assert first is not None
    rho = PROMOLECULE.density(crystal, grid_shape).ravel()
    np.testing.assert_allclose(rho[first], rho, rtol=1e-4, atol=1e-6)
    assert np.array_equal(first[first], first) and first.size >= times * np.unique(first).size


@pytest.mark.parametrize("shift", [2e-4, 2.4e-4, 1.5e-5])
def test_atoms_that_are_shifted_by_a_part_of_a_voxel_lend_no_voxel_the_density_of_another(shift):
    places = ROCK_SALT.frac_coords + [shift, 0, 0]
    crystal = Crystal(ROCK_SALT.lattice.matrix, np.array(ROCK_SALT.atomic_numbers), places)
    first = first_equals(crystal, (48, 48, 48))
    assert first is not None
    rho = PROMOLECULE.density(crystal, (48, 48, 48)).ravel()
    np.testing.assert_allclose(rho[first], rho, rtol=2e-3, atol=1e-6)
    assert np.array_equal(first[first], first)


def test_of_voxels_that_a_symmetry_makes_equal_one_is_computed(run, monkeypatch):
    crystal = Crystal(WURTZITE.lattice.matrix, np.array(WURTZITE.atomic_numbers), WURTZITE.frac_coords)
    told: list[int] = []
    found = cell_density(run, crystal, (12, 12, 20), lambda done, total: told.append(total))
    monkeypatch.setattr(field, "SYMMETRY_ATOMS", 0)
    each = cell_density(run, crystal, (12, 12, 20), lambda done, total: told.append(total))
    for one, other in zip(found, each, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-5)
    assert told[-1] == 90 and told[0] < 45


def test_atoms_that_nearly_have_a_symmetry_or_coincide_have_none():
    near = ROCK_SALT.frac_coords + np.random.default_rng(0).normal(0, 1e-4, (8, 3))
    for coords, numbers in ((near, ROCK_SALT.atomic_numbers), (np.zeros((8, 3)), [8] * 8)):
        crystal = Crystal(ROCK_SALT.lattice.matrix, np.array(numbers), coords)
        assert first_equals(crystal, (8, 8, 8)) is None


def test_the_batch_changes_nothing(run, monkeypatch):
    whole, _ = cell_density(run, CELL, GRID)
    monkeypatch.setattr(field, "BOXES", 5)
    monkeypatch.setattr(field, "ROOM_STEP", 512)
    np.testing.assert_allclose(cell_density(run, CELL, GRID)[0], whole, rtol=1e-5)


def test_a_supercell_is_its_cell_again(run):
    coords = np.vstack([(CELL.frac_coords + [0, step, 0]) / [1, 2, 1] for step in range(2)])
    twice = Crystal(CELL.lattice * [[1], [2], [1]], np.tile(CELL.atomic_numbers, 2), coords)
    expected, _ = cell_density(run, CELL, GRID)
    found, _ = cell_density(run, twice, (9, 20, 17))
    difference = np.abs(found - np.concatenate([expected, expected], axis=1)).sum()
    assert difference < 2e-4 * found.sum()


def test_no_spacing_is_unlike_the_training_of_a_loaded_run(run):
    codec = fitted_codec(64, PROMOLECULE.density(CELL, GRID))
    atoms = dataclasses.replace(PROMOLECULE, spacing_a=0.06)
    predictor = RunPredictor(dataclasses.replace(run, codec=codec, promolecule=atoms))
    assert predictor.spacing_a is None and predictor.made_by["decoder"] == "none, a field model"
    flags = predictor.predict(CELL, GRID, electrons=None).flags
    assert "spacing" not in {flag["kind"] for flag in flags}
