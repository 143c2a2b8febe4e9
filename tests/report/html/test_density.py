"""Densities in a page: the values are the file's, or a coarser grid's that is said; pages of predictions."""

import json

import numpy as np
import pytest
from html_reader import read_page, values_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_promolecule import skewed_density

from tomat.base.errors import TomatError
from tomat.base.layout import PREDICTED_DENSITY, REFERENCE_DENSITY
from tomat.base.report.model import Report, Section
from tomat.data.density.io import open_density
from tomat.data.density.outputs import write_density
from tomat.predict.evaluation.metrics import nmae
from tomat.predict.inference.interface import Prediction
from tomat.report.html import density as pages
from tomat.report.html.document import page_html


def shown(*items):
    return read_page(page_html(Report("page", (Section("Density", pages.density_parts(items)),))))


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(1, 4)] * 3), st.integers(0, 9), st.sampled_from([1, 2, 3]))
def test_a_coarser_grid_keeps_the_points_that_it_shares(sides, seed, factor):
    values = np.random.default_rng(seed).random([2 * factor * side for side in sides]).astype(np.float32)
    found = pages.coarser(values, values.size // factor**3)
    assert found.dtype == np.float32 and np.array_equal(found, values[::factor, ::factor, ::factor])


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(2, 12)] * 3), st.integers(8, 400), st.integers(0, 9))
def test_a_coarser_grid_is_small_enough_and_within_the_values(sides, most, seed):
    values = np.random.default_rng(seed).random(sides).astype(np.float32)
    found = pages.coarser(values, most)
    assert found.size <= most and values.min() <= found.min() <= found.max() <= values.max()
    assert np.allclose(pages.coarser(np.full(sides, 0.7), most), 0.7)


def test_a_prediction_beside_its_reference_is_in_the_page_value_by_value():
    prediction, reference = skewed_density(seed=1), skewed_density(seed=2)
    reader = shown(pages.beside("<one>", prediction, reference))
    [item] = reader.data["density-data"]["items"]
    assert np.array_equal(values_of(item["values"]["density"]), prediction.rho.ravel())
    assert np.array_equal(values_of(item["values"]["reference"]), reference.rho.ravel())
    assert (item["shape"], item["symbols"]) == ([6, 5, 4], ["Na", "F"])
    assert item["lattice"] == prediction.lattice.tolist() and item["frac_coords"] == prediction.frac_coords.tolist()
    [row] = reader.tables[0]
    assert float(row[2][1]) == nmae(prediction.rho, reference.rho) and float(row[4][1]) == prediction.electron_count
    assert "Prediction minus reference" in reader.text and "<one>" in reader.text
    # Every control has a key to reach it by, and a name.
    assert reader.tags.count("input") == 6 and reader.tags.count("label") == 6


def test_alone_a_density_has_one_panel_and_several_share_the_room(monkeypatch):
    monkeypatch.setattr(pages, "MOST_VOXELS", 2 * 30)
    first, second = skewed_density("first"), skewed_density("second", (8, 6, 4))
    reader = shown(pages.ShownDensity("first", first), pages.ShownDensity("second", second))
    items = reader.data["density-data"]["items"]
    assert all(len(values_of(item["values"]["density"])) == np.prod(item["shape"]) <= 30 for item in items)
    assert "select" in reader.tags and "Prediction" not in reader.text
    assert "second: drawn on 4 x 3 x 2 of 8 x 6 x 4 points, 1 of 8" in reader.text


def test_other_grids_are_put_on_one_and_other_crystals_refused():
    one = pages.beside("x", skewed_density(sides=(6, 5, 4)), skewed_density(sides=(8, 5, 4)))
    assert one.density.grid_shape == (8, 5, 4) and "8 x 5 x 4" in one.note
    other = skewed_density()
    moved = type(other)(other.rho, other.lattice * 1.1, other.atomic_numbers, other.frac_coords)
    with pytest.raises(TomatError, match="lattices that differ"):
        pages.beside("x", other, moved)
    with pytest.raises(TomatError, match="no density"):
        pages.density_parts([])


@pytest.fixture
def folder(tmp_path):
    """Two predictions, of which one has a reference, and one that failed."""
    out, truth = tmp_path / "out", tmp_path / "truth"
    lines = []
    for seed, name in enumerate(("Si", "<NaCl>")):
        write_density(skewed_density(seed=seed), out / f"{name}.cube", "cube")
        said = {"structure": "POSCAR", "format": "cube", "grid": [6, 5, 4], "electrons": 24.0}
        said["made_by"] = {"model": "run <x> step 7", "weights_sha256": "abc123", "held_out": "better on 10"}
        flags = [{"text": "far from the training"}]
        lines.append(said | {"name": name, "formula": name, "output": f"{name}.cube", "flags": flags})
    lines[1] |= {"grid": None, "electrons": None}  # a row all the same
    write_density(skewed_density(seed=7), truth / "Si.cube", "cube")
    lines.append({"name": "bad", "structure": "POSCAR", "error": "no atoms"})
    (out / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def read(path):
    return open_density(path, rules=pages.LOOKED_AT).rho.ravel()


def test_a_folder_has_a_row_for_each_structure_and_draws_its_densities(folder):
    reader = read_page(page_html(pages.predictions_page(folder)))
    items = reader.data["density-data"]["items"]
    assert [item["name"] for item in items] == ["Si", "<NaCl>"]
    assert np.array_equal(values_of(items[0]["values"]["density"]), read(folder / "Si.cube"))
    assert [row[0][0] for row in reader.tables[-1]] == ["Si", "<NaCl>", "bad"]
    for words in ("no atoms", "far from the training", "2 predicted, 1 failed"):
        assert words in reader.text
    one = read_page(page_html(pages.density_page(str(folder / "Si.cube")))).text
    for words in ("run <x> step 7", "abc123", "better on 10"):
        assert words in reader.text and words in one


def test_references_are_found_by_name(folder):
    truth = folder.parent / "truth"
    reader = read_page(page_html(pages.predictions_page(folder, str(truth))))
    [item] = reader.data["density-data"]["items"]
    assert item["name"] == "Si"
    assert np.array_equal(values_of(item["values"]["reference"]), read(truth / "Si.cube"))
    (truth / "Si.cube").rename(truth / "other.cube")
    with pytest.raises(TomatError, match="named like a prediction"):
        pages.predictions_page(folder, str(truth))

    page = pages.density_page(str(folder / "Si.cube"))
    assert page.kind == "density" and len(read_page(page_html(page)).data["density-data"]["items"]) == 1


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ('"Si.cube', ", line 1 is not JSON .*"),
        ('"."', ": the output of Si is .*, expected a density in the folder .*"),
        ('"gone.cube"', ": the output of Si is 'gone.cube', expected a density .*gone.cube; expected a file.*"),
    ],
)
def test_a_damaged_line_is_refused_by_its_file(folder, damaged, message):
    lines = folder / "predictions.jsonl"
    lines.write_text(lines.read_text().replace('"Si.cube"', damaged))
    with pytest.raises(TomatError, match=f"^{lines}{message} Run `tomat predict` into the folder again.$"):
        pages.predictions_page(folder)


def test_a_held_out_prediction_of_too_few_electrons_costs_no_page(tmp_path):
    truth = skewed_density()
    atoms = truth.lattice, truth.atomic_numbers, truth.frac_coords
    few = Prediction(0.2 * truth.rho, *atoms, electrons_before=1.0, seconds=0.0)
    for grid, name in ((truth, REFERENCE_DENSITY), (few, PREDICTED_DENSITY)):
        write_density(grid, tmp_path / name, "cube")
    [said] = pages.kept_density_section(str(tmp_path)).parts
    assert said.startswith("Not drawn: ") and PREDICTED_DENSITY in said


def test_a_page_says_that_not_all_that_have_a_reference_are_drawn(tmp_path, monkeypatch):
    from types import SimpleNamespace

    from tomat.report.html import density

    names = [f"cell-{number}" for number in range(10)]
    files = [SimpleNamespace(name=name, path=f"{name}.cube") for name in names]
    lines = [{"name": name, "output": f"{name}.cube", "format": "cube"} for name in names]
    monkeypatch.setattr(density, "read_lines", lambda folder: lines)
    monkeypatch.setattr(density, "find_densities", lambda places: SimpleNamespace(files=files))
    monkeypatch.setattr(density, "open_density", lambda path, *given, **how: path)
    monkeypatch.setattr(density, "beside", lambda *given: given)
    monkeypatch.setattr(density, "_page", lambda title, kind, shown, lead, after: (shown, lead))
    shown, lead = density.predictions_page(tmp_path, "references")
    assert [one[0] for one in shown] == names[:8] and all(one[2] is not None for one in shown)
    assert any("The first 8 are drawn" in str(one) for one in lead)
