"""The page of a sweep: ranking, MFU against memory, where the time goes, answers; and the ranking on the console."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tomat.base.layout import FIGURES_DIR
from tomat.base.records import typed
from tomat.base.report.document import empty_section, find_sections, update_document
from tomat.base.report.formats import UNKNOWN, markdown_table, percent, seconds
from tomat.base.report.text import plain
from tomat.base.reporting import console
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_answers import answers_section
from tomat.perf.tuning.sweep_rows import (
    FITS,
    OOM,
    RowRecord,
    base_of,
    interval_text,
    ranked,
    required_text,
    verdict,
)
from tomat.report.pages.figures import draw_svg
from tomat.report.pages.report import write_index
from tomat.report.pages.sweep_scaling import scaling_section

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_TEMPLATE = """# {title}

{introduction}

## Ranking

{ranking}

{scaling}## MFU against memory

{pareto}

## Where the time goes

{shares}

## Answers

{answers}

## Verdict

<!-- What to do because of it. The text outside tomat's markers is yours. -->
"""

HEADER = ("", "row", "settings", "slice", "batch x tokens", "HBM", "step",
          *(one.short for one in TABLE_UTILISATIONS), "without timings", "largest category", "verdict")  # fmt: skip
LEGEND = (
    "Planned, not measured. HBM: of one chip, required and available. Intervals are those of a step's parts "
    "(`kernels.md`); the error is largely common to the rows of one model, so their order is surer than their figures. "
    f"*Without timings* is the share of the step on kernels that no such chip has timed the like of ({UNKNOWN}: "
    "planned before that was kept)."
)
SCALING = "scaling"
"""Name of the section that only pages of sweeps with lines have."""
WINDOW_KEY = "model.sliding_window"
WINDOW_LEGEND = (
    "MFU counts the pairs in the attention's window, so a sliding window lowers the counted work too: compare such "
    "rows by tokens/s."
)


def write_sweep_page(record: Mapping[str, Any], tracking_dir: Path) -> Path:
    """Write (or bring up to date) the page of a sweep, its figure and the index.

    Args:
        record: As `plan_rows` returns it.
        tracking_dir: Such as `docs/tracking`.

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
    markers = {name: empty_section(name) for name in contents} | {"scaling": ""}
    if any(row.lines for row in rows):
        contents[SCALING] = scaling_section(record["sweep"], rows, tracking_dir)
        markers[SCALING] = f"{empty_section(SCALING)}\n\n"
    elif page.exists() and SCALING in find_sections(page.read_text(encoding="utf-8"), str(page)):
        contents[SCALING] = ""  # of lines that the file had before
    template = PAGE_TEMPLATE.format(title=plain(record["title"]), **markers)
    update_document(page, contents, template)
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
    body = []
    for place, row in enumerate(ranked(rows), 1):
        # In one order, whether the row was planned just now or read from the record, whose keys are sorted.
        settings = " ".join(override_words(dict(sorted(row.overrides.items())))).replace("--", "")
        shape = f"{row.batch_sequences} x {row.sequence_tokens}" if row.batch_sequences else UNKNOWN
        setup = (f"`{settings}`" if settings else UNKNOWN, str(row.slice or UNKNOWN), shape)
        body.append((str(place), row.name, *setup, *_figures(row, rows, bare=False)))
    legend = [LEGEND, *([WINDOW_LEGEND] if any(WINDOW_KEY in row.overrides for row in rows) else [])]
    return markdown_table(HEADER, body, "rlllrrrrrrrrll") + "\n\n" + " ".join([*legend, *notes])


def _figures(row: RowRecord, rows: Sequence[RowRecord], bare: bool) -> tuple[str, ...]:
    """A row's cells from its memory on; `bare`: without the intervals of step and MFU."""
    largest = max(row.categories, key=lambda group: group["seconds"], default=None)
    full, *others = TABLE_UTILISATIONS
    return (
        required_text(row),
        interval_text(row.step_seconds, seconds, bare),
        interval_text(row.utilisation(full.key), percent, bare),
        *(interval_text(row.utilisation(one.key), percent, bare=True) for one in others),
        percent(row.untimed_step_share),
        f"{largest['name']} {percent(largest['share'], 0)}" if largest else UNKNOWN,
        verdict(row, base_of(row, rows)),
    )


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
    fitting = _points(rows)
    if not fitting:
        return "No row fits."
    figure = tracking_dir / FIGURES_DIR / f"{name}-pareto.svg"
    draw_svg(figure, _draw_pareto, rows, (7.0, 4.2))
    front = ", ".join(f"`{row.name}`" for row in pareto_front(rows))
    return (
        f"![MFU against HBM]({FIGURES_DIR}/{figure.name})\n\nNumbers are places in the ranking, bars the intervals, "
        f"crosses rows that do not fit. Least memory for the MFU: {front}."
    )


def _points(rows: Sequence[RowRecord]) -> list[RowRecord]:
    return [row for row in rows if row.status == FITS and row.mfu_full]


def pareto_front(rows: Sequence[RowRecord]) -> list[RowRecord]:
    """Rows than which no other has more MFU (full) and less memory, by memory."""
    front: list[RowRecord] = []
    best = 0.0
    for row in sorted(_points(rows), key=lambda r: (r.hbm_required_bytes, -r.estimate("mfu_full"), r.name)):
        if row.estimate("mfu_full") > best:
            best = row.estimate("mfu_full")
            front.append(row)
    return front


def _draw_pareto(axes: Axes, rows: Sequence[RowRecord]) -> None:
    place = {row.name: number for number, row in enumerate(ranked(rows), 1)}
    for row in _points(rows):
        x, mfu = row.hbm_required_bytes / 2**30, row.mfu_full or {}
        y, low, high = (100 * mfu[name] for name in ("estimate", "low", "high"))
        axes.errorbar([x], [y], [[y - low], [high - y]], fmt="o", ms=4, lw=0.8, color="#2b6cb0", ecolor="#a7b0b8")
        axes.annotate(str(place[row.name]), (x, y), textcoords="offset points", xytext=(5, 3), fontsize=8)
    front = pareto_front(rows)
    axes.step(
        [row.hbm_required_bytes / 2**30 for row in front],
        [100 * row.estimate("mfu_full") for row in front],
        where="post", color="#2f855a", lw=1,
    )  # fmt: skip
    for row in rows:
        if row.status == OOM and row.memory_space == "hbm":
            x = row.hbm_required_bytes / 2**30
            axes.plot([x], [0], "x", color="#c53030", clip_on=False)
            axes.annotate(str(place[row.name]), (x, 0), textcoords="offset points", xytext=(5, 3), fontsize=8)
    for capacity in sorted({row.hbm_capacity_bytes for row in _points(rows)}):
        axes.axvline(capacity / 2**30, color="black", lw=0.8, ls="--")
    axes.set(xlabel="HBM required by a chip, GiB (dashed: available)", ylabel="MFU full, %", ylim=(0, None))
    axes.set_xlim(left=0)


def print_ranking(record: Mapping[str, Any]) -> None:
    """The ranking on the console."""
    table = Table(title=record["title"])
    shares = (one.short for one in TABLE_UTILISATIONS)
    for heading in ("row", "HBM", "step", *shares, "without timings", "largest category", "verdict"):
        table.add_column(heading, justify="left" if heading in ("row", "largest category", "verdict") else "right")
    rows = typed(record["rows"], list[RowRecord], "the record", "Run the sweep again.")
    for row in ranked(rows):
        table.add_row(row.name, *_figures(row, rows, bare=True))
    console.print(table)
