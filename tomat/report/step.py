"""Facts, tables and charts of the breakdown of a step, measured or planned, for every place that shows it."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tomat.base.report.formats import count, number, percent, quantity, seconds, signed
from tomat.base.report.model import AtLeast, Axis, Cell, Chart, Column, Facts, Series, State, Table, Verdict, columns
from tomat.perf.profile.breakdown import Breakdown, Category, GroupRow, of_unknown_flops
from tomat.perf.profile.steady import WindowKind, what_else_ran
from tomat.perf.profile.two_breakdowns import Comparison
from tomat.perf.profile.two_breakdowns import Verdict as Judged

# One colour for each category, so that pages can be compared at a glance. Blue: attention; green: matmul and loss;
# orange: elementwise work; purple: parameters; red: communication; grey: time without work.
COLOURS: dict[str, str] = {
    Category.ATTENTION_FORWARD: "#2b6cb0",
    Category.ATTENTION_BACKWARD: "#1a4a80",
    Category.MATMUL: "#2f855a",
    Category.LOSS: "#68a063",
    Category.ELEMENTWISE: "#dd8a33",
    Category.NORM_ROTARY: "#e8b76a",
    Category.EMBEDDING: "#8a63b0",
    Category.OPTIMIZER: "#b39ac9",
    Category.COPIES: "#b8a068",
    Category.COLLECTIVES_EXPOSED: "#c53030",
    Category.COLLECTIVES_HIDDEN: "#e39a9a",
    Category.CUSTOM_KERNELS: "#3d8f93",
    Category.CONTROL: "#a7b0b8",
    Category.HOST: "#6b7680",
    Category.IDLE: "#d4d9dd",
    Category.UNATTRIBUTED: "#ece4e4",
}
SMALLEST_SHARE = 0.0005
"""Operations below this share of the step have no point in the roofline chart."""
GIB = 2**30
HBM_BYTES = Column("HBM bytes", lambda value: quantity(value, "B"))
_STATES = {Judged.PASS: State.GOOD, Judged.WARN: State.DOUBTFUL, Judged.FAIL: State.BAD}


def step_facts(breakdown: Breakdown) -> Facts:
    flops, moved = _total(op.flops for op in breakdown.ops), _total(op.hbm_bytes for op in breakdown.ops)
    least = "at least " if of_unknown_flops(breakdown.ops, breakdown.step_seconds) else ""
    return Facts(
        {
            "step": seconds(breakdown.step_seconds),
            "device": breakdown.roofs.device_kind or "not known",
            "devices": f"{breakdown.n_devices:,} on {breakdown.n_hosts:,} host(s)",
            "steps read": breakdown.n_steps if breakdown.source == "trace" else None,
            "operations": f"{len(breakdown.ops):,}",
            "compute": None if flops is None else f"{least}{quantity(flops, 'FLOP')} a step",
            "HBM traffic": None if moved is None else f"{quantity(moved, 'B')} a step",
        }
    )


def step_notes(breakdown: Breakdown) -> list[str]:
    return [*(f"not in the step: {text}" for text in what_else_ran(breakdown)), *breakdown.notes]


def groups_table(rows: Sequence[GroupRow], first: str) -> Table:
    def known(row: GroupRow, value: float | None) -> float | None:
        return AtLeast(value) if value is not None and row.flops_at_least else value

    heads = [Column(first), Column("occurrences", count), Column("cycles", number(0)), Column("time", seconds)]
    heads += [Column("share", percent), Column("hidden", seconds), Column("flops", quantity), HBM_BYTES]
    heads += [*columns("of peak flops", "of bandwidth", show=percent), Column("bound")]
    body = [
        (row.name, row.occurrences, row.cycles, row.seconds, row.share, row.hidden_seconds or None,
         known(row, row.flops), row.hbm_bytes, known(row, row.flops_fraction), row.bandwidth_fraction, str(row.bound))
        for row in rows
    ]  # fmt: skip
    time, share = sum(row.seconds for row in rows), sum(row.share for row in rows)
    total: list[Cell] = ["step", "", _total(row.cycles for row in rows), time, share, *[""] * 6]
    return Table("", heads, body, total)


def operations_table(breakdown: Breakdown, top: int) -> Table:
    ops = breakdown.top(top)
    heads = [*columns("operation", "category", "part", "direction"), Column("occurrences", count)]
    heads += [Column("time", seconds), *columns("share", "of peak flops", "of bandwidth", show=percent)]
    heads += [Column("bound"), HBM_BYTES, Column("flops", quantity), *columns("source", "scope")]
    rows = [
        (op.name, str(op.category), str(op.part), str(op.direction), op.occurrences, op.seconds, row.share,
         row.flops_fraction, row.bandwidth_fraction, str(row.bound), op.hbm_bytes, op.flops, op.source or None,
         op.op_name)
        for op, row in ((op, breakdown.group(op.name, [op])) for op in ops)
    ]  # fmt: skip
    share = percent(sum(op.seconds for op in ops) / breakdown.step_seconds if breakdown.step_seconds else None)
    most = f"The {len(ops)} of {len(breakdown.ops)} operations with the most time"
    said = most if len(ops) < len(breakdown.ops) else "All operations"
    return Table(f"{said}, {share} of the step", heads, rows)


def windows_table(breakdown: Breakdown) -> Table:
    heads = Column("windows"), Column("count", count), *columns("mean", "p10", "p50", "p90", show=seconds)
    rows = [
        (c.name, c.count, c.mean_seconds, c.p10_seconds, c.p50_seconds, c.p90_seconds) for c in breakdown.step_classes
    ]
    caption = "All windows (times devices), each from a step's beginning to that of the next; "
    return Table(f"{caption}the step is the mean of the steady ones", heads, rows)


def waits_table(breakdown: Breakdown) -> Table:
    heads = [*columns("after", "before"), Column("occurrences", count), *columns("time", "longest", show=seconds)]
    rows = [
        (gap.before, gap.after, gap.occurrences, gap.seconds, gap.longest_seconds, gap.host_activity or None)
        for gap in breakdown.gaps
    ]
    return Table("Waits of the device with the longest total, per step", [*heads, Column("the host was in")], rows)


def memory_table(breakdown: Breakdown) -> Table:
    capacity, sizes = breakdown.roofs.hbm_bytes, sorted(breakdown.memory_bytes.items())
    sizes.append(("sum", sum(breakdown.memory_bytes.values())))
    rows = [(name, size, size / capacity if capacity else None) for name, size in sizes]
    heads = Column("buffers"), Column("bytes", number(3, 1 / GIB, " GiB")), Column("of capacity", percent)
    return Table("Buffers of the main program on one device", heads, rows[:-1], rows[-1])


def comparison_table(result: Comparison) -> Table:
    """Two steps beside each other, one row for each category, the largest difference first."""
    heads = [Column("category"), *columns("A", "B", show=seconds), Column("cycles", lambda value: signed(value, 0))]
    heads += [Column("points", signed), Column("of A's step", lambda value: f"{signed(value)} %"), Column("verdict")]
    rows = [
        (row.category, row.a_seconds, row.b_seconds, row.delta_cycles, row.delta_points, row.growth_percent_of_step,
         judged(row.verdict))
        for row in result.rows
    ]  # fmt: skip
    return Table(f"{result.a} -> {result.b}", heads, rows)


def judged(verdict: Judged) -> Verdict:
    return Verdict(verdict.name.lower(), _STATES[verdict])


def step_charts(breakdown: Breakdown, stem: str = "") -> list[Chart]:
    """The charts that the breakdown has data for. The names of their files begin with `stem`."""
    charts = [shares_chart(breakdown), roofline_chart(breakdown), times_chart(breakdown)]
    return [replace(one, file=f"{stem}-{one.file}") for one in charts if one is not None]


def shares_chart(breakdown: Breakdown) -> Chart:
    rows = [row for row in breakdown.categories if row.share > 0]
    names = {row.name: f"{row.name} {percent(row.share)}" for row in rows}
    series = [Series(names[row.name], [100 * row.share], mark="bar", colour=COLOURS[row.name]) for row in rows]
    largest = sorted(rows, key=lambda row: -row.seconds)[:4]
    said = f"Largest: {', '.join(names[row.name] for row in largest)}."
    # The title names the axis: below a single bar, an axis label would overlap the legend.
    title = "Share of the step by category, %"
    return Chart(title, series, Axis(""), Axis(""), said, "shares.svg", (7.5, 1.9))


def roofline_chart(breakdown: Breakdown) -> Chart | None:
    """Operations by intensity and flop rate under the roofs; None where the chip's peaks or the work is not known."""
    peak, bandwidth = breakdown.roofs.peak_flops_per_second, breakdown.roofs.peak_hbm_bytes_per_second
    known = [op for op in breakdown.ops if op.flops and op.hbm_bytes is not None and op.seconds > 0]
    timed = [op for op in known if op.seconds >= SMALLEST_SHARE * breakdown.step_seconds]
    if not peak or not bandwidth or not timed:
        return None
    ridge = peak / bandwidth
    intensities = [op.flops / op.hbm_bytes for op in timed if op.flops and op.hbm_bytes]
    # An operation that stays in VMEM moves no HBM bytes. Its point is at the right edge.
    edge, low = 10 * max([10 * ridge, *intensities]), min([ridge / 100, *intensities])
    series = [Series("roofs", [low, ridge, edge], [low * bandwidth, peak, peak], colour="#8a929b", named=False)]
    for operands, other in sorted({str(op.operands): breakdown.roofs.peak_of(op.operands) for op in timed}.items()):
        if other and other != peak:
            x, y = [ridge, other / bandwidth, edge], [peak, other, other]
            series.append(Series(f"{operands} products", x, y, colour="#8a929b", dotted=True))
    for kind in sorted({str(op.category) for op in timed}):
        x, y, areas, texts = [], [], [], []
        for op in (op for op in timed if op.category == kind):
            x.append((op.flops or 0) / op.hbm_bytes if op.hbm_bytes else edge)
            y.append((op.flops or 0) / op.seconds)
            areas.append(op.seconds / breakdown.step_seconds)
            rate = quantity(y[-1], "FLOP/s")
            texts.append(f"{op.name}: {seconds(op.seconds)}, {percent(areas[-1])} of the step, {rate}")
        series.append(Series(kind, x, y, "points", COLOURS[kind], areas, texts))
    groups = [(op, breakdown.group(op.name, [op])) for op in known]
    near = [op for op, of in groups if max(of.flops_fraction or 0.0, of.bandwidth_fraction or 0.0) >= 0.5]
    share = percent(sum(op.seconds for op in near) / breakdown.step_seconds)
    said = (
        f"{len(known):,} operations of known work; those that reach half of a roof take {share} of the step. The roofs "
        f"meet at {ridge:,.0f} FLOP a byte. Area is the share of the step, and operations below "
        f"{100 * SMALLEST_SHARE:g} % of it are not drawn."
    )
    x, y = Axis("flops per HBM byte (right edge: none moved)", log=True), Axis("flops per second", log=True)
    return Chart("Operations against the chip's roofs", series, x, y, said, "roofline.svg")


def times_chart(breakdown: Breakdown) -> Chart | None:
    """A histogram of the step times; None for fewer than two steps."""
    times = breakdown.step_times_seconds
    if len(times) < 2:
        return None
    series = [Series("steps", [1e3 * time for time in times], mark="histogram", colour="#2b6cb0")]
    said = f"{len(times):,} steps from {seconds(min(times))} to {seconds(max(times))}."
    return Chart("Step times", series, Axis("step time, ms"), Axis("steps x devices"), said, "steps.svg", (6.0, 2.4))


def windows_chart(breakdown: Breakdown) -> Chart | None:
    """The time of each window over its start; None for a breakdown with fewer than two windows."""
    if len(breakdown.windows) < 2:
        return None
    series = []
    for kind in WindowKind:
        if rows := [one for one in breakdown.windows if one.kind == kind]:
            x, y = [1e3 * one.start_seconds for one in rows], [1e3 * one.seconds / one.steps for one in rows]
            texts = [f"{one.device}: {seconds(one.seconds / one.steps)}, {kind}" for one in rows]
            series.append(Series(f"{len(rows):,} {kind}", x, y, "points", texts=texts))
    said = f"{', '.join(one.name for one in series)}."
    title = "All windows, from the beginning of a step to that of the next"
    return Chart(title, series, Axis("begins at, ms"), Axis("step, ms", from_zero=True), said, size=(6.0, 3.2))


def _total(values: Iterable[float | None]) -> Any:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
