"""The answers of a sweep: the result for each question, and what limits a row's MFU."""

from collections.abc import Sequence

from tomat.base.report.formats import UNKNOWN, percent, seconds
from tomat.base.report.model import Column, Heading, Part, Table
from tomat.perf.tuning.sweep_record import ranked
from tomat.perf.tuning.sweep_rows import (
    FAILED,
    FITS,
    OOM,
    SAME,
    RowRecord,
    base_of,
    gib,
    required_text,
    speedup,
    verdict,
)

CHANGES_SHOWN = 3
NEGLIGIBLE_SHARE = 0.001
"""Categories below this share of the step are left out of an explanation."""


def answers_parts(rows: Sequence[RowRecord]) -> list[Part]:
    parts: list[Part] = []
    for question in dict.fromkeys(row.question for row in rows if row.question):
        parts.append(Heading(question))
        parts += [_answer(row, base_of(row, rows)) for row in rows if row.question == question]
    for row in rows:
        if row.explain:
            parts += [Heading(row.explain), *explanation(row, rows)]
    return parts or ["No row asks a question."]


def _answer(row: RowRecord, base: RowRecord | None) -> str:
    """The verdict on a row, with facts that the ranking lacks: its largest buffer, or what changed against its base."""
    if row.status == FAILED:
        return f"`{row.name}` {verdict(row, base)}"
    is_base = row.status == FITS and row.base is None
    judged = "fits, and is what other rows are compared with" if is_base else verdict(row, base)
    said = f"`{row.name}` ({required_text(row)}): {judged}."
    if row.status == OOM and row.largest_buffers:
        largest = row.largest_buffers[0]
        source = f", {largest.source}" if largest.source else ""
        said += f" The largest buffer is {largest.shape} ({gib(largest.hbm_bytes)}{source})."
    if base is None or speedup(row, base) is None:
        return said
    # The row's times are scaled to the tokens per chip of the base's step.
    mine = {group["name"]: group["seconds"] * base.tokens_per_chip / row.tokens_per_chip for group in row.categories}
    theirs = {group["name"]: group["seconds"] for group in base.categories}
    changes = [(name, mine.get(name, 0.0) - theirs.get(name, 0.0)) for name in {*mine, *theirs}]
    changes.sort(key=lambda change: (-abs(change[1]), change[0]))
    least = SAME * base.estimate("step_seconds")
    told = ((name, "+" if change > 0 else "-", abs(change)) for name, change in changes[:CHANGES_SHOWN])
    listed = [f"{name} {sign}{seconds(size)}" for name, sign, size in told if size >= least]
    return f"{said} What changed most, at `{base.name}`'s tokens a step: {', '.join(listed)}." if listed else said


def explanation(row: RowRecord, rows: Sequence[RowRecord]) -> list[Part]:
    """What limits the utilisation of a row: the part of the peak that each category reaches and what it leaves."""
    if row.status != FITS or not row.categories or not row.hfu:
        return [_answer(row, base_of(row, rows))]
    hfu = row.hfu["estimate"]
    groups = [g for g in row.categories if g["share"] >= NEGLIGIBLE_SHARE]
    body = []
    for group in sorted(groups, key=lambda g: (-g["share"], g["name"])):
        fraction, share = group["flops_fraction"], group["share"]
        reached = None if fraction is None else share * fraction
        left = None if reached is None else share - reached
        body.append((group["name"], group["seconds"], share, fraction, reached, left))
    shares = ("share of the step", "of peak flops in it", "adds to utilisation", "leaves unused")
    columns = [Column("category"), Column("time", seconds), *(Column(heading, percent) for heading in shares)]
    parts: list[Part] = [
        f"`{row.name}` on {row.slice}: a step of {seconds(row.estimate('step_seconds'))} has MFU full "
        f"{_mfu(row)} and HFU {percent(hfu)}. A category adds its share of the step times the part of the peak that it "
        "reaches:",
        Table("", columns, body),
    ]
    unstated = [group["name"] for group in groups if group["flops_fraction"] is None]
    if unstated:
        stated = sum(g["share"] * g["flops_fraction"] for g in groups if g["flops_fraction"] is not None)
        parts.append(
            f"The program states no flops for {' and '.join(unstated)}; together they add what is missing to the HFU, "
            f"{percent(max(hfu - stated, 0.0))}."
        )
    windowed = row.windowed_einsums
    if not windowed:
        return [*parts, "No matmul is cut into a windowed einsum."]
    said = (
        f"{percent(windowed.share)} of the step ({seconds(windowed.seconds)}) runs in {windowed.n_loops} "
        f"windowed einsums: {windowed.steps:,.0f} steps whose matmuls sum over as little as "
        f"{windowed.narrowest_contraction} elements."
    )
    without = [one for one in rows if one.base == row.name and one.status == FITS and not one.windowed_einsums]
    other = next(iter(ranked(without)), None)
    if other is not None and (factor := speedup(other, row)) is not None:
        said += f" `{other.name}` has none, and {factor:.2f} times the tokens/s of a chip at MFU full {_mfu(other)}."
    return [*parts, said]


def _mfu(row: RowRecord) -> str:
    return percent(row.mfu_full["estimate"]) if row.mfu_full else UNKNOWN
