"""Breakdowns and comparisons on the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tomat.base.report.formats import UNKNOWN, count, percent, quantity, seconds, signed
from tomat.base.reporting import console, counted
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.categories import Direction
from tomat.perf.profile.steady import what_else_ran
from tomat.perf.profile.two_breakdowns import Comparison, Verdict

VERDICT_STYLE = {Verdict.PASS: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def print_breakdown(breakdown: Breakdown, top: int) -> None:
    """Categories, operations, waits, notes."""
    device = breakdown.roofs.device_kind or "unknown device"
    said = (
        f" ({breakdown.source}): step {seconds(breakdown.step_seconds)}, {device}, "
        f"{breakdown.n_devices} device(s), {breakdown.n_hosts} host(s), {breakdown.n_steps} step(s)"
    )
    console.print(Text.assemble((breakdown.title, "bold"), said))
    if len(breakdown.step_classes) > 1 or breakdown.others:
        for row in breakdown.step_classes:
            console.print(f"  {counted(row.count, 'window')} {row.name}: {seconds(row.mean_seconds)} each")
        for text in what_else_ran(breakdown):
            console.print(f"  not in the step: {text}")
    table = _table(
        "per step and device; flops, HBM: share of peak",
        ("category", "cycles", "time", "share", "flops", "HBM", "bound"),
        (0, 6),
        ("bound",),
    )
    for row in breakdown.categories:
        hidden = f" ({seconds(row.hidden_seconds)} beside compute)" if row.hidden_seconds and not row.seconds else ""
        table.add_row(
            row.name + hidden,
            quantity(row.cycles),
            seconds(row.seconds),
            percent(row.share),
            percent(row.flops_fraction),
            percent(row.bandwidth_fraction),
            str(row.bound),
        )
    console.print(table)
    if top > 0:
        console.print(_operations(breakdown, top))
    for gap in breakdown.gaps[:3]:
        where = f", the host was in {gap.host_activity}" if gap.host_activity else ""
        console.print(f"waits {seconds(gap.seconds)} a step after {gap.before} until {gap.after}{where}")
    for note in breakdown.notes:
        console.print(f"note: {note}")


def _table(title: str, columns: tuple[str, ...], left: tuple[int, ...], folding: tuple[str, ...]) -> Table:
    """A table that fits 80 columns; the page and the JSON have the rest."""
    table = Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        side = "left" if index in left else "right"
        table.add_column(name, justify=side, no_wrap=name not in folding, overflow="fold")
    return table


def _operations(breakdown: Breakdown, top: int) -> Table:
    title = f"operations with the most time ({min(top, len(breakdown.ops))} of {len(breakdown.ops)})"
    table = _table(
        title,
        ("operation", "category", "times", "time", "share", "source"),
        (0, 1, 5),
        ("operation", "category", "source"),
    )
    for op in breakdown.top(top):
        share = percent(op.seconds / breakdown.step_seconds if breakdown.step_seconds else None)
        kind = f"{op.category}, {op.direction}" if op.direction == Direction.RECOMPUTE else str(op.category)
        table.add_row(op.name, kind, count(op.occurrences), seconds(op.seconds), share, op.source or UNKNOWN)
    return table


def print_comparison(result: Comparison) -> None:
    """Per-category deltas, largest first, and the verdict."""
    names = ("category", "A", "B", "cycles", "points", "of A's step", "verdict")
    table = _table(f"{result.a} -> {result.b}", names, (0, 6), ("cycles",))
    for row in result.rows:
        table.add_row(
            row.category,
            seconds(row.a_seconds),
            seconds(row.b_seconds),
            UNKNOWN if row.delta_cycles is None else signed(row.delta_cycles, 0),
            signed(row.delta_points),
            f"{signed(row.growth_percent_of_step)} %",
            Text(row.verdict.name.lower(), VERDICT_STYLE[row.verdict]),
        )
    console.print(table)
    for note in result.notes:
        console.print(f"note: {note}")
    step = f"step {seconds(result.a_step_seconds)} -> {seconds(result.b_step_seconds)}"
    verdict = (result.verdict.name.lower(), VERDICT_STYLE[result.verdict])
    console.print(Text.assemble(f"{step} ({signed(result.step_growth_percent)} %): ", verdict))
