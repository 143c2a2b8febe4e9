"""The page of a sweep of plans: ranking, MFU against memory, where the time goes, answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.layout import FIGURES_DIR
from tomat.base.records import typed
from tomat.base.report.document import find_sections
from tomat.base.report.formats import UNKNOWN, percent, seconds
from tomat.base.report.markdown import markdown, markdown_table
from tomat.base.report.model import Image
from tomat.base.report.svg import draw_svg
from tomat.base.report.terminal import show
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.perf.tuning.sweep_answers import answers_section
from tomat.perf.tuning.sweep_rows import FITS, RowRecord, ranked
from tomat.report.pages.report import write_index
from tomat.report.pages.sweep_scaling import scaling_section
from tomat.report.pages.sweep_tables import chosen, draw_pareto, planned_pareto, planned_table, write_sections

HEADINGS = {
    "introduction": "",
    "ranking": "Ranking",
    "scaling": "",
    "pareto": "MFU against memory",
    "shares": "Where the time goes",
    "answers": "Answers",
}

LEGEND = (
    "Planned, not measured. HBM: of one chip, required and available. Intervals are those of a step's parts "
    "(`kernels.md`); the error is largely common to the rows of one model, so their order is surer than their figures. "
    f"*Without timings* is the share of the step on kernels that no such chip has timed the like of ({UNKNOWN}: "
    "planned before that was kept)."
)
SCALING = "scaling"
"""Name of the section that only pages of sweeps with lines have; its heading is inside."""
WINDOW_KEY = "model.sliding_window"
WINDOW_LEGEND = (
    "MFU counts the pairs in the attention's window, so a sliding window lowers the counted work too: compare such "
    "rows by tokens/s."
)


def write_sweep_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    """Write (or bring up to date) the page of a sweep, its figure and the index.

    Returns:
        The page.

    Raises:
        TomatError: The page's or the index's markers are broken. Nothing is written then.
    """
    page = tracking_dir / f"{record['sweep']}.md"
    for path in (page, tracking_dir / "index.md"):
        if path.exists():
            find_sections(path.read_text(encoding="utf-8"), str(path))
    rows = typed(record["rows"], list[RowRecord], "the record", "Run the sweep again.")
    contents = {
        "introduction": introduction_section(record),
        "ranking": ranking_section(rows),
        "pareto": pareto_section(record["sweep"], rows, tracking_dir),
        "shares": shares_section(rows),
        "answers": answers_section(rows),
    }
    if any(row.lines for row in rows):
        contents[SCALING] = scaling_section(record["sweep"], rows, tracking_dir)
    elif page.exists() and SCALING in find_sections(page.read_text(encoding="utf-8"), str(page)):
        contents[SCALING] = ""  # of lines that the file had before
    headings = {name: heading for name, heading in HEADINGS.items() if contents.get(name)}
    write_sections(page, record["title"], contents, headings)
    write_index(tracking_dir)
    return page


def introduction_section(record: Mapping[str, Any]) -> str:
    """What was planned, with which compiler."""
    compilers = sorted({row["compiler"] for row in record["rows"] if row.get("compiler")})
    said = f"{record['n_fitting']} of {record['n_rows']} rows fit."
    missing = record["n_rows"] - len(record["rows"])
    if missing:
        said += f" {missing} are not planned yet: run the sweep again to continue."
    said += f" Compiled by {', '.join(compilers)}." if compilers else ""
    return f"{record['introduction']}\n\n{said}".strip()


def ranking_section(rows: Sequence[RowRecord]) -> str:
    """Every row, the best MFU first."""
    notes = [f"{note[0].upper()}{note[1:]}." for note in dict.fromkeys(n for row in rows for n in row.notes)]
    legend = [LEGEND, *([WINDOW_LEGEND] if any(WINDOW_KEY in row.overrides for row in rows) else [])]
    return markdown([planned_table(rows), " ".join([*legend, *notes])])


def shares_section(rows: Sequence[RowRecord]) -> str:
    """The share of each category in the rows that fit."""
    shown = [row for row in ranked(rows) if row.status == FITS and row.categories]
    if not shown:
        return "No row fits."
    names: dict[str, float] = {}
    for row in shown:
        for group in row.categories:
            names[group["name"]] = max(names.get(group["name"], 0.0), group["share"])
    kept = [name for name, share in sorted(names.items(), key=lambda item: (-item[1], item[0])) if share >= 0.01]
    body = []
    for row in shown:
        mine = {group["name"]: group["share"] for group in row.categories}
        body.append((row.name, seconds(row.estimate("step_seconds")), *(percent(mine.get(n), 0) for n in kept)))
    return markdown_table(("row", "step", *kept), body) + "\n\nCategories below 1 % in every row are left out."


def pareto_section(name: str, rows: Sequence[RowRecord], tracking_dir: Path) -> str:
    """The figure, and the rows that no other beats in both MFU and memory."""
    pareto = planned_pareto(rows)
    if not pareto.points:
        return "No row fits."
    figure = f"{FIGURES_DIR}/{name}-pareto.svg"
    draw_svg(tracking_dir / figure, draw_pareto, pareto, (7.0, 4.2))
    return markdown([Image("MFU against HBM", figure), pareto.summary])


def print_ranking(record: Mapping[str, Any]) -> None:
    """The ranking on the console."""
    rows = typed(record["rows"], list[RowRecord], "the record", "Run the sweep again.")
    shares = (one.short for one in TABLE_UTILISATIONS)
    shown = ("row", "HBM MiB", "of MiB", "step ms", *shares, "without timings", "largest category", "verdict")
    show(chosen(planned_table(rows), shown))
