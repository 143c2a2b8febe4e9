"""Pages of predictions: those of a folder, with references of their names, and of one file."""

import json

import numpy as np
import pytest
from html_reader import read_page, values_of
from leaning_density import density

from tomat.base.errors import TomatError
from tomat.data.density.io import open_density
from tomat.data.density.outputs import write_density
from tomat.report.html.density import LOOKED_AT
from tomat.report.html.document import page_html
from tomat.report.html.prediction import density_page, predictions_page


@pytest.fixture
def folder(tmp_path):
    """Two predictions, of which one has a reference, and one that failed."""
    out, truth = tmp_path / "out", tmp_path / "truth"
    lines = []
    for seed, name in enumerate(("Si", "<NaCl>")):
        write_density(density(seed=seed), out / f"{name}.cube", "cube")
        said = {"structure": "POSCAR", "format": "cube", "grid": [6, 5, 4], "electrons": 24.0}
        flags = [{"text": "far from the training"}]
        lines.append(said | {"name": name, "formula": name, "output": f"{name}.cube", "flags": flags})
    write_density(density(seed=7), truth / "Si.cube", "cube")
    lines.append({"name": "bad", "structure": "POSCAR", "error": "no atoms"})
    (out / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return out


def test_a_folder_has_a_row_for_each_structure_and_draws_its_densities(folder):
    reader = read_page(page_html(predictions_page(folder)))
    items = reader.data["density-data"]["items"]
    assert [item["name"] for item in items] == ["Si", "<NaCl>"]
    assert np.array_equal(
        values_of(items[0]["values"]["density"]), open_density(folder / "Si.cube", rules=LOOKED_AT).rho.ravel()
    )
    assert [row[0][0] for row in reader.tables[-1]] == ["Si", "<NaCl>", "bad"]
    assert (
        "no atoms" in reader.text and "far from the training" in reader.text and "2 predicted, 1 failed" in reader.text
    )


def test_references_are_found_by_name(folder):
    truth = folder.parent / "truth"
    reader = read_page(page_html(predictions_page(folder, str(truth))))
    [item] = reader.data["density-data"]["items"]
    assert item["name"] == "Si"
    assert np.array_equal(
        values_of(item["values"]["reference"]), open_density(truth / "Si.cube", rules=LOOKED_AT).rho.ravel()
    )
    (truth / "Si.cube").rename(truth / "other.cube")
    with pytest.raises(TomatError, match="called as a prediction"):
        predictions_page(folder, str(truth))


def test_a_damaged_line_is_refused(folder):
    with (folder / "predictions.jsonl").open("a") as file:
        file.write('{"name": "cut off')
    with pytest.raises(TomatError, match="line 4 is not JSON"):
        predictions_page(folder)


def test_one_file_has_a_page_of_its_own(folder):
    page = density_page(str(folder / "Si.cube"))
    reader = read_page(page_html(page))
    assert page.kind == "density" and len(reader.data["density-data"]["items"]) == 1
    assert reader.tags.count("figure") == 1


def test_a_line_without_its_figures_is_a_row_all_the_same(folder):
    lines = (folder / "predictions.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"grid": None, "atoms": None, "electrons": None}
    (folder / "predictions.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    reader = read_page(page_html(predictions_page(folder)))
    assert [row[0][0] for row in reader.tables[-1]] == ["Si", "<NaCl>", "bad"]
