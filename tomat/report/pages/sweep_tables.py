"""What the records of a sweep say, planned (`tomat plan --sweep`) or measured (`tomat lab run`): the ranking, speed
against memory, plans beside measurements. Pages, browsers and the terminal show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.report.document import empty_section, update_document
from tomat.base.report.formats import UNKNOWN, number, percent
from tomat.base.report.model import Code, Column, Table
from tomat.base.report.text import plain
from tomat.hardware.mfu import TABLE_UTILISATIONS
from tomat.measure.lab.messages import OUT_OF_MEMORY
from tomat.measure.lab.record import LabRow, order
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_rows import FITS, OOM, RowRecord, base_of, ranked, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
JOULES = "J a step"


def settings_text(overrides: Mapping[str, Any]) -> str:
    """`model.num_heads 4 sharding zero1`, in one order whatever the record's."""
    return " ".join(word.removeprefix("--") for word in override_words(dict(sorted(overrides.items()))))


def planned_table(rows: Sequence[RowRecord]) -> Table:
    """Every planned row, the best MFU first."""
    columns = [
        Column("", number(0)),
        Column("row"),
        Column("slice"),
        Column("batch", number(0)),
        Column("tokens", number(0)),
        Column("HBM MiB", number(0, 1 / MIB)),
        Column("of MiB", number(0, 1 / MIB)),
        *(Column(heading, number(1, 1e3)) for heading in ("step ms", "from", "to")),
        *(Column(one.short, percent) for one in TABLE_UTILISATIONS),
        *(Column(heading, percent) for heading in ("MFU from", "MFU to")),
        Column("without timings", percent),
        Column("tokens/s/chip", number(0)),
        Column("largest category", right=False),
        Column("verdict", right=False),
        Column("settings", right=False),
    ]
    body = []
    for place, row in enumerate(ranked(rows), 1):
        largest = max(row.categories, key=lambda group: group["seconds"], default=None)
        step, mfu = row.step_seconds or {}, row.mfu_full or {}
        body.append(
            (
                place,
                row.name,
                row.slice,
                row.batch_sequences,
                row.sequence_tokens,
                row.hbm_required_bytes or None,
                row.hbm_capacity_bytes or None,
                *(step.get(key) for key in ("estimate", "low", "high")),
                *((row.utilisation(one.key) or {}).get("estimate") for one in TABLE_UTILISATIONS),
                *(mfu.get(key) for key in ("low", "high")),
                row.untimed_step_share,
                (row.tokens_per_second_per_chip or {}).get("estimate"),
                f"{largest['name']} {percent(largest['share'], 0)}" if largest else None,
                verdict(row, base_of(row, rows)).replace("`", ""),
                Code(settings_text(row.overrides)) if row.overrides else None,
            )
        )
    return Table("Rows of the sweep, the best MFU first", columns, body)


def measured_table(rows: Sequence[LabRow]) -> Table:
    """Every measured row, the most tokens a second first; of MFU only where a chip's peak is known, of energy only
    where the devices tell it."""
    shares = [one for one in TABLE_UTILISATIONS if any(row.mfu for row in rows)]
    energy = any(row.step_joules is not None for row in rows)
    setup = {
        "batch": ("batch_sequences", number(0)),
        "accum": ("accumulations", number(0)),
        "tokens": ("sequence_tokens", number(0)),
        "ahead": ("dispatch_ahead", number(0)),
        "shuffle": ("shuffle_rows", str),
        "optimizer": ("optimizer", str),
        "dtype": ("compute_dtype", str),
    }
    columns = [
        Column("", number(0)),
        Column("run"),
        *(Column(heading, show) for heading, (_, show) in setup.items()),
        *(Column(heading, number(0)) for heading in ("tok/s", "least", "most")),
        Column("step ms", number(1, 1e3)),
        Column("compile s", number(1)),
        Column("cached s", number(1)),
        Column("mem peak MiB", number(0, 1 / MIB)),
        Column("limit MiB", number(0, 1 / MIB)),
        *(Column(one.short, percent) for one in shares),
        *((Column(JOULES, number(1)), Column("tokens a J", number(1))) if energy else ()),
        Column("loss", number(4)),
        *(Column(heading, right=False) for heading in ("ok", "against base", "verdict", "settings")),
    ]
    body = []
    for place, row in enumerate(order(rows), 1):
        rates = [one.tokens_per_second for one in row.windows]
        known = {"shuffle_rows": row.setup.get("shuffle_rows") or row.setup.get("shuffle")}
        body.append(
            (
                place,
                row.name,
                *(known.get(key, row.setup.get(key)) for key, _ in setup.values()),
                row.tokens_per_second,
                min(rates, default=None),
                max(rates, default=None),
                row.step_seconds,
                row.compile_cold_seconds,
                row.compile_cached_seconds,
                row.peak_memory_bytes,
                row.memory_limit_bytes,
                *(row.mfu.get(one.key) for one in shares),
                *((row.step_joules, row.tokens_per_joule) if energy else ()),
                row.setup.get("warm_loss"),
                "True" if row.measured else "OOM" if row.status == OUT_OF_MEMORY else "False",
                ratio_text(row),
                measured_verdict(row).replace("`", ""),
                Code(settings_text(row.overrides)) if row.overrides else None,
            )
        )
    return Table("Rows of the sweep, the most tokens a second first; medians of the windows", columns, body)


def chosen(table: Table, headings: Sequence[str]) -> Table:
    """The table with the first column of each of these headings."""
    known = [column.heading for column in table.columns]
    places = [known.index(heading) for heading in headings if heading in known]
    rows = [[row[place] for place in places] for row in table.rows]
    return Table(table.caption, [table.columns[place] for place in places], rows)


def ratio_text(row: LabRow) -> str:
    """`1.05 (1.02 to 1.08)`: tokens a second over the base's."""
    ratio = row.ratio
    return UNKNOWN if ratio is None else f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"


def measured_verdict(row: LabRow) -> str:
    """How a measured row stands, in a few words."""
    if not row.measured:
        return f"{row.status}: {row.reason}"
    if row.base is None:
        return "base"
    ratio = row.ratio
    return f"not compared with `{row.base}`" if ratio is None else f"{ratio.verdict} (`{row.base}`)"


@dataclass(frozen=True)
class Point:
    """A row in the figure of speed against memory."""

    name: str
    place: int
    """In the ranking."""
    memory_mib: float
    speed: float
    low: float
    high: float


@dataclass(frozen=True)
class Pareto:
    """Speed against memory: MFU in percent of plans, tokens a second of measurements."""

    points: Sequence[Point]
    too_large: Mapping[int, float]
    """MiB of rows that do not fit, by their place in the ranking."""
    limits_mib: Sequence[float]
    x: str
    y: str
    bars: str
    """What the bars of a point are."""

    @property
    def front(self) -> list[Point]:
        """Points than which no other has more speed and less memory, by memory."""
        front: list[Point] = []
        for one in sorted(self.points, key=lambda one: (one.memory_mib, -one.speed, one.name)):
            if not front or one.speed > front[-1].speed:
                front.append(one)
        return front

    @property
    def limits_near(self) -> list[float]:
        """Limits that the figure shows: one far to the right would press all rows into one corner."""
        widest = max((one.memory_mib for one in self.points), default=0.0)
        return [limit for limit in self.limits_mib if limit < 2 * widest]

    @property
    def summary(self) -> str:
        """What the figure shows."""
        crosses = ", crosses rows that do not fit" if self.too_large else ""
        least = ", ".join(f"`{one.name}`" for one in self.front)
        return f"Numbers are places in the ranking, bars {self.bars}{crosses}. Least memory for the speed: {least}."


def planned_pareto(rows: Sequence[RowRecord]) -> Pareto:
    """Of the rows that fit."""
    points, too_large = [], {}
    for place, row in enumerate(ranked(rows), 1):
        memory = row.hbm_required_bytes / MIB
        if row.status == FITS and row.mfu_full:
            mfu = (100 * row.mfu_full[key] for key in ("estimate", "low", "high"))
            points.append(Point(row.name, place, memory, *mfu))
        elif row.status == OOM and row.memory_space == "hbm":
            too_large[place] = memory
    limits = sorted({row.hbm_capacity_bytes / MIB for row in rows if row.status == FITS})
    return Pareto(points, too_large, limits, "HBM required by a chip, MiB", "MFU full, %", "the intervals of the plans")


def measured_pareto(rows: Sequence[LabRow]) -> Pareto:
    """Of the rows that have an answer."""
    points = []
    for place, row in enumerate(order(rows), 1):
        if row.measured and row.windows:
            rates = [one.tokens_per_second for one in row.windows]
            memory, speed = (row.peak_memory_bytes or 0) / MIB, row.tokens_per_second or 0.0
            points.append(Point(row.name, place, memory, speed, min(rates), max(rates)))
    limits = sorted({row.memory_limit_bytes / MIB for row in rows if row.memory_limit_bytes})
    return Pareto(points, {}, limits, "peak memory, MiB", "tokens a second", "the smallest and largest window")


def draw_pareto(axes: Axes, pareto: Pareto) -> None:
    """For the page's SVG."""
    for one in pareto.points:
        bars = [[one.speed - one.low], [one.high - one.speed]]
        axes.errorbar([one.memory_mib], [one.speed], bars, fmt="o", ms=4, lw=0.8, color="#2b6cb0", ecolor="#a7b0b8")
    for place, memory in pareto.too_large.items():
        axes.plot([memory], [0], "x", color="#c53030", clip_on=False)
        axes.annotate(str(place), (memory, 0), textcoords="offset points", xytext=(5, 3), fontsize=8)
    for one in pareto.points:
        axes.annotate(
            str(one.place), (one.memory_mib, one.speed), textcoords="offset points", xytext=(5, 3), fontsize=8
        )
    front = pareto.front
    axes.step([one.memory_mib for one in front], [one.speed for one in front], where="post", color="#2f855a", lw=1)
    for limit in pareto.limits_near:
        axes.axvline(limit, color="black", lw=0.8, ls="--")
    axes.set(xlabel=f"{pareto.x} (dashed: limit)", ylabel=pareto.y, ylim=(0, None))
    axes.set_xlim(left=0)


def compared_table(plans: Mapping[str, RowRecord], rows: Sequence[LabRow]) -> Table:
    """Rows that were planned and measured with the same settings; of none where there are none."""
    columns = [
        Column("run"),
        Column("planned for"),
        Column("planned step ms", number(1, 1e3)),
        Column("measured step ms", number(1, 1e3)),
        Column("measured / planned", number(2)),
        Column("planned MiB", number(0, 1 / MIB)),
        Column("measured MiB", number(0, 1 / MIB)),
    ]
    body = []
    for row in order(rows):
        plan = plans.get(row.name)
        if plan is None or plan.step_seconds is None or row.step_seconds is None:
            continue
        if dict(plan.overrides) == dict(row.overrides):
            planned = plan.estimate("step_seconds")
            memory = plan.hbm_required_bytes, row.peak_memory_bytes
            ratio = row.step_seconds / planned
            body.append((row.name, str(plan.slice), planned, row.step_seconds, ratio, *memory))
    return Table("Steps planned and measured", columns, body)


COMPARED = "Plans are for the slice named; on another device, a CPU above all, not even their order has to hold."
NOT_COMPARED = (
    "No row is on record both as a plan and as a measurement: `tomat plan --sweep` and `tomat lab run` of one file, "
    "into one tracking folder, make such."
)
VERDICT = """## Verdict

<!-- What to do because of it. The text outside tomat's markers is yours. -->
"""


def write_sections(page: Path, title: str, contents: Mapping[str, str], headings: Mapping[str, str]) -> Path:
    """Write a page's sections, or bring them up to date; what people wrote between them stays.

    Args:
        page: The Markdown file.
        title: Of a new page.
        contents: Markdown by the names of the sections.
        headings: Of the sections that a new page has, in order; "" for one without, or with its own.

    Raises:
        TomatError: The page's markers are broken. Nothing is written then.
    """
    parts = [part for name, heading in headings.items() for part in (heading and f"## {heading}", empty_section(name))]
    update_document(page, contents, "\n\n".join([f"# {plain(title)}", *filter(None, parts), VERDICT]))
    return page
