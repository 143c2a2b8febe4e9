"""Compares two breakdowns: the change of each category, and whether it is a regression."""

from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from tomat.perf.profile.breakdown import Breakdown, Category
from tomat.perf.profile.steady import what_else_ran


class Verdict(IntEnum):
    """The verdict on a row. A comparison has the worst of its rows. The command's exit code is 1 for FAIL, else 0."""

    PASS = 0
    WARN = 1
    FAIL = 2


@dataclass(frozen=True)
class CategoryDelta:
    """One category in A and B. Differences are B - A."""

    category: str
    a_seconds: float
    b_seconds: float
    delta_seconds: float
    delta_cycles: float | None
    a_share: float
    b_share: float
    delta_points: float
    """Change of the share, in percentage points."""
    growth_percent_of_step: float
    """Change of the time, divided by A's step time."""
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    a: str
    b: str
    a_step_seconds: float
    b_step_seconds: float
    step_growth_percent: float
    rows: tuple[CategoryDelta, ...]
    step_verdict: Verdict
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        return max([self.step_verdict, *(row.verdict for row in self.rows)])

    def to_dict(self) -> dict[str, Any]:
        data = asdict(self)
        data["rows"] = [{**row, "verdict": Verdict(row["verdict"]).name.lower()} for row in data["rows"]]
        data["step_verdict"] = self.step_verdict.name.lower()
        data["verdict"] = self.verdict.name.lower()
        return data


def compare_breakdowns(a: Breakdown, b: Breakdown, warn_percent: float = 2.0, fail_percent: float = 5.0) -> Comparison:
    """Compare category by category, largest change first. A category that is in only one counts as 0 in the other.

    A verdict is by the growth of a category, or of the step itself, as a share of A's step. Shrinking always passes.
    """

    def growth(change: float) -> tuple[float, Verdict]:
        percent = 100.0 * change / a.step_seconds if a.step_seconds else 0.0
        worse = Verdict.WARN if percent >= warn_percent else Verdict.PASS
        return percent, Verdict.FAIL if percent >= fail_percent else worse

    mine = {row.name: row for row in a.categories}
    theirs = {row.name: row for row in b.categories}
    nothing = a.group("", ())
    clock = b.roofs.clock_hz if b.roofs.clock_hz == a.roofs.clock_hz else None
    rows = []
    for category in Category:
        if category not in mine and category not in theirs:
            continue
        left, right = mine.get(category, nothing), theirs.get(category, nothing)
        change = right.seconds - left.seconds
        percent, verdict = growth(change)
        rows.append(
            CategoryDelta(
                category=str(category),
                a_seconds=left.seconds,
                b_seconds=right.seconds,
                delta_seconds=change,
                delta_cycles=change * clock if clock else None,
                a_share=left.share,
                b_share=right.share,
                delta_points=100.0 * (right.share - left.share),
                growth_percent_of_step=percent,
                verdict=verdict,
            )
        )
    rows.sort(key=lambda r: (-abs(r.delta_seconds), r.category))
    notes = []
    if a.roofs.device_kind != b.roofs.device_kind:
        notes.append(f"different devices: {a.roofs.device_kind or 'unknown'} and {b.roofs.device_kind or 'unknown'}")
    if a.n_devices != b.n_devices:
        notes.append(f"different numbers of devices: {a.n_devices} and {b.n_devices}")
    if a.source != b.source:
        notes.append(f"{a.source} against {b.source}: one is measured, the other predicted")
    for name, one in (("A", a), ("B", b)):
        notes += [f"not in the step of {name}: {text}" for text in what_else_ran(one)]
    step_growth, step_verdict = growth(b.step_seconds - a.step_seconds)
    return Comparison(
        a=a.title,
        b=b.title,
        a_step_seconds=a.step_seconds,
        b_step_seconds=b.step_seconds,
        step_growth_percent=step_growth,
        rows=tuple(rows),
        step_verdict=step_verdict,
        notes=tuple(notes),
    )
