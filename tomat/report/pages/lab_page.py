"""The page of a measured sweep: ranking, tokens a second against memory, hours an epoch, plans beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.layout import FIGURES_DIR
from tomat.base.records import typed
from tomat.base.report.document import find_sections
from tomat.base.report.formats import number, percent
from tomat.base.report.markdown import markdown
from tomat.base.report.model import Column, Image, Note, Table
from tomat.base.report.svg import draw_svg
from tomat.base.report.terminal import show
from tomat.base.reporting import counted
from tomat.measure.lab.record import LabRow, median, order
from tomat.measure.lab.speedup import SAME
from tomat.perf.tuning.sweep import record_path as plan_record_path
from tomat.perf.tuning.sweep import rows_on_record
from tomat.report.pages.sweep_tables import (
    COMPARED,
    JOULES,
    MIB,
    NOT_COMPARED,
    chosen,
    compared_table,
    draw_pareto,
    measured_pareto,
    measured_table,
    measured_verdict,
    ratio_text,
    write_sections,
)

HEADINGS = {
    "introduction": "",
    "ranking": "Ranking",
    "pareto": "Tokens a second against memory",
    "epochs": "Hours an epoch",
    "planned": "Planned and measured",
}
BUSY_SHARE = 0.05
"""Of the processors used by others from which a page says that the machine was shared."""


def write_lab_page(record: Mapping[str, Any], tracking_dir: Path, epoch_rows: int | None = None) -> Path:
    """Write (or bring up to date) the page of a measured sweep, and its figure.

    Args:
        record: As `Lab.record` gives it.
        tracking_dir: Such as `docs/tracking`.
        epoch_rows: Sequences of the data set that epochs are of; None: the one that was trained on.

    Raises:
        TomatError: The page's markers are broken, or the record of the plans is damaged. Nothing is written then.
    """
    page = tracking_dir / f"{record['sweep']}.md"
    if page.is_file():
        find_sections(page.read_text(encoding="utf-8"), str(page))
    rows = typed(record["rows"], list[LabRow], "the record", "Run the lab again.")
    contents = {
        "introduction": introduction_section(record, rows),
        "ranking": ranking_section(rows, record["same_settings"]),
        "pareto": pareto_section(record["sweep"], rows, tracking_dir),
        "epochs": epochs_section(rows, epoch_rows),
        "planned": planned_section(record["sweep"], rows, tracking_dir),
    }
    return write_sections(page, record["title"], contents, HEADINGS)


def introduction_section(record: Mapping[str, Any], rows: Sequence[LabRow]) -> str:
    """What was measured, on what, and how."""
    how = record["measured_with"]
    window = f"{how['steps']} steps" if how["steps"] else f"about {how['window_seconds']:g} s, at least 2 steps"
    said = (
        f"Measured on {record['devices'] or 'no device'}, {record['n_processors']} processors. Each row is a process "
        f"of its own, started {counted(how['rounds'], 'time')}; each start is {how['repeats']} windows of {window}, "
        f"after {how['warmup_steps'] + 1} steps that do not count, each window beside one of the row's base, which was "
        "started for it. "
        f"{record['n_measured']} of {record['n_rows']} rows have an answer."
    )
    busy = median(window.others_busy_share for row in rows for window in row.windows)
    if busy is not None and busy >= BUSY_SHARE:
        said += (
            f" **The machine was shared:** other processes used {percent(busy, 0)} of its processors meanwhile "
            "(median of the windows). Speeds are below those of a quiet machine, and intervals are wide."
        )
    if how["rounds"] == 1:
        said += " Of one start, intervals do not hold what a process keeps for its life (some 3 % on a CPU)."
    if (overhead := record.get("overhead_seconds_per_start")) is not None:
        said += f" The lab itself took {overhead:.2f} s for each start."
    return f"{record['introduction']}\n\n{said}".strip()


LEGEND = (
    "tok/s and step: median of the windows; least and most: the smallest and largest. accum: microbatches of a step. "
    "ahead: steps that are dispatched before a loss is read. shuffle: rows of a window of the shuffle. compile: "
    "lowering and compiling the step's programs; cached: as a later start finds them. mem peak: {memory}. loss: after "
    "the warm-up, after as many steps in every row. against base: tokens a second over the base's, mean of pairs of "
    "windows that were measured beside each other, with its 95 % interval, by the row's windows or by what starts of a "
    "row differ by in this sweep, whichever is wider; *within noise* where that holds 1."
)
MEMORY_SOURCES = {
    "device": "of the fullest device",
    "process": "resident memory of the process, Python and JAX included (the devices say nothing)",
}


def ranking_section(rows: Sequence[LabRow], same: Sequence[Sequence[str]]) -> str:
    """Every row, the fastest first."""
    table = measured_table(rows)
    sources = sorted({row.setup["memory_source"] for row in rows if "memory_source" in row.setup})
    legend = LEGEND.format(memory="; ".join(MEMORY_SOURCES[one] for one in sources) or "not known")
    told = sorted({row.setup["energy_source"] for row in rows if row.setup.get("energy_source")})
    shown = any(one.heading == JOULES for one in table.columns)
    energy = "" if not told else f"{JOULES}: of {told[0]}." if shown else f"Energy: {told[0]}."
    notes = [*([energy] if energy else []), *(same_text(rows, names) for names in same)]
    return markdown([table, " ".join([legend, *notes])])


def same_text(rows: Sequence[LabRow], names: Sequence[str]) -> str:
    """Of rows that are one setting: which, and what the comparison makes of them."""
    compared = [row for row in rows if row.name in names and row.base in names and row.ratio is not None]
    within = sum(row.ratio is not None and row.ratio.verdict == SAME for row in compared)
    listed = (
        " and ".join(f"`{name}`" for name in names) if len(names) < 4 else f"`{names[0]}` and {len(names) - 1} more"
    )
    return (
        f"{listed} are one setting and differ by noise: of {counted(len(compared), 'comparison')} of it with itself, "
        f"{within} {'has' if within == 1 else 'have'} 1 in the interval, which 19 of 20 should."
    )


def figures_text(row: LabRow) -> str:
    """One line about a row that has just been measured."""
    if not row.measured or row.tokens_per_second is None:
        return measured_verdict(row)
    return f"{row.tokens_per_second:,.0f} tokens/s, against its base {ratio_text(row)}: {measured_verdict(row)}"


def pareto_section(name: str, rows: Sequence[LabRow], tracking_dir: Path) -> str:
    """The figure, and the rows that no other beats in both."""
    pareto = measured_pareto(rows)
    if not pareto.points:
        return "No row has an answer yet."
    figure = f"{FIGURES_DIR}/{name}-pareto.svg"
    draw_svg(tracking_dir / figure, draw_pareto, pareto, (7.0, 4.2))
    return markdown([Image("Tokens a second against memory", figure), pareto.summary])


def epochs_section(rows: Sequence[LabRow], epoch_rows: int | None) -> str:
    """Hours an epoch of every row that has an answer."""
    shown = [row for row in order(rows) if row.measured]
    if not shown:
        return "No row has an answer yet."
    body, sizes = [], set()
    for row in shown:
        n_rows = epoch_rows or row.setup["train_rows"]
        tokens = n_rows * row.setup["sequence_tokens"]
        sizes.add((n_rows, row.setup["sequence_tokens"]))
        assert row.tokens_per_second is not None  # it is measured
        hours = tokens / row.tokens_per_second / 3600
        cells = (row.setup[key] for key in ("batch_sequences", "accumulations"))
        body.append((row.name, *cells, row.tokens_per_second, row.peak_memory_bytes, hours))
    columns = [
        Column("run"),
        Column("batch", number(0)),
        Column("accum", number(0)),
        Column("tok/s", number(0)),
        Column("mem peak MiB", number(0, 1 / MIB)),
        Column("est hours / epoch", lambda hours: f"{hours:,.3g}"),
    ]
    said = "; ".join(f"{n:,} sequences of {length:,} tokens ({n * length:,} an epoch)" for n, length in sorted(sizes))
    return markdown([Table("", columns, body), f"Of {said}, padding included; evaluation and checkpoints not."])


def planned_section(name: str, rows: Sequence[LabRow], tracking_dir: Path) -> str:
    """Rows that have been planned too (`tomat plan --sweep` of the same file), with both figures."""
    table = compared_table(rows_on_record(plan_record_path(tracking_dir, name)), rows)
    return markdown([table, COMPARED] if table.rows else [NOT_COMPARED])


def print_ranking(record: Mapping[str, Any]) -> None:
    """The ranking on the console."""
    rows = typed(record["rows"], list[LabRow], "the record", "Run the lab again.")
    shown = ("run", "tok/s", "least", "most", "step ms", "mem peak MiB", "loss", "against base", "verdict")
    show(
        chosen(measured_table(rows), shown),
        *(Note(same_text(rows, names).replace("`", "'")) for names in record["same_settings"]),
    )
