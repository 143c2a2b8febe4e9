"""Whole cells by a field model: box by box as voxel by voxel, and of any size and writing."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest
from fitted_codec import fitted_codec
from small_field import BASIS, CELL, CONFIG, PROMOLECULE, TABLES, learnt, row_of

from tomat.data.density.crystal import Crystal
from tomat.predict.inference import field
from tomat.predict.inference.field import cell_density
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
