"""Breakdowns and comparisons on the terminal."""

from __future__ import annotations

from rich.text import Text

from tomat.base.report.formats import seconds, signed
from tomat.base.report.model import Note
from tomat.base.report.terminal import show, styled
from tomat.base.reporting import console
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.two_breakdowns import Comparison
from tomat.report.step import comparison_table, groups_table, judged, operations_table, step_facts, step_notes

MOST_WAITS = 3


def print_breakdown(breakdown: Breakdown, top: int) -> None:
    """Categories, operations, waits, notes."""
    facts = ", ".join(f"{name} {value}" for name, value in step_facts(breakdown).known())
    console.print(Text.assemble((breakdown.title, "bold"), f" ({breakdown.source}): {facts}"))
    for row in breakdown.step_classes:
        console.print(f"  windows {row.name}: {row.count:,}, {seconds(row.mean_seconds)} each", highlight=False)
    columns = ("category", "cycles", "time", "share", "hidden", "of peak flops", "of bandwidth", "bound")
    show("per step and device", groups_table(breakdown.categories, "category").chosen(*columns))
    if top > 0:
        operations = operations_table(breakdown, top)
        columns = ("operation", "category", "direction", "occurrences", "time", "share", "source")
        show(f"{operations.caption}:", operations.chosen(*columns))
    for gap in breakdown.gaps[:MOST_WAITS]:
        where = f", the host was in {gap.host_activity}" if gap.host_activity else ""
        console.print(f"waits {seconds(gap.seconds)} a step after {gap.before} until {gap.after}{where}")
    show(*map(Note, step_notes(breakdown)))


def print_comparison(result: Comparison) -> None:
    """Per-category deltas, largest first, and the verdict."""
    show(comparison_table(result), *map(Note, result.notes))
    step = f"step {seconds(result.a_step_seconds)} -> {seconds(result.b_step_seconds)}"
    growth = f" ({signed(result.step_growth_percent)} %): "
    console.print(Text.assemble(step, growth, styled(judged(result.verdict))))
