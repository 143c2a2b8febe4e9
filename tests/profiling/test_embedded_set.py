import json
import os
from dataclasses import asdict, replace

import embedded_set
import pytest
from embedded_set import INDEX_FORMAT, build_demo_data, build_parser
from embedded_set_cells import CellRecipe, Distortion
from pwscf import ENDS_EARLY
from reported import reported

from tomat.base.errors import TomatError
from tomat.base.reporting import dump_json
from tomat.data.density.demo.embedded import demo_index, read_stored


def hydrogen(material_id: str, a: float) -> CellRecipe:
    """H2 in a small box: the cheapest insulator there is, a second of computing."""
    return CellRecipe(
        material_id=material_id, compound="H2", structure_type="molecule", split="train", variant="ideal",
        lattice_a=((a, 0.0, 0.0), (0.0, a, 0.0), (0.0, 0.0, a)), symbols=("H", "H"), valence=(1, 1),
        frac_coords=((0.1, 0.1, 0.1), (0.1, 0.1, 0.1 + 0.74 / a)), e_cut_hartree=6.0, k_mesh=(1, 1, 1),
        k_shift=(0, 0, 0), distortion=Distortion(), group="crystals", engine="eminus", smearing_hartree=0.0,
    )  # fmt: skip


def test_build_resume_and_change(tmp_path, monkeypatch, capsys):
    first, second = hydrogen("H2-a", 3.0), hydrogen("H2-b", 3.2)
    index = build_demo_data(tmp_path, recipes=[first], convergence=False, processes=1)
    assert [cell["material_id"] for cell in index["cells"]] == ["H2-a"] and not index["discarded"]
    assert json.loads(dump_json(index)) == json.loads((tmp_path / "index.json").read_text())
    cell = index["cells"][0]
    grid = read_stored(tmp_path, cell)
    assert grid.electron_count == pytest.approx(2, rel=1e-6)
    assert list(grid.grid_shape) == cell["native_shape"] and max(cell["refined_spacing_a"]) <= 0.065
    assert cell["calculation"]["code"].startswith("eminus ") and cell["calculation"]["converged"]

    written = (tmp_path / "H2-a.zarr" / "zarr.json").stat().st_mtime_ns
    monkeypatch.setattr(embedded_set, "cell_recipes", lambda: [first, second])
    said = reported(tmp_path, "--out", tmp_path, "--processes", 1, parser=build_parser())
    assert "2 cells, 0 discarded" in capsys.readouterr().out
    assert (tmp_path / "H2-a.zarr" / "zarr.json").stat().st_mtime_ns == written
    both = json.loads((tmp_path / "index.json").read_text())
    assert said == both
    assert [cell["material_id"] for cell in both["cells"]] == ["H2-a", "H2-b"]

    # What is asked for alone leaves the rest of the index as it is.
    assert reported(tmp_path, "--out", tmp_path, "--only", "H2-a", parser=build_parser()) == both

    # Nothing is left to do, so not even a process starts; a changed recipe is no longer what was stored.
    again = build_demo_data(tmp_path, recipes=[first, second], convergence=False, processes=1)
    assert json.loads(dump_json(again)) == both
    recipes = [replace(first, e_cut_hartree=5.0), second]
    changed = build_demo_data(tmp_path, recipes=recipes, convergence=False, processes=1)
    assert changed["cells"][0]["calculation"]["e_cut_hartree"] == 5.0
    assert read_stored(tmp_path, changed["cells"][0]).grid_shape < grid.grid_shape


def test_a_cell_whose_calculation_was_killed_is_computed_again(tmp_path, monkeypatch):
    """And one that has failed by itself is not."""
    killed, failed = hydrogen("H2-a", 3.0), hydrogen("H2-b", 3.2)
    monkeypatch.setattr(embedded_set, "cell_recipes", lambda: [killed, failed])
    discarded = [
        {"recipe": asdict(recipe), "calculation": {}, "reason": reason}
        for recipe, reason in ((killed, ENDS_EARLY), (failed, "convergence NOT achieved after 100 iterations"))
    ]
    index = {"format_version": INDEX_FORMAT, "cells": [], "discarded": discarded, "convergence": []}
    (tmp_path / "index.json").write_text(json.dumps(index))
    found = build_demo_data(tmp_path, convergence=False, processes=1)
    assert [cell["material_id"] for cell in found["cells"]] == ["H2-a"]
    assert [entry["recipe"]["material_id"] for entry in found["discarded"]] == ["H2-b"]


def test_a_check_is_of_the_settings_that_its_cell_has():
    index = demo_index()
    recipes = {cell["material_id"]: cell["recipe"] for cell in index["cells"]}
    names = ("e_cut_hartree", "k_mesh")
    for check in index["convergence"]:
        assert [check[name] for name in names] == [recipes[check["material_id"]][name] for name in names], check
    assert index["convergence"]


def test_processes_begin_with_one_thread_each(tmp_path, monkeypatch):
    def pool(*_):
        raise TomatError(f"{os.environ.get('OMP_NUM_THREADS')} threads")

    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(embedded_set, "ProcessPoolExecutor", pool)
    with pytest.raises(TomatError, match="^1 threads"):
        build_demo_data(tmp_path, recipes=[hydrogen("H2-a", 3.0)], convergence=False)
