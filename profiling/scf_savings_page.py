"""The savings by a prediction, as a table and as a page."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tomat.base.report.formats import number, percent, share
from tomat.base.report.markdown import update_page
from tomat.base.report.model import VERDICT, Column, Items, Report, Section, Table, columns
from tomat.base.reporting import counted

COLUMNS = {
    "own": "own start",
    "free-atoms": "free atoms",
    "promolecule": "promolecule",
    "prediction": "prediction",
    "converged": "converged",
}
"""Start -> heading."""
GOALS = {"own": (0.4, "at least 40 %"), "promolecule": (0.0, "more than 0")}
"""Start -> share of its iterations that a prediction should save, as a number and in words."""
LEAST_P_VALUE = 0.05
"""A sign test is significant below this; the page says if so few compounds could not reach it with all signs equal."""
STARTS = (
    "own start: `startingpot = 'atomic'`. A `.gth` file holds no charge of an atom, so pw.x adds up Gaussians "
    "whose widths it takes from a table by valence and core electrons (`atmlength`).",
    "free atoms: the sum of atoms that pw.x has computed with the same pseudopotentials in cubes of {box_a:g} A, "
    "spherical parts, {atom_degauss_ry:g} Ry smeared. Pseudopotentials that hold a charge of the atom start from such "
    "a sum.",
    "promolecule: the sum of the run's fitted atoms, scaled to the electron count of learnt valences, as the "
    "prediction is.",
    "converged: the density that the own start ended with. The bound.",
)


def table(report: Mapping[str, Any]) -> Table:
    """A table of the iterations of every cell and start. `savings` sums up what the prediction saves."""
    rows = [
        (row["material_id"], row["k_points"], *(row["starts"][start]["iterations"] for start in COLUMNS))
        for row in report["cells"]
    ]
    heads = [Column("cell"), *columns("k-points", *COLUMNS.values(), right=True)]
    return Table("Iterations of pw.x", heads, rows)


def savings(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each start that the prediction is compared with."""
    lines = []
    for base, found in report["over_cells"].get("prediction", {}).items():
        name = base.removeprefix("against_")
        if name == "converged" or "iterations_saved" not in found:
            continue
        saved = found["iterations_saved"]
        cpu = found.get("cpu_seconds_saved", {}).get("median")
        least, words = GOALS.get(name, (None, ""))
        goal = ""
        if least is not None:
            kept = saved["median"] >= least if least else saved["median"] > 0
            goal = f"; the goal, {words}, is {'reached' if kept else 'missed'} in this median"
        lines.append(
            f"Against {COLUMNS[name]}: {percent(saved['median'])} of the iterations saved, median of "
            f"{saved['cells']} cells ({percent(saved['min'])} to {percent(saved['max'])}), and {percent(cpu)} of the "
            f"CPU time{goal}. {_by_compound(found['iterations_saved_by_compound'], least or 0.0)}"
        )
    return lines


def _by_compound(told: Mapping[str, Any], goal: float) -> str:
    """The statistics over compounds in words. The cells of a compound are not independent observations."""
    words = f"By compound ({told['compounds']}): median {percent(told['median'])}, mean {percent(told['mean'])}"
    shown = []
    if told["ci95"] is not None:
        low, high = told["ci95"]
        shown += ["the interval"] if low > goal else []
        words += f", 95 % interval {percent(low)} to {percent(high)}"
    p_value = told["sign_test_p_value"]
    if not goal and told["better"] > told["worse"] and p_value < LEAST_P_VALUE:
        shown.append("the sign test")
    words += (
        f"; better on {told['better']}, worse on {told['worse']}, sign test p = {p_value:.3g}: more than "
        f"{percent(goal, 0)} is {'shown by ' + ' and '.join(shown) if shown else 'not shown'}"
    )
    few = 2 * 0.5 ** told["compounds"]
    if few > LEAST_P_VALUE:
        words += f" (so few compounds cannot get below p = {few:.3g})"
    return f"{words}."


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write or update the page. If its markers are broken, it stays unchanged."""
    settings = report["settings"]
    rounds = settings["rounds"]
    turns = "in turn; times are medians" if rounds > 1 else "whose iterations are those of any other; times are of one"
    setting = (
        f"{settings['date']}. {settings['program']}, {settings['threads']} thread, {settings['functional']}, "
        f"{settings['pseudopotentials']} (`.gth` files), to {settings['conv_thr_ry']:g} Ry; cut-off, k-mesh and "
        "use of symmetry of each cell's reference, `diago_thr_init` "
        f"{settings['diago_thr_init']:g} from every start, pw.x's defaults otherwise (mixing 0.7, plain). "
        f"{counted(rounds, 'run')} of each start, {turns}."
    )
    predictor = f"Prediction: {settings['predictor']}. It reads the structure alone, on pw.x's grid."
    if settings["left_out"]:
        names = ", ".join(settings["left_out"])
        predictor += f" Beside the compounds held out it was trained without {names}, in any form."
    reasons = [
        f"{row['material_id']}, {COLUMNS[start]}: {row['starts'][start]['reason']}."
        for row in report["cells"]
        for start in COLUMNS
        if row["starts"][start]["iterations"] is None
    ]
    others = [start for start in COLUMNS if start != "converged"]
    heads = [Column("cell"), Column("embedded - converged", share)]
    heads += columns(*(f"{COLUMNS[start]}, NMAE" for start in others), show=share, right=True)
    heads += columns(*(f"{name}, CPU s" for name in COLUMNS.values()), show=number(1), right=True)
    heads.append(Column("prediction itself, s", number(1), right=True))
    rows = []
    for row in report["cells"]:
        starts = row["starts"]
        errors = (starts[one].get("nmae") for one in others)
        times = (starts[one]["cpu_seconds"] for one in COLUMNS)
        first = row["material_id"], row["converged_from_embedded_nmae"]
        rows.append((*first, *errors, *times, starts["prediction"].get("prediction_seconds")))
    said = (
        "NMAE against the converged density of pw.x. embedded - converged: the same of the density that the set holds."
    )
    sections = (
        Section("", [setting, predictor, Items([one.format(**settings) for one in STARTS])], "setting"),
        Section("Iterations", [replace(table(report), caption=""), *savings(report), *reasons], "iterations"),
        Section("Times and errors", [Table("", heads, rows), said], "times"),
        VERDICT,
    )
    update_page(path, Report("What a prediction saves", sections))
