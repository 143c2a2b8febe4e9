"""The page of a plan or a profile: where the time of a step goes, by module and kind of operation, and its memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tomat.base.records import typed
from tomat.base.report.model import Facts, Note, Part, Report, Section
from tomat.perf.cost.memory import MemoryReport, read_memory
from tomat.perf.profile.breakdown import Breakdown, OpRow
from tomat.report.html.document import Figure, label
from tomat.report.plan import buffers_table, memory_parts, plan_parts, trials_part
from tomat.report.step import (
    COLOURS,
    groups_table,
    memory_table,
    operations_table,
    roofline_chart,
    shares_chart,
    step_facts,
    step_notes,
    times_chart,
    waits_table,
    windows_chart,
    windows_table,
)

PLUMBING = ("while", "body", "cond", "rematted_computation", "checkpoint", "closed_call", "eval_jaxpr", "shard_map")
"""Scopes that JAX makes and that say nothing of the model."""
NO_MODULE = "outside the model's modules"
PARENT = "#c9d0d7"
"""Colour of boxes that are no operation."""
MOST_BUFFERS = 24
MIB = 2**20
LEAST_DRAWN = 5e-5
"""Share of the step below which an operation is no box of its own in the charts; the table has them all."""
_TIGHT = {"margin": {"l": 4, "r": 4, "t": 8, "b": 4}}


def breakdown_page(breakdown: Breakdown, kind: str, *, report: Mapping[str, Any] | None = None) -> Report:
    """The page of a `profile`, or of a `plan`, whose `Plan.to_dict()` has memory, models and utilisation besides."""
    measured = "measured" if breakdown.source == "trace" else "predicted"
    notes = [Note(f"{note[:1].upper()}{note[1:]}.") for note in step_notes(breakdown)]
    sections = [
        Section("", (f"One step of one device, {measured}: {breakdown.title}.", *notes)),
        Section("The step", (step_facts(breakdown), *(plan_parts(report) if report else ()))),
        Section("By kind of operation", (shares_chart(breakdown), groups_table(breakdown.categories, "kind"))),
        Section("By module", (_flame_chart(breakdown), _treemap(breakdown), groups_table(breakdown.parts, "part"))),
    ]
    if (against := roofline_chart(breakdown)) is not None:
        sections.append(Section("Against the roofs of the chip", (against,)))
    sections.append(Section("Operations", (operations_table(breakdown, len(breakdown.ops)),)))
    if report:
        sections.append(Section("Memory", _memory_parts(report["memory"])))
    elif breakdown.memory_bytes:
        sections.append(Section("Memory", (memory_table(breakdown),)))
    # A breakdown of before kept no windows.
    chart = windows_chart(breakdown) or times_chart(breakdown)
    steps: list[Part] = [] if chart is None else [chart]
    steps += [windows_table(breakdown)] if breakdown.step_classes else []
    steps += [waits_table(breakdown)] if breakdown.gaps else []
    if steps:
        sections.append(Section("Steps and waits", steps))
    title = str(report["run_name"]) if report else breakdown.title
    figures = {"step_seconds": breakdown.step_seconds, "operations": len(breakdown.ops), "title": title}
    return Report(title, sections, kind, figures)


def unfit_page(report: Mapping[str, Any]) -> Report:
    """The page of a plan that does not fit: what fills the memory, and what was tried instead."""
    facts = Facts({"slice": report.get("slice"), "compiler": report.get("compiler")})
    trials = typed(report.get("nearest_fits") or [], list[dict[str, Any]], "the plan's nearest_fits", "Plan again.")
    title = str(report.get("run_name", "a plan"))
    tried = trials_part(trials) if "nearest_fits" in report else "Nothing else was tried."
    sections = (
        Section("", ("This step does not fit into the memory of a device, so that it has no times.",)),
        Section("The step", (facts,)),
        Section("Memory", _memory_parts(report.get("memory") or {})),
        Section("What was tried instead", (tried,)),
    )
    return Report(title, sections, "plan", {"title": title, "fits": False, "trials": len(trials)})


def _memory_parts(said: Any) -> list[Any]:
    memory = read_memory(said)
    buffers = [_buffers_chart(memory), buffers_table(memory)] if memory.largest else []
    return [*memory_parts(memory), *buffers]


def module_path(op: OpRow) -> tuple[str, ...]:
    """The modules that an operation is in, outermost first: JAX's scopes without its own wrappers and the operation.

    `jit(step)/jvp(Model)/layers/attention/dot_general` is (`Model`, `layers`, `attention`); of the backward pass too,
    which the direction tells apart.
    """
    words = []
    for scope in op.op_name.split("/")[:-1]:
        bare = scope
        while match := re.fullmatch(
            r"(jit|pjit|jvp|vjp|transpose|vmap|remat|checkpoint|custom_jvp|custom_vjp)\((.*)\)", bare
        ):
            bare = "" if match.group(1) in ("jit", "pjit") else match.group(2)
        if bare and bare not in PLUMBING:
            words.append(bare)
    return tuple(words)


def _boxes(breakdown: Breakdown, path_of: Any) -> tuple[dict[str, Any], int]:
    """A tree of boxes for plotly: the step, what `path_of` says above each operation, the operations; and how many
    operations were too short for a box of their own."""
    least = LEAST_DRAWN * breakdown.step_seconds
    ids, labels, parents, values, colours = ["step"], ["step"], [""], [0.0], [PARENT]
    known = {"step"}
    small: dict[str, tuple[float, int]] = {}
    for place, op in enumerate(breakdown.ops):
        if op.seconds <= 0:
            continue
        above = "step"
        for word in path_of(op):
            one = f"{above}/{word}"
            if one not in known:
                known.add(one)
                ids.append(one)
                labels.append(label(word))
                parents.append(above)
                values.append(0.0)
                colours.append(PARENT)
            above = one
        if op.seconds < least:
            time, count = small.get(above, (0.0, 0))
            small[above] = (time + op.seconds, count + 1)
            continue
        ids.append(f"{above}/%{place}")
        labels.append(label(op.name))
        parents.append(above)
        values.append(1e3 * op.seconds)
        colours.append(COLOURS[op.category])
    for above, (time, count) in small.items():
        ids.append(f"{above}/%small")
        labels.append(f"{count} short operations")
        parents.append(above)
        values.append(1e3 * time)
        colours.append(PARENT)
    # A parent's own value is 0 and plotly adds up: sums of rounded shares would not quite fit into each other.
    trace = {
        "ids": ids,
        "labels": labels,
        "parents": parents,
        "values": values,
        "branchvalues": "remainder",
        "marker": {"colors": colours, "line": {"width": 0.5}},
        "textinfo": "label+percent root",
        "textfont": {"color": "#1c2530"},
        "hovertemplate": "%{label}<br>%{value:.4f} ms, %{percentRoot:.2%} of the step<extra></extra>",
    }
    return trace, sum(count for _, count in small.values())


def _flame_chart(breakdown: Breakdown) -> Figure:
    """The step by direction, module and operation, as a flame chart that hangs from the top."""

    def path(op: OpRow) -> tuple[str, ...]:
        return (str(op.direction) or "no direction", *(module_path(op) or (NO_MODULE,)))

    trace, small = _boxes(breakdown, path)
    trace |= {"type": "icicle", "maxdepth": 9, "tiling": {"orientation": "v"}, "leaf": {"opacity": 1}}
    said = _said(
        breakdown,
        small,
        "The step on top, below it the direction, the model's modules and the operations; "
        "width is time, colour the kind of operation.",
    )
    return Figure("Flame chart: the step by module and operation", [trace], _TIGHT, said, 520)


def _treemap(breakdown: Breakdown) -> Figure:
    """The step by kind of operation, part of the model and operation, as nested boxes."""
    trace, small = _boxes(
        breakdown, lambda op: (str(op.category), f"{op.part}, {op.direction}" if op.direction else str(op.part))
    )
    trace |= {"type": "treemap", "maxdepth": 4, "pathbar": {"visible": True}}
    said = _said(breakdown, small, "Kinds of operations, in them parts of the model, in them operations; area is time.")
    return Figure("Treemap: the step by kind, part and operation", [trace], _TIGHT, said, 460)


def _buffers_chart(memory: MemoryReport) -> Figure:
    shown = memory.largest[:MOST_BUFFERS]
    rest = max(0, (memory.peak_bytes or memory.required_bytes) - sum(buffer.hbm_bytes for buffer in shown))
    names = [label(f"{place}. {buffer.instruction or buffer.opcode}") for place, buffer in enumerate(shown, 1)]
    trace = {
        "type": "treemap",
        "labels": [*names, "all others"],
        "parents": [""] * (len(names) + 1),
        "values": [*(buffer.hbm_bytes / MIB for buffer in shown), rest / MIB],
        "texttemplate": "%{label}<br>%{value:,.0f} MiB",
        "text": [*(label(f"{buffer.shape} {buffer.op_name}") for buffer in shown), ""],
        "hovertemplate": "%{label}<br>%{value:,.1f} MiB<br>%{text}<extra></extra>",
    }
    said = f"The {len(shown)} largest buffers, {memory.largest_are}, in MiB; the table lists them."
    return Figure(f"Largest buffers, {memory.largest_are}", [trace], _TIGHT, said, 340)


def _said(breakdown: Breakdown, small: int, words: str) -> str:
    top = ", ".join(f"{op.name} {100 * breakdown.group(op.name, [op]).share:.1f} %" for op in breakdown.top(3))
    short = f" {small:,} operations below {100 * LEAST_DRAWN:g} % are drawn together." if small else ""
    return f"{words} A click opens a box. Longest operations: {top}.{short} The tables have all of it."
