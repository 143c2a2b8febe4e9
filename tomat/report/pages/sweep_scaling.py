"""The section of a sweep's page on how its lines scale over slices (`perf/tuning/scaling.py`): figure and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base.layout import FIGURES_DIR
from tomat.base.report.formats import UNKNOWN, percent, seconds
from tomat.base.report.markdown import markdown_table
from tomat.base.report.svg import draw_svg
from tomat.perf.tuning.scaling import contests, crossings, exposed, lines_of, sequences_per_chip, tokens_per_second
from tomat.perf.tuning.sweep_rows import FITS, RowRecord, interval_text, required_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADER = ("line", "slice", "chips", "sequences a chip", "step", "tokens/s", "MFU full", "exposed collectives",
          "of the step", "HBM")  # fmt: skip
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Told apart with any colour vision (Okabe and Ito, 2008)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "h", "*")
ASIDE = 1.035
"""Factor in chips between the bars of two lines, which would cover each other."""


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
    sequences, rate, collectives = sequences_per_chip(row), tokens_per_second(row), exposed(row)
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
