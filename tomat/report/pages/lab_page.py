"""The page of a measured sweep: ranking, tokens a second against memory, hours an epoch, plans beside measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from tomat.base.layout import FIGURES_DIR
from tomat.base.records import typed
from tomat.base.report.document import empty_section, find_sections, update_document
from tomat.base.report.formats import UNKNOWN, markdown_table, percent
from tomat.base.report.text import plain
from tomat.base.reporting import console, counted
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.measure.lab.compare import SAME
from tomat.measure.lab.messages import OUT_OF_MEMORY
from tomat.measure.lab.record import LabRow, median, order
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep import record_path as plan_record_path
from tomat.perf.tuning.sweep import rows_on_record
from tomat.report.pages.figures import draw_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE_TEMPLATE = """# {title}

{introduction}

## Ranking

{ranking}

## Tokens a second against memory

{pareto}

## Hours an epoch

{epochs}

## Planned and measured

{planned}

## Verdict

<!-- What to do because of it. The text outside tomat's markers is yours. -->
"""

MIB = 2**20
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
    template = PAGE_TEMPLATE.format(title=plain(record["title"]), **{name: empty_section(name) for name in contents})
    update_document(page, contents, template)
    return page


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


def header(rows: Sequence[LabRow]) -> tuple[str, ...]:
    """Columns of the ranking; of MFU only where a chip's peak is known, of energy only where the devices tell it."""
    energy = (JOULES, "tokens a J") if any(row.step_joules is not None for row in rows) else ()
    shares = tuple(one.short for one in TABLE_UTILISATIONS) if any(row.mfu for row in rows) else ()
    return (
        "", "run", "batch", "accum", "tokens", "ahead", "shuffle", "optimizer", "dtype", "extra", "tok/s",
        "step ms", "compile s, cold / cached", "mem peak MiB", "limit MiB", *shares, *energy, "loss", "ok",
        "against base", "verdict",
    )  # fmt: skip


LEGEND = (
    "tok/s and step: median of the windows (smallest to largest). accum: microbatches of a step. ahead: steps that are "
    "dispatched before a loss is read. shuffle: rows of a window of the shuffle. compile: lowering and compiling the "
    "step's programs; cached, as a later start finds them. mem peak: {memory}. loss: after the warm-up, after as many "
    "steps in every row. against base: tokens a second over the base's, mean of pairs of windows that were measured "
    "beside each other, with its 95 % interval, by the row's windows or by what starts of a row differ by in this "
    "sweep, whichever is wider; *within noise* where that holds 1."
)
JOULES = "J a step"
MEMORY_SOURCES = {
    "device": "of the fullest device",
    "process": "resident memory of the process, Python and JAX included (the devices say nothing)",
}


def ranking_section(rows: Sequence[LabRow], same: Sequence[Sequence[str]]) -> str:
    """Every row, the fastest first."""
    columns = header(rows)
    body = [(str(place), *figures(row, columns)) for place, row in enumerate(order(rows), 1)]
    sources = sorted({row.setup["memory_source"] for row in rows if "memory_source" in row.setup})
    legend = LEGEND.format(memory="; ".join(MEMORY_SOURCES[one] for one in sources) or "not known")
    told = sorted({row.setup["energy_source"] for row in rows if row.setup.get("energy_source")})
    energy = "" if not told else f"{JOULES}: of {told[0]}." if JOULES in columns else f"Energy: {told[0]}."
    notes = [*([energy] if energy else []), *(same_text(rows, names) for names in same)]
    align = "rl" + "r" * 5 + "lll" + "r" * (len(columns) - 13) + "lll"
    return markdown_table(columns, body, align) + "\n\n" + " ".join([legend, *notes])


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


def figures(row: LabRow, columns: Sequence[str]) -> tuple[str, ...]:
    """A row's cells after its place."""
    setup, shown = row.setup, sorted(window.tokens_per_second for window in row.windows)
    settings = " ".join(word.removeprefix("--") for word in override_words(dict(sorted(row.overrides.items()))))
    steps = sorted(1e3 * window.step_seconds for window in row.windows)
    shares = tuple(percent(row.mfu.get(one.key)) for one in TABLE_UTILISATIONS if one.short in columns)
    peak, limit = row.peak_memory_bytes, row.memory_limit_bytes

    def known(key: str, text: str = "{}") -> str:
        return UNKNOWN if setup.get(key) is None else text.format(setup[key])

    def range_text(median_value: float | None, values: Sequence[float], digits: int) -> str:
        if median_value is None:
            return UNKNOWN
        return f"{median_value:,.{digits}f} ({values[0]:,.{digits}f} to {values[-1]:,.{digits}f})"

    return (
        row.name,
        known("batch_sequences"),
        known("accumulations"),
        known("sequence_tokens"),
        known("dispatch_ahead"),
        known("shuffle_rows", "{:,}") if setup.get("shuffle_rows") else known("shuffle"),
        known("optimizer"),
        known("compute_dtype"),
        f"`{settings}`" if settings else UNKNOWN,
        range_text(row.tokens_per_second, shown, 0),
        range_text(None if row.step_seconds is None else 1e3 * row.step_seconds, steps, 1),
        f"{_number(row.compile_cold_seconds)} / {_number(row.compile_cached_seconds)}",
        UNKNOWN if peak is None else f"{peak / MIB:,.0f}",
        UNKNOWN if limit is None else f"{limit / MIB:,.0f}",
        *shares,
        *((_number(row.step_joules), _number(row.tokens_per_joule)) if JOULES in columns else ()),
        known("warm_loss", "{:.4f}"),
        "True" if row.measured else "OOM" if row.status == OUT_OF_MEMORY else "False",
        ratio_text(row),
        verdict(row),
    )


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def ratio_text(row: LabRow) -> str:
    """`1.05 (1.02 to 1.08)`."""
    ratio = row.ratio
    return UNKNOWN if ratio is None else f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def verdict(row: LabRow) -> str:
    """How the row stands, in a few words."""
    if not row.measured:
        return f"{row.status}: {row.reason}"
    if row.base is None:
        return "base"
    ratio = row.ratio
    return f"not compared with `{row.base}`" if ratio is None else f"{ratio.verdict} (`{row.base}`)"


def figures_text(row: LabRow) -> str:
    """One line about a row that has just been measured."""
    if not row.measured or row.tokens_per_second is None:
        return verdict(row)
    return f"{row.tokens_per_second:,.0f} tokens/s, against its base {ratio_text(row)}: {verdict(row)}"


def pareto_front(rows: Sequence[LabRow]) -> list[LabRow]:
    """Rows than which no other has more tokens a second and less memory, by memory."""
    front: list[LabRow] = []
    points = [row for row in rows if row.measured and row.peak_memory_bytes]
    for row in sorted(points, key=lambda r: (r.peak_memory_bytes or 0, -(r.tokens_per_second or 0.0), r.name)):
        if not front or (row.tokens_per_second or 0.0) > (front[-1].tokens_per_second or 0.0):
            front.append(row)
    return front


def pareto_section(name: str, rows: Sequence[LabRow], tracking_dir: Path) -> str:
    """The figure, and the rows that no other beats in both."""
    if not pareto_front(rows):
        return "No row has an answer yet."
    figure = tracking_dir / FIGURES_DIR / f"{name}-pareto.svg"
    draw_svg(figure, _draw_pareto, rows, (7.0, 4.2))
    front = ", ".join(f"`{row.name}`" for row in pareto_front(rows))
    return (
        f"![Tokens a second against memory]({FIGURES_DIR}/{figure.name})\n\nNumbers are places in the ranking, bars "
        f"the smallest and largest window. Least memory for the speed: {front}."
    )


def _draw_pareto(axes: Axes, rows: Sequence[LabRow]) -> None:
    for place, row in enumerate(order(rows), 1):
        if not row.measured:
            continue
        x, y = (row.peak_memory_bytes or 0) / MIB, row.tokens_per_second or 0.0
        rates = [window.tokens_per_second for window in row.windows]
        spread = [[y - min(rates)], [max(rates) - y]]
        axes.errorbar([x], [y], spread, fmt="o", ms=4, lw=0.8, color="#2b6cb0", ecolor="#a7b0b8")
        axes.annotate(str(place), (x, y), textcoords="offset points", xytext=(5, 3), fontsize=8)
    front = pareto_front(rows)
    memory = [(row.peak_memory_bytes or 0) / MIB for row in front]
    axes.step(memory, [row.tokens_per_second or 0.0 for row in front], where="post", color="#2f855a", lw=1)
    for limit in sorted({row.memory_limit_bytes for row in rows if row.memory_limit_bytes}):
        if limit / MIB < 2 * max(memory):
            axes.axvline(limit / MIB, color="black", lw=0.8, ls="--")
    axes.set(xlabel="peak memory, MiB (dashed: limit)", ylabel="tokens a second", ylim=(0, None))


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
        assert row.tokens_per_second is not None and row.peak_memory_bytes is not None  # it is measured
        hours = tokens / row.tokens_per_second / 3600
        cells = [str(row.setup[key]) for key in ("batch_sequences", "accumulations")]
        peak = f"{row.peak_memory_bytes / MIB:,.0f}"
        body.append((row.name, *cells, f"{row.tokens_per_second:,.0f}", peak, f"{hours:,.3g}"))
    table = markdown_table(("run", "batch", "accum", "tok/s", "mem peak MiB", "est hours / epoch"), body)
    said = "; ".join(f"{n:,} sequences of {length:,} tokens ({n * length:,} an epoch)" for n, length in sorted(sizes))
    return f"{table}\n\nOf {said}, padding included; evaluation and checkpoints not."


def planned_section(name: str, rows: Sequence[LabRow], tracking_dir: Path) -> str:
    """Rows that have been planned too (`tomat plan --sweep` of the same file), with both figures."""
    plans = rows_on_record(plan_record_path(tracking_dir, name))
    body = []
    for row in order(rows):
        plan = plans.get(row.name)
        if plan is None or plan.step_seconds is None or row.step_seconds is None:
            continue
        if dict(plan.overrides) != dict(row.overrides):
            continue
        planned = plan.estimate("step_seconds")
        memory = f"{plan.hbm_required_bytes / MIB:,.0f}"
        body.append(
            (
                row.name,
                str(plan.slice),
                f"{1e3 * planned:,.1f}",
                f"{1e3 * row.step_seconds:,.1f}",
                f"{row.step_seconds / planned:,.2f}",
                memory,
                f"{(row.peak_memory_bytes or 0) / MIB:,.0f}",
            )
        )
    if not body:
        return "No row of this sweep has been planned: `tomat plan --sweep` of the same file does that, for TPUs."
    columns = ("run", "planned for", "planned step ms", "measured step ms", "measured / planned", "planned MiB",
               "measured MiB")  # fmt: skip
    said = "Plans are for the slice named; on another device, a CPU above all, not even their order has to hold."
    return markdown_table(columns, body, "llrrrrr") + f"\n\n{said}"


def print_ranking(record: Mapping[str, Any]) -> None:
    """The ranking on the console."""
    rows = typed(record["rows"], list[LabRow], "the record", "Run the lab again.")
    columns = ("tok/s", "step ms", "mem peak MiB", "loss", "against base", "verdict")
    table = Table(title=record["title"])
    for heading in ("row", *columns):
        table.add_column(heading, justify="left" if heading in ("row", "verdict") else "right")
    names = header(rows)[1:]
    for row in order(rows):
        cells = dict(zip(names, figures(row, names), strict=True))
        table.add_row(row.name, *(cells[heading] for heading in columns))
    console.print(table)
    for names in record["same_settings"]:
        console.print(f"note: {same_text(rows, names)}".replace("`", "'"), highlight=False)
