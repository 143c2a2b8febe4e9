"""Breakdowns, comparisons and plans on the terminal."""

from collections.abc import Mapping
from typing import Any

from rich.text import Text

from tomat.base.report.formats import seconds, signed
from tomat.base.report.model import Note
from tomat.base.report.terminal import show, styled
from tomat.base.reporting import console, readable_bytes
from tomat.perf.cost.chip_model import Support
from tomat.perf.cost.memory import read_memory
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.two_breakdowns import Comparison
from tomat.report.plan import buffers_table, decoders_table, memory_parts, plan_parts, support_table
from tomat.report.step import comparison_table, groups_table, judged, operations_table, step_facts, step_notes

MOST_WAITS = 3


def print_breakdown(breakdown: Breakdown, top: int) -> None:
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
    show(comparison_table(result), *map(Note, result.notes))
    step = f"step {seconds(result.a_step_seconds)} -> {seconds(result.b_step_seconds)}"
    growth = f" ({signed(result.step_growth_percent)} %): "
    console.print(Text.assemble(step, growth, styled(judged(result.verdict))))


def print_plan(report: Mapping[str, Any], top: int) -> None:
    where = f" on {report['slice']}: {report['n_chips']} chips, {report['n_hosts']} host(s), {_made(report)}"
    console.print(Text.assemble((report["run_name"], "bold"), where))
    _print_memory(report["memory"], report["run_name"], top)
    if report["breakdown"] is not None:
        print_breakdown(Breakdown.from_dict(report["breakdown"], "the plan"), top)
        show(*plan_parts(report))


def _made(plan: Mapping[str, Any]) -> str:
    how = "from the cache" if plan["cached"] else f"compiled in {plan['compile_seconds']:.0f} s"
    return f"{plan['compiler']}, {how}"


def _print_memory(record: Any, run_name: str, top: int) -> None:
    memory = read_memory(record, f"of {run_name}")
    show(memory_parts(memory)[0])
    if memory.largest and top > 0:
        table = buffers_table(memory, top)
        show(f"{table.caption}:", table.chosen("buffer", "MiB", "shape", "source"))


def print_decoders(report: Mapping[str, Any], top: int) -> None:
    """Print what `compile_decoders` found: the memory and the times of each decoder, with its `top` largest operations
    and buffers, then the decoders beside each other."""
    plans = list(report["decoders"].values())
    for plan in plans:
        console.print(Text.assemble((f"{plan['decoder']} decoder", "bold"), f", {_made(plan)}"))
        if plan["kv_cache_bytes"] is not None:
            kept = readable_bytes(plan["kv_cache_bytes"])
            console.print(f"keys and values kept: {kept}, kv_cache_dtype {plan['kv_cache_dtype']}")
        _print_memory(plan["memory"], report["run_name"], 0 if plan["fits"] else top)
        if plan["fits"]:
            print_breakdown(Breakdown.from_dict(plan["breakdown"], "the plan"), top)
            show(support_table([Support(**part) for part in plan["rests_on"]]))
    grid, patch = (" x ".join(map(str, report[key])) for key in ("grid", "patch_shape_voxels"))
    cell = f"a cell of {grid} voxels with {report['atoms']} atoms, {report['patches']:,} patches of {patch}"
    console.print(Text.assemble((report["run_name"], "bold"), f" on {report['slice']}: {cell}"))
    show(*map(Note, report["notes"]), decoders_table(plans))
    if report["times_faster_in_parallel"] is not None:
        console.print(f"parallel is {report['times_faster_in_parallel']:.0f} times faster")
