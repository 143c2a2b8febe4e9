"""What a prediction saves, as a table and as a page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tomat.base.report.document import empty_section, update_document
from tomat.base.report.formats import UNKNOWN, percent
from tomat.base.report.markdown import markdown_table
from tomat.base.reporting import counted

COLUMNS = {
    "own": "own start",
    "free-atoms": "free atoms",
    "promolecule": "promolecule",
    "prediction": "prediction",
    "converged": "converged",
}
"""Start -> heading."""
GOALS = {"own": (0.25, "at least 25 %"), "promolecule": (0.0, "more than 0")}
"""Share of the iterations that a prediction is to save against a start, and the same in words."""
LEAST_P_VALUE = 0.05
"""A sign test over so few compounds that all of one sign do not get below this decides nothing, and it is said."""
TEMPLATE = """# What a prediction saves

{setting}

## Iterations

{iterations}

## Times and errors

{times}

## Verdict

<!-- What to make of it. The text outside tomat's markers is yours. -->
"""


def table(report: Mapping[str, Any]) -> Table:
    """Iterations of every cell and start, and what the prediction saves over all of them."""
    found = Table(
        title="Iterations of pw.x", caption="\n".join(savings(report)), caption_justify="left", box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    found.add_column("cell", overflow="fold")
    for heading in COLUMNS.values():
        found.add_column(heading, justify="right")
    for row in report["cells"]:
        found.add_row(row["material_id"], *(_iterations(row["starts"][start]) for start in COLUMNS))
    return found


def savings(report: Mapping[str, Any]) -> list[str]:
    """A sentence for each start that the prediction is held against."""
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
    """What is shown of compounds, of which the cells are no independent observations."""
    words = f"By compound ({told['compounds']}): mean {percent(told['mean'])}"
    shown = False
    if told["ci95"] is not None:
        low, high = told["ci95"]
        shown = low > goal
        words += f", 95 % interval {percent(low)} to {percent(high)}"
    words += (
        f"; better on {told['better']}, worse on {told['worse']}, sign test p = {told['sign_test_p_value']:.3g}: "
        f"more than {percent(goal, 0)} is {'shown by the interval' if shown else 'not shown'}"
    )
    few = 2 * 0.5 ** told["compounds"]
    if few > LEAST_P_VALUE:
        words += f" (so few compounds cannot get below p = {few:.3g})"
    return f"{words}."


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write the page, or bring it up to date.

    Raises:
        TomatError: Its markers are broken; it is left as it is.
    """
    contents = {"setting": _setting(report), "iterations": _iterations_section(report), "times": _times(report)}
    update_document(path, contents, TEMPLATE.format(**{name: empty_section(name) for name in contents}))


def _setting(report: Mapping[str, Any]) -> str:
    settings = report["settings"]
    return "\n".join([
        f"{settings['date']}. {settings['program']}, {settings['threads']} thread, {settings['functional']}, "
        f"{settings['pseudopotentials']} (`.gth` files), to {settings['conv_thr_ry']:g} Ry; cut-off and k-mesh of each "
        "cell's reference, without symmetry but for k and -k, "
        f"`diago_thr_init` {settings['diago_thr_init']:g} from every start, pw.x's defaults otherwise (mixing 0.7, "
        "plain). "
        f"{counted(settings['rounds'], 'run')} of each start, in turn; times are medians.",
        "",
        f"Prediction: {settings['predictor']}. It reads the structure alone, on pw.x's grid.",
        "",
        "- *own start*: `startingpot = 'atomic'`. A `.gth` file holds no charge of an atom, so pw.x adds up Gaussians "
        "whose widths it takes from a table by valence and core electrons (`atmlength`).",
        "- *free atoms*: the sum of atoms that pw.x has computed with the same pseudopotentials in cubes of "
        f"{settings['box_a']:g} A, spherical parts, {settings['atom_degauss_ry']:g} Ry smeared. Pseudopotentials that "
        "hold a charge of the atom start from such a sum.",
        "- *promolecule*: the sum of the run's fitted atoms, scaled to the electron count of learnt valences, as the "
        "prediction is.",
        "- *converged*: the density that the own start ended with. The bound.",
    ])  # fmt: skip


def _iterations_section(report: Mapping[str, Any]) -> str:
    rows = [
        (row["material_id"], str(row["k_points"]), *(_iterations(row["starts"][start]) for start in COLUMNS))
        for row in report["cells"]
    ]
    lines = [markdown_table(("cell", "k-points", *COLUMNS.values()), rows), "", *savings(report)]
    reasons = [
        f"{row['material_id']}, {COLUMNS[start]}: {row['starts'][start]['reason']}."
        for row in report["cells"]
        for start in COLUMNS
        if row["starts"][start]["iterations"] is None
    ]
    return "\n".join([*lines, *([""] if reasons else []), *reasons])


def _times(report: Mapping[str, Any]) -> str:
    header = (
        "cell", "embedded - converged", *(f"{COLUMNS[start]}, NMAE" for start in COLUMNS if start != "converged"),
        *(f"{heading}, CPU s" for heading in COLUMNS.values()), "prediction itself, s",
    )  # fmt: skip
    rows = []
    for row in report["cells"]:
        starts = row["starts"]
        rows.append((
            row["material_id"], percent(row["converged_from_embedded_nmae"], 2),
            *(percent(starts[start].get("nmae"), 2) for start in COLUMNS if start != "converged"),
            *(_number(starts[start]["cpu_seconds"]) for start in COLUMNS),
            _number(starts["prediction"].get("prediction_seconds")),
        ))  # fmt: skip
    return markdown_table(header, rows) + (
        "\n\nNMAE against the converged density of pw.x. *embedded - converged*: the same of the density that the set "
        "holds, computed by eminus."
    )


def _iterations(start: Mapping[str, Any]) -> str:
    return UNKNOWN if start["iterations"] is None else str(start["iterations"])


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"
