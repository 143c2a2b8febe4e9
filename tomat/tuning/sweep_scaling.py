"""How the lines of a sweep scale over slices: figure, table, and where communication takes over.

A line is a recipe on slice after slice; a row of the sweep is a point of every line that it names. Tokens/s are of the
whole slice, exposed collectives are the time of a step in which a chip does nothing but wait for others.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.pages.tables import UNKNOWN, markdown_table, percent, seconds
from tomat.profile.categories import Category
from tomat.tracking.figures import draw_svg
from tomat.tracking.report import FIGURES_DIR
from tomat.tuning.sweep_rows import FITS, SAME, Interval, RowRecord, interval_text, required_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLLECTIVES_LIMIT = 0.10
"""Of the step: from here on communication is called a cost of the slice. A chip in ten then works for nothing, and
below it no change of communication can gain more than a tenth."""

HEADER = ("line", "slice", "chips", "sequences a chip", "step", "tokens/s", "MFU full", "exposed collectives",
          "of the step", "HBM")  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart with any colour vision (Okabe and Ito, 2008)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "h", "*")
ASIDE = 1.035
"""Factor in chips between the bars of two lines, which would cover each other."""


@dataclass(frozen=True)
class Crossing:
    """Where the exposed collectives of a line pass `COLLECTIVES_LIMIT`; fractions of the step."""

    line: str
    shares: Mapping[int, float]
    """By the number of chips, of the points that have a step time; ascending."""
    without: Mapping[int, str]
    """Chips of the points that have none, and why."""

    @property
    def above(self) -> list[int]:
        """Numbers of chips with a larger share than the limit."""
        return [chips for chips, share in self.shares.items() if share > COLLECTIVES_LIMIT]

    @property
    def sentence(self) -> str:
        """For the page."""
        if not self.shares:
            said = "no step time, so nothing is known of its collectives"
        elif above := self.above:
            said = f"exposed collectives pass {percent(COLLECTIVES_LIMIT, 0)} of the step first at "
            said += f"{_chips(above[0])} ({percent(self.shares[above[0]])})"
            below = [chips for chips in self.shares if chips > above[0] and chips not in above]
            said += f", and are below it again at {_listed(below)}" if below else ""
        else:
            most = max(self.shares, key=lambda chips: self.shares[chips])
            said = f"exposed collectives pass {percent(COLLECTIVES_LIMIT, 0)} of the step at none of "
            said += f"{_listed([*self.shares])}; the most is {percent(self.shares[most])}, at {most:,}"
        missing = ", ".join(f"{_chips(chips)} ({status})" for chips, status in self.without.items())
        return f"`{self.line}`: {said}." + (f" Without a step time: {missing}." if missing else "")


@dataclass(frozen=True)
class Contest:
    """The rows of one number of chips and one batch, those with a step time first, the fastest first."""

    n_chips: int
    batch_sequences: int
    sequence_tokens: int
    rows: Sequence[RowRecord]

    @property
    def timed(self) -> Sequence[RowRecord]:
        """Rows with a step time, the most tokens/s first."""
        return [row for row in self.rows if tokens_per_second(row)]

    @property
    def lead(self) -> float | None:
        """Tokens/s of the fastest over those of the next, less 1; None without a next."""
        if len(self.timed) < 2:
            return None
        first, second = (row.estimate("tokens_per_second_per_chip") for row in self.timed[:2])
        return first / second - 1

    @property
    def against_interval(self) -> str | None:
        """How the lead stands against the wider of the two intervals of tokens/s; None without a next."""
        if len(self.timed) < 2:
            return None
        first, second = (row.tokens_per_second_per_chip or {} for row in self.timed[:2])
        widths = [rate["high"] - rate["low"] for rate in (first, second)]
        if not all(widths):
            return "with an error that is not known"
        within = first["estimate"] - second["estimate"] < max(widths)
        return "within the interval" if within else "beyond the interval"

    @property
    def sentence(self) -> str:
        """For the page."""
        where = f"{_chips(self.n_chips)}, {self.batch_sequences:,} sequences of {self.sequence_tokens:,}: "
        timed = self.timed
        rest = [f"{_lines_of(row)} {_without(row)}" for row in self.rows if row not in timed]
        if not timed:
            return f"{where}{', '.join(rest)}."
        if self.lead is None:
            said = f"{_lines_of(timed[0])} is the only line" + (" with a step time" if rest else "")
        elif self.lead < SAME:
            said = f"{_lines_of(timed[0])} is as fast as {_lines_of(timed[1])} ({percent(self.lead)} more tokens/s)"
        else:
            said = f"{_lines_of(timed[0])} is the fastest, {percent(self.lead)} more tokens/s than "
            said += f"{_lines_of(timed[1])}, {self.against_interval}"
        return where + "; ".join([said, *rest]) + "."


def tokens_per_second(row: RowRecord) -> Interval | None:
    """Of the whole slice; None without a step time."""
    rate = row.tokens_per_second_per_chip
    if not rate or not row.n_chips:
        return None
    low, estimate, high = (rate[key] * row.n_chips for key in ("low", "estimate", "high"))
    return Interval(estimate=estimate, low=low, high=high)


def exposed(row: RowRecord) -> tuple[float, float] | None:
    """(seconds, share of the step) of the collectives beside which nothing runs; None without a step time."""
    if not row.categories:
        return None
    for group in row.categories:
        if group["name"] == Category.COLLECTIVES_EXPOSED:
            return group["seconds"], group["share"]
    return 0.0, 0.0  # a category that does not occur is not listed


def lines_of(rows: Sequence[RowRecord]) -> dict[str, list[RowRecord]]:
    """The points of each line by the number of chips, lines in the order of the rows."""
    lines: dict[str, list[RowRecord]] = {}
    for row in rows:
        for line in row.lines:
            lines.setdefault(line, []).append(row)
    return {line: sorted(points, key=lambda row: row.n_chips or math.inf) for line, points in lines.items()}


def crossings(rows: Sequence[RowRecord]) -> list[Crossing]:
    """One for each line."""
    found = []
    for line, points in lines_of(rows).items():
        known = [(row.n_chips, exposed(row), row) for row in points if row.n_chips]
        shares = {chips: share[1] for chips, share, _ in known if share}
        found.append(Crossing(line, shares, {chips: _without(row) for chips, share, row in known if not share}))
    return found


def contests(rows: Sequence[RowRecord]) -> list[Contest]:
    """One for each number of chips and batch, ascending; a row of two lines takes part once."""

    def of(row: RowRecord) -> tuple[int, int, int]:
        return row.n_chips or 0, row.batch_sequences or 0, row.sequence_tokens or 0

    def order(row: RowRecord) -> tuple[tuple[int, int, int], float, str]:
        rate = row.tokens_per_second_per_chip
        return of(row), -rate["estimate"] if rate else math.inf, row.name

    # A configuration that cannot be read has no batch to be compared at.
    known = sorted((row for row in rows if row.lines and all(of(row))), key=order)
    return [Contest(*key, tuple(group)) for key, group in itertools.groupby(known, key=of)]


def scaling_record(rows: Sequence[RowRecord]) -> dict[str, Any]:
    """The section in figures, for the record: seconds, fractions, tokens/s of the slice, bytes of one chip."""
    crossed = {crossing.line: crossing for crossing in crossings(rows)}
    return {
        "collectives_limit": COLLECTIVES_LIMIT,
        "lines": [
            {
                "line": line,
                "points": [_point(row) for row in points],
                "collectives_pass_at_chips": next(iter(crossed[line].above), None),
            }
            for line, points in lines_of(rows).items()
        ],
        "fastest": [
            {
                "n_chips": one.n_chips,
                "batch_sequences": one.batch_sequences,
                "sequence_tokens": one.sequence_tokens,
                "row": one.timed[0].name,
                "lines": list(one.timed[0].lines),
                "next_row": one.timed[1].name if len(one.timed) > 1 else None,
                "lead": one.lead,
                "against_interval": one.against_interval,
            }
            for one in contests(rows)
            if one.timed
        ],
    }


def _point(row: RowRecord) -> dict[str, Any]:
    time, share = exposed(row) or (None, None)
    return {
        "row": row.name,
        "status": row.status,
        "slice": row.slice,
        "n_chips": row.n_chips,
        "sequences_per_chip": _sequences_per_chip(row),
        "step_seconds": row.step_seconds,
        "tokens_per_second": tokens_per_second(row),
        "mfu_full": row.mfu_full,
        "exposed_collectives_seconds": time,
        "exposed_collectives_share": share,
        "hbm_required_bytes": row.hbm_required_bytes or None,
        "hbm_capacity_bytes": row.hbm_capacity_bytes or None,
    }


def scaling_section(name: str, rows: Sequence[RowRecord], tracking_dir: Path) -> str:
    """The section with its heading, and the figure; of rows of which some have lines.

    The heading is inside, since a page that is older than its sweep's lines gets the section at its end.
    """
    parts = ["## Scaling"]
    if any(row.status == FITS and row.mfu_full for row in rows if row.lines):
        figure = tracking_dir / FIGURES_DIR / f"{name}-scaling.svg"
        draw_svg(figure, _draw, rows, (9.0, 3.8), n_panels=2)
        parts += [
            f"![Tokens/s and MFU over chips]({FIGURES_DIR}/{figure.name})",
            "Dotted: ideal scaling from a line's first point. Bars: the intervals, drawn beside each other. Crosses on "
            "the axis of the right panel: rows that do not fit or failed, in the left one they are left out.",
        ]
    table = [(line, *_cells(row)) for line, points in lines_of(rows).items() for row in points]
    parts.append(markdown_table(HEADER, table, "llrrrrrrrr"))
    parts.append("### Where communication takes over")
    parts.append("\n".join(f"- {crossing.sentence}" for crossing in crossings(rows)))
    if compared := contests(rows):
        parts.append("### The fastest line")
        parts.append("\n".join(f"- {contest.sentence}" for contest in compared))
        parts.append("Within the interval: the difference is less than the wider of the two intervals of tokens/s.")
    return "\n\n".join(parts)


def _cells(row: RowRecord) -> tuple[str, ...]:
    """A row of the table from its slice on."""
    sequences, rate, collectives = _sequences_per_chip(row), tokens_per_second(row), exposed(row)
    return (
        row.slice or UNKNOWN,
        f"{row.n_chips:,}" if row.n_chips else UNKNOWN,
        f"{sequences:g}" if sequences else UNKNOWN,
        seconds(row.estimate("step_seconds")) if row.step_seconds else row.status,
        f"{rate['estimate']:,.0f}" if rate else UNKNOWN,
        interval_text(row.mfu_full, percent),
        f"{1e3 * collectives[0]:,.1f} ms" if collectives else UNKNOWN,
        percent(collectives[1]) if collectives else UNKNOWN,
        required_text(row),
    )


def _sequences_per_chip(row: RowRecord) -> float | None:
    return row.batch_sequences / row.n_chips if row.batch_sequences and row.n_chips else None


def _chips(count: int) -> str:
    return f"{count:,} chip" + ("s" if count != 1 else "")


def _listed(counts: Sequence[int]) -> str:
    """`8, 16 and 32 chips`."""
    *first, last = counts
    return f"{', '.join(f'{count:,}' for count in first)} and {_chips(last)}" if first else _chips(last)


def _lines_of(row: RowRecord) -> str:
    """A row by the lines that it is a point of."""
    return " = ".join(f"`{line}`" for line in row.lines)


def _without(row: RowRecord) -> str:
    return row.status if row.status != FITS else "has no step time"


def _draw(panels: Sequence[Axes], rows: Sequence[RowRecord]) -> None:
    left, right = panels
    lines = lines_of(rows)
    most = max(row.n_chips or 0 for row in rows if row.lines)
    for number, (line, all_points) in enumerate(lines.items()):
        points = [row for row in all_points if row.n_chips]
        look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "ms": 4, "lw": 1}
        chips = [float(row.n_chips or math.nan) for row in points]
        rates = [(tokens_per_second(row) or {}).get("estimate", math.nan) for row in points]
        left.plot(chips, rates, label=line, **look)  # a point without a figure is a gap
        first = next(((x, y) for x, y in zip(chips, rates, strict=True) if not math.isnan(y)), None)
        if first:
            x, y = first
            left.plot([x, most], [y, y * most / x], color=look["color"], lw=0.6, ls=":")
        beside = [x * ASIDE ** (number - (len(lines) - 1) / 2) for x in chips]
        mfu = [row.mfu_full or dict.fromkeys(("estimate", "low", "high"), math.nan) for row in points]
        middle = [100 * one["estimate"] for one in mfu]
        bars = [
            [100 * (one["estimate"] - one["low"]) for one in mfu],
            [100 * (one["high"] - one["estimate"]) for one in mfu],
        ]
        right.errorbar(beside, middle, bars, elinewidth=0.7, **look)
        crosses = [x for x, y in zip(beside, middle, strict=True) if math.isnan(y)]
        if crosses:  # not clipped, an empty line would stand at 0 chips, and the layout make room for it
            right.plot(crosses, [0] * len(crosses), "x", color=look["color"], clip_on=False, ms=6, zorder=5)
    ticks = sorted({row.n_chips for row in rows if row.lines and row.n_chips})
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
        axes.minorticks_off()
        axes.set_xlabel("chips")
    left.set_yscale("log")
    left.set_ylabel("tokens/s")
    left.grid(lw=0.3)
    right.grid(lw=0.3)
    left.legend(frameon=False, fontsize=7, loc="upper left")
    right.set(ylabel="MFU full, %", ylim=(0, None))
