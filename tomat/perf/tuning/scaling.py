"""How the lines of a sweep scale over slices, in figures, and where communication takes over.

A line is one recipe on several slices. A row of the sweep is a point of every line that it names. Tokens/s are those of
the whole slice. Exposed collectives are the time of a step in which a chip does nothing but wait for others.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.report.formats import percent
from tomat.base.reporting import counted
from tomat.perf.profile.breakdown import Category
from tomat.perf.tuning.sweep_rows import FITS, SAME, Interval, RowRecord

COLLECTIVES_LIMIT = 0.10
"""Share of a step from which on communication is called a cost of the slice. One chip in ten is then wasted; below it,
no change of communication can gain more than a tenth."""


@dataclass(frozen=True)
class Crossing:
    """Where the exposed collectives of a line pass `COLLECTIVES_LIMIT`, as fractions of the step."""

    line: str
    shares: Mapping[int, float]
    """Fractions of the points with a step time, by the number of chips, ascending."""
    without: Mapping[int, str]
    """Reasons of the points without a step time, by the number of chips."""

    @property
    def above(self) -> list[int]:
        return [chips for chips, share in self.shares.items() if share > COLLECTIVES_LIMIT]

    @property
    def sentence(self) -> str:
        if not self.shares:
            said = "no step time, so nothing is known of its collectives"
        elif above := self.above:
            said = f"exposed collectives pass {percent(COLLECTIVES_LIMIT, 0)} of the step first at "
            said += f"{counted(above[0], 'chip')} ({percent(self.shares[above[0]])})"
            below = [chips for chips in self.shares if chips > above[0] and chips not in above]
            said += f", and are below it again at {_listed(below)}" if below else ""
        else:
            most = max(self.shares, key=lambda chips: self.shares[chips])
            said = f"exposed collectives pass {percent(COLLECTIVES_LIMIT, 0)} of the step at none of "
            said += f"{_listed([*self.shares])}; the most is {percent(self.shares[most])}, at {most:,}"
        missing = ", ".join(f"{counted(chips, 'chip')} ({status})" for chips, status in self.without.items())
        return f"`{self.line}`: {said}." + (f" Without a step time: {missing}." if missing else "")


@dataclass(frozen=True)
class Contest:
    """The rows with one number of chips and one batch. The fastest is first; those without a step time are last."""

    n_chips: int
    batch_sequences: int
    sequence_tokens: int
    rows: Sequence[RowRecord]

    @property
    def timed(self) -> Sequence[RowRecord]:
        return [row for row in self.rows if tokens_per_second(row)]

    @property
    def lead(self) -> float | None:
        """Tokens/s of the fastest row divided by those of the second, minus 1; None without a second."""
        if len(self.timed) < 2:
            return None
        first, second = (row.estimate("tokens_per_second_per_chip") for row in self.timed[:2])
        return first / second - 1

    @property
    def against_interval(self) -> str | None:
        """The lead compared with the wider of the two intervals of tokens/s, in words; None without a second row."""
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
        where = f"{counted(self.n_chips, 'chip')}, {self.batch_sequences:,} sequences of {self.sequence_tokens:,}: "
        timed = self.timed
        rest = [f"{_lines_of(row)} {_without(row)}" for row in self.rows if row not in timed]
        if not timed:
            return f"{where}{', '.join(rest)}."
        lead = self.lead
        if lead is None:
            said = f"{_lines_of(timed[0])} is the only line" + (" with a step time" if rest else "")
        elif lead < SAME:
            said = f"{_lines_of(timed[0])} is as fast as {_lines_of(timed[1])} ({percent(lead)} more tokens/s)"
        else:
            said = f"{_lines_of(timed[0])} is the fastest, {percent(lead)} more tokens/s than "
            said += f"{_lines_of(timed[1])}, {self.against_interval}"
        return where + "; ".join([said, *rest]) + "."


def tokens_per_second(row: RowRecord) -> Interval | None:
    """Tokens/s of the whole slice; None without a step time."""
    rate = row.tokens_per_second_per_chip
    if not rate or not row.n_chips:
        return None
    low, estimate, high = (rate[key] * row.n_chips for key in ("low", "estimate", "high"))
    return Interval(estimate=estimate, low=low, high=high)


def exposed(row: RowRecord) -> tuple[float, float] | None:
    """(seconds, share of the step) of the exposed collectives; None without a step time."""
    found = {group["name"]: (group["seconds"], group["share"]) for group in row.categories}
    # A category that does not occur is not listed.
    return found.get(Category.COLLECTIVES_EXPOSED, (0.0, 0.0)) if found else None


def lines_of(rows: Sequence[RowRecord]) -> dict[str, list[RowRecord]]:
    """The points of each line, sorted by the number of chips; lines are in the order of the rows."""
    lines: dict[str, list[RowRecord]] = {}
    for row in rows:
        for line in row.lines:
            lines.setdefault(line, []).append(row)
    return {line: sorted(points, key=lambda row: row.n_chips or math.inf) for line, points in lines.items()}


def crossings(rows: Sequence[RowRecord]) -> list[Crossing]:
    found = []
    for line, points in lines_of(rows).items():
        known = [(row.n_chips, exposed(row), row) for row in points if row.n_chips]
        shares = {chips: share[1] for chips, share, _ in known if share}
        found.append(Crossing(line, shares, {chips: _without(row) for chips, share, row in known if not share}))
    return found


def contests(rows: Sequence[RowRecord]) -> list[Contest]:
    """One contest for each number of chips and batch, ascending. A row of two lines takes part once."""

    def of(row: RowRecord) -> tuple[int, int, int]:
        return row.n_chips or 0, row.batch_sequences or 0, row.sequence_tokens or 0

    def order(row: RowRecord) -> tuple[tuple[int, int, int], float, str]:
        rate = row.tokens_per_second_per_chip
        return of(row), -rate["estimate"] if rate else math.inf, row.name

    # Rows whose configuration could not be read have no batch, and are left out.
    known = sorted((row for row in rows if row.lines and all(of(row))), key=order)
    return [Contest(*key, tuple(group)) for key, group in itertools.groupby(known, key=of)]


def scaling_record(rows: Sequence[RowRecord]) -> dict[str, Any]:
    """The figures of the section for the record: seconds, fractions, tokens/s of the slice, bytes of one chip."""
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
        "sequences_per_chip": sequences_per_chip(row),
        "step_seconds": row.step_seconds,
        "tokens_per_second": tokens_per_second(row),
        "mfu_full": row.mfu_full,
        "exposed_collectives_seconds": time,
        "exposed_collectives_share": share,
        "hbm_required_bytes": row.hbm_required_bytes or None,
        "hbm_capacity_bytes": row.hbm_capacity_bytes or None,
    }


def sequences_per_chip(row: RowRecord) -> float | None:
    """Sequences of the batch per chip; None if the row has no batch or no slice."""
    return row.batch_sequences / row.n_chips if row.batch_sequences and row.n_chips else None


def _listed(counts: Sequence[int]) -> str:
    *first, last = counts
    before = f"{', '.join(f'{count:,}' for count in first)} and " if first else ""
    return before + counted(last, "chip")


def _lines_of(row: RowRecord) -> str:
    return " = ".join(f"`{line}`" for line in row.lines)


def _without(row: RowRecord) -> str:
    return row.status if row.status != FITS else "has no step time"
