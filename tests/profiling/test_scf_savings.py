"""The study of starting densities. Where pw.x is installed it runs, at a cut-off that is good for nothing else."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from scf_savings import BOX_A, STARTS, Cell, by_compound, chosen_cells, in_words, over_cells, study, superposition
from scf_savings_page import savings, table, write_page
from scf_savings_pwscf import CHARGE_DENSITY, KeptRun, PwX, parse_output
from scipy.io import FortranFile

from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import load_demo
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.promolecule import PromoleculeFit
from tomat.predict.inference.interface import PromoleculePredictor

CELL = "AlP-zinc-blende-ideal"


def row(name: str, **iterations: int | None) -> dict:
    """A cell's row with these iterations, and a tenth of a second for each."""
    starts = {}
    for start, n in zip(STARTS, iterations.values(), strict=True):
        seconds, why = (0.1 * n, "") if n else (None, "it gave up")
        starts[start] = {"iterations": n, "reason": why, "cpu_seconds": seconds, "nmae": 0.02}
    figures = {"k_points": 4, "converged_from_embedded_nmae": 1e-5, "version": "6.7", "starts": starts}
    return {"material_id": name, **figures}


@pytest.fixture
def report() -> dict:
    rows = [
        row("A", own=10, atoms=8, promolecule=8, prediction=6, converged=1),
        row("B", own=20, atoms=8, promolecule=8, prediction=8, converged=1),
        row("C", own=None, atoms=8, promolecule=8, prediction=7, converged=1),
    ]
    settings = {
        "program": "pw.x 6.7", "threads": 1, "functional": "PBE", "pseudopotentials": "GTH", "conv_thr_ry": 1e-8,
        "diago_thr_init": 1e-5, "rounds": 3, "predictor": "run x", "box_a": 8.0, "atom_degauss_ry": 0.02,
        "date": "2026-11-23",
    }  # fmt: skip
    return {"settings": settings, "over_cells": over_cells(rows), "cells": rows}


def test_savings_are_shares_of_cells_where_both_converged(report, tmp_path):
    against = report["over_cells"]["prediction"]
    saved = against["against_own"]["iterations_saved"]
    assert saved == {"median": pytest.approx(0.5), "min": pytest.approx(0.4), "max": pytest.approx(0.6), "cells": 2}
    assert against["against_promolecule"]["iterations_saved"]["median"] == pytest.approx(0.125)
    assert against["against_promolecule"]["cpu_seconds_saved"]["cells"] == 3
    told = "\n".join(savings(report))
    assert "Against own start: 50.0 % of the iterations saved, median of 2 cells" in told
    assert "at least 25 %, is reached" in told and "more than 0, is reached" in told
    # The page has every cell and reason, and keeps what people wrote.
    page = tmp_path / "page.md"
    write_page(report, page)
    text = page.read_text() + "\nOur words.\n"
    assert "| C | 4 | – | 8 | 8 | 7 | 1 |" in text and "C, own start: it gave up." in text
    page.write_text(text)
    write_page(report, page)
    assert page.read_text() == text and len(table(report).rows) == 3
    for each in report["cells"]:
        each["starts"]["prediction"]["iterations"] = 8
    assert "more than 0, is missed" in "\n".join(savings(report | {"over_cells": over_cells(report["cells"])}))


def test_cells_of_a_compound_are_one_observation():
    """Ten strains of one crystal that gain an iteration show nothing of crystals."""
    gain = {"own": 10, "atoms": 8, "promolecule": 8, "prediction": 7, "converged": 1}
    rows = [row(f"X-strain{i}", **gain) for i in range(10)]
    rows += [row("Y-ideal", **(gain | {"prediction": 9})), row("Z-ideal", **(gain | {"prediction": 8}))]
    told = over_cells(rows)["prediction"]["against_promolecule"]
    assert told["iterations_saved"]["cells"] == 12 and told["iterations_saved"]["median"] == pytest.approx(0.125)
    found = told["iterations_saved_by_compound"]
    assert (found["compounds"], found["better"], found["worse"]) == (3, 1, 1) and found["sign_test_p_value"] == 1
    assert found["mean"] == pytest.approx(0, abs=1e-12)
    # Student's t of 2 degrees, 4.3027, times the standard error of 0.125, -0.125 and 0.
    assert found["ci95"][1] == pytest.approx(4.302653 * 0.125 / np.sqrt(3), rel=1e-6)
    assert by_compound({"A": [0.1], "B": [0.2, 0.4]})["ci95"][0] == pytest.approx(0.2 - 12.7062 * 0.1, rel=1e-4)
    assert by_compound({"A": [0.1]})["ci95"] is None


def gaussian_atom(place, electrons: float, width_bohr: float) -> KeptRun:
    """An atom whose density is a Gaussian, as pw.x would leave it in a box."""
    n = 40
    miller = np.stack(np.meshgrid(*[np.arange(-n, n + 1)] * 3, indexing="ij"), axis=-1).reshape(-1, 3).astype(np.int32)
    miller = miller[(miller**2).sum(axis=1) <= n**2]
    step = 2 * np.pi * BOHR_A / BOX_A
    squares = (miller.astype(float) ** 2).sum(axis=1) * step**2
    coefficients = electrons * np.exp(-squares * width_bohr**2 / 2) / (BOX_A / BOHR_A) ** 3
    (place / CHARGE_DENSITY).parent.mkdir(parents=True)
    with FortranFile(place / CHARGE_DENSITY, "w") as file:
        for record in (np.array([0, len(miller), 1], np.int32), step * np.eye(3), miller, coefficients.astype(complex)):
            file.write_record(record)
    return KeptRun(parse_output(""), place, {})


def test_a_superposition_is_the_sum_of_its_atoms(tmp_path):
    """Held against Gaussians added up in space, periodic images too, in a cell without right angles."""
    lattice = np.array([[4.0, 0.3, 0.0], [0.0, 4.5, 0.2], [0.5, 0.0, 4.2]])
    crystal = Crystal(lattice, np.array([11, 9, 9]), np.array([[0.1, 0.2, 0.3], [0.6, 0.5, 0.9], [0.3, 0.8, 0.6]]), "x")
    electrons, widths = {"Na": 1.0, "F": 7.0}, {"Na": 1.1, "F": 0.7}
    atoms = {name: gaussian_atom(tmp_path / name, electrons[name], widths[name]) for name in electrons}
    found = superposition(atoms, crystal, (24, 25, 27))
    assert found.electron_count == pytest.approx(15, rel=1e-6)
    points = np.stack(np.meshgrid(*(np.arange(n) / n for n in found.grid_shape), indexing="ij"), axis=-1)
    expected = np.zeros(found.grid_shape)
    for name, site in zip(("Na", "F", "F"), crystal.frac_coords, strict=True):
        width_a = widths[name] * BOHR_A
        for image in np.ndindex(5, 5, 5):
            apart = (points - site + np.array(image) - 2) @ lattice
            gaussian = np.exp(-(apart**2).sum(axis=-1) / (2 * width_a**2)) / ((2 * np.pi) ** 1.5 * width_a**3)
            expected += electrons[name] * gaussian
    assert np.abs(found.rho - expected).max() < 1e-4 * expected.max()


@pytest.fixture
def predictor() -> PromoleculePredictor:
    fit = PromoleculeFit()
    fit.add(load_demo(CELL))
    return PromoleculePredictor(dataclasses.replace(fit.solve(), valences={13: 3.0, 15: 5.0}))


def test_a_cell_whose_own_start_fails_is_a_row_with_the_reason(tmp_path, predictor):
    program = tmp_path / "pw"
    program.write_text("#!/bin/sh\necho 'convergence NOT achieved after 100 iterations: stopping'\n")
    program.chmod(0o755)
    counts: list[int] = []
    cell = chosen_cells([CELL], "train")[0]
    result = study(cell, PwX(tmp_path / "work", str(program)), predictor, 2, lambda name: None, counts.append)
    assert [each["iterations"] for each in result["starts"].values()] == [None] * 5 and sum(counts) == 10
    assert result["starts"]["own"]["reason"] == "convergence NOT achieved after 100 iterations"
    assert result["starts"]["prediction"]["reason"] == "not run: pw.x did not converge from its own start"
    assert over_cells([result]) == {} and "prediction not run" in in_words(result)


@pytest.mark.skipif(shutil.which("pw.x") is None, reason="no Quantum ESPRESSO here")
def test_a_cell_from_every_start(tmp_path, predictor):
    recipe = chosen_cells([CELL], "train")[0].recipe
    cell, pw = Cell({**recipe, "e_cut_hartree": 7.0, "k_mesh": (2, 2, 2)}), PwX(tmp_path)
    result, again = (study(cell, pw, predictor, 1, lambda name: None, lambda runs: None) for _ in range(2))
    starts = result["starts"]
    assert tuple(starts) == STARTS and not any(each["reason"] for each in starts.values())
    assert starts["converged"]["iterations"] <= 2 < starts["promolecule"]["iterations"]
    energies = [each["energy_ry"] for each in starts.values()]
    assert max(energies) - min(energies) < 1e-6
    assert starts["promolecule"]["nmae"] < 0.2 and starts["free-atoms"]["nmae"] < 0.2
    assert starts["promolecule"]["iterations"] == starts["prediction"]["iterations"]
    assert json.loads(json.dumps(result)) == again  # from what was kept
