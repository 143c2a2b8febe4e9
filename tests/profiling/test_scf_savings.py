"""The study of starting densities, with another program in the place of pw.x."""

from types import SimpleNamespace

import numpy as np
import pytest
from pwscf import PwX
from reported import reported
from scf_savings import STARTS, build_parser, by_compound, chosen_cells, drawn_compounds, in_words, over_cells, study
from scf_savings_page import savings, table, write_page

from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import compounds_of, load_stored
from tomat.train.settings.schema import DataConfig


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
    words = ("program", "functional", "pseudopotentials", "predictor", "date")
    numbers = ("threads", "rounds", "box_a", "conv_thr_ry", "diago_thr_init", "atom_degauss_ry")
    settings = dict.fromkeys(words, "x") | dict.fromkeys(numbers, 3) | {"left_out": ["A", "C"]}
    return {"settings": settings, "over_cells": over_cells(rows), "cells": rows}


def test_savings_are_shares_of_cells_where_both_converged(report, tmp_path):
    against = report["over_cells"]["prediction"]
    saved = against["against_own"]["iterations_saved"]
    assert saved == {"median": pytest.approx(0.5), "min": pytest.approx(0.4), "max": pytest.approx(0.6), "cells": 2}
    assert against["against_promolecule"]["iterations_saved"]["median"] == pytest.approx(0.125)
    assert against["against_promolecule"]["cpu_seconds_saved"]["cells"] == 3
    told = "\n".join(savings(report))
    assert "Against own start: 50.0 % of the iterations saved, median of 2 cells" in told
    assert "at least 40 %, is reached" in told and "more than 0, is reached" in told
    # The page has every cell and reason, and keeps what people wrote.
    page = tmp_path / "page.md"
    write_page(report, page)
    text = page.read_text() + "\nOur words.\n"
    assert "| C | 4 | – | 8 | 8 | 7 | 1 |" in text and "C, own start: it gave up." in text
    assert "it was trained without A, C, in any form." in text
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
    assert by_compound({"A": [0.1]})["ci95"] is None
    # Six of one sign have p = 1 / 32: a gain from zero is shown by the test, though one outlier widens the interval.
    told = {"A": [0.9]} | {name: [0.01] for name in "BCDEF"}
    shown = by_compound(told)
    assert shown["median"] == 0.01 and shown["sign_test_p_value"] == pytest.approx(1 / 32) and shown["ci95"][0] < 0
    for sign, words in ((1, "more than 0 % is shown by the sign test."), (-1, "more than 0 % is not shown.")):
        shares = by_compound({name: [sign * each for each in values] for name, values in told.items()})
        saved = {"median": 0.01, "min": 0.01, "max": 0.9, "cells": 6}
        found = {"against_promolecule": {"iterations_saved": saved, "iterations_saved_by_compound": shares}}
        assert savings({"over_cells": {"prediction": found}})[0].endswith(words)


def test_compounds_are_drawn_without_a_result_and_leave_their_elements_to_others(tmp_path):
    drawn = drawn_compounds(24)
    assert reported(tmp_path, "--draw", 24, parser=build_parser()) == {"left_out": drawn}
    assert len(set(drawn)) == 24 and drawn[:5] == drawn_compounds(5)
    crystals = compounds_of(("crystals", "further-crystals"))
    elements = {name: set(load_stored(ids[0]).atomic_numbers.tolist()) for name, ids in crystals.items()}
    assert set(drawn) < set(crystals) and not {"GaP", "MgO", "AlN", "SrF2"} & set(drawn)
    for z in set().union(*(elements[name] for name in drawn)):
        assert sum(z in its for name, its in elements.items() if name not in drawn) >= 2
    with pytest.raises(TomatError, match="--draw is 100; the rule finds"):
        drawn_compounds(100)


def test_a_cell_that_the_run_was_trained_on_is_refused():
    data = DataConfig(source="embedded", groups=("crystals", "layered"), left_out=("LiF", "Si"))
    names = [each.name for each in chosen_cells(None, data)]
    assert names[:2] == ["GaP-zinc-blende-ideal", "MgO-rock-salt-ideal"]
    assert names[2:] == [f"{each}-ideal" for each in ("AlN-wurtzite", "SrF2-fluorite", "Si-diamond", "LiF-rock-salt")]
    assert [each.name for each in chosen_cells(["KBr-rock-salt-ideal"], data)] == ["KBr-rock-salt-ideal"]
    with pytest.raises(TomatError, match="was trained on NaCl-rock-salt-ideal.*--data.left_out"):
        chosen_cells([names[0], "NaCl-rock-salt-ideal"], data)
    with pytest.raises(TomatError, match="no embedded density 'NaCl'"):
        chosen_cells(["NaCl"], data)


def test_a_cell_is_computed_with_the_occupations_of_its_reference():
    data = DataConfig(source="embedded")
    metal, insulator = (
        each.calculation() for each in chosen_cells(["InAs-zinc-blende-ideal", "MgO-rock-salt-ideal"], data)
    )
    assert "occupations='smearing', degauss=0.004000" in metal.input_text(from_file=False)
    assert "occupations" not in insulator.input_text(from_file=False)


def test_a_cell_whose_own_start_fails_is_a_row_with_the_reason(tmp_path):
    predictor = SimpleNamespace(valences={13: 3.0, 15: 5.0})  # of nothing else is asked before a run has converged
    program = tmp_path / "pw"
    program.write_text("#!/bin/sh\necho 'convergence NOT achieved after 100 iterations: stopping'\n")
    program.chmod(0o755)
    counts: list[int] = []
    cell = chosen_cells(["AlP-zinc-blende-ideal"], DataConfig(source="embedded", left_out=("AlP",)))[0]
    result = study(cell, PwX(tmp_path / "work", str(program)), predictor, 2, lambda name: None, counts.append)
    assert [each["iterations"] for each in result["starts"].values()] == [None] * 5 and sum(counts) == 10
    assert result["starts"]["own"]["reason"] == "convergence NOT achieved after 100 iterations"
    assert result["starts"]["prediction"]["reason"] == "not run: pw.x did not converge from its own start"
    assert over_cells([result]) == {} and "prediction not run" in in_words(result)
