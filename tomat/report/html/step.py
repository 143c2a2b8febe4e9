"""The page of a plan or a profile: where the time of a step goes, by module and kind of operation, and its memory."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from tomat.base.records import typed
from tomat.base.report.formats import percent, seconds
from tomat.base.report.model import Facts, Note, Report, Section
from tomat.base.reporting import readable_bytes
from tomat.perf.cost.memory import MemoryReport, read_memory
from tomat.perf.profile.breakdown import Breakdown, OpRow
from tomat.report import step
from tomat.report.html.document import Figure, label, rendered
from tomat.report.plan import buffers_table, memory_parts, plan_parts, trials_part

PLUMBING = ("while", "body", "cond", "rematted_computation", "checkpoint", "closed_call", "eval_jaxpr", "shard_map")
"""Scopes that JAX adds and that say nothing about the model."""
WRAPPED = re.compile(r"(jit|pjit|jvp|vjp|transpose|vmap|remat|checkpoint|custom_jvp|custom_vjp)\((.*)\)")
NO_MODULE = "outside the model's modules"
PARENT = "#c9d0d7"
"""Colour of boxes that are not operations."""
MOST_BUFFERS = 24
MIB = 2**20
LEAST_DRAWN = 5e-5
"""Operations below this share of the step have no box of their own in the charts. The table lists all operations."""
_TIGHT = {"margin": {"l": 4, "r": 4, "t": 8, "b": 4}}


def breakdown_page(
    breakdown: Breakdown, kind: str, *, report: Mapping[str, Any] | None = None, origin: str = ""
) -> Report:
    """The page of a `profile`, or of a `plan` whose `Plan.to_dict()` is `report`, which adds memory, cycle models and
    utilisation. `origin` is the plan's file, for error messages."""
    held = read_memory(report["memory"], origin) if report else None
    headline = _headline(breakdown, report or {}, held)
    measured = "measured" if breakdown.source == "trace" else "predicted"
    kinds = step.groups_table(breakdown.categories, "kind")
    notes = [Note(f"{note[:1].upper()}{note[1:]}.") for note in step.step_notes(breakdown)]
    sections = [
        Section("", (headline, f"One step of one device, {measured}: {breakdown.title}.", *notes)),
        Section("The step", (step.step_facts(breakdown), *(plan_parts(report) if report else ()))),
        Section("By kind of operation", (step.shares_chart(breakdown), kinds)),
        Section("By module", (*_box_charts(breakdown), step.groups_table(breakdown.parts, "part"))),
    ]
    if (against := step.roofline_chart(breakdown)) is not None:
        sections.append(Section("Against the roofs of the chip", (against,)))
    sections.append(Section("Operations", (step.operations_table(breakdown, len(breakdown.ops)),)))
    memory = [step.memory_table(breakdown)] if breakdown.memory_bytes else []
    sections.append(Section("Memory", _memory_parts(held) if held else memory))
    # Older breakdowns have no windows.
    steps = [step.windows_chart(breakdown) or step.times_chart(breakdown)]
    steps += [step.windows_table(breakdown) if breakdown.step_classes else None]
    steps += [step.waits_table(breakdown) if breakdown.gaps else None]
    sections.append(Section("Steps and waits", [*filter(None, steps)]))
    title = str(report["run_name"]) if report else breakdown.title
    figures = {"step_seconds": breakdown.step_seconds, "operations": len(breakdown.ops), "title": title}
    return Report(title, sections, kind, figures)


def _headline(breakdown: Breakdown, report: Mapping[str, Any], memory: MemoryReport | None) -> Markup:
    figures = [(seconds(breakdown.step_seconds), "a step")]
    if mfu := report.get("mfu_full"):
        figures.append(
            (percent(mfu["estimate"]), f"MFU, full attention ({percent(mfu['low'])} to {percent(mfu['high'])})")
        )
    if memory:
        needed, there = readable_bytes(memory.required_bytes), readable_bytes(memory.capacity_bytes)
        figures.append((needed, f"of {there} of {memory.memory_space.upper()}"))
    return rendered("headline.html", figures=figures)


def unfit_page(report: Mapping[str, Any], origin: str) -> Report:
    facts = Facts({key: report.get(key) for key in ("slice", "compiler")})
    of = f"nearest_fits of the plan {origin}"
    trials = typed(report.get("nearest_fits") or [], list[dict[str, Any]], of, "Plan again.")
    title = str(report.get("run_name", "a plan"))
    tried = trials_part(trials) if "nearest_fits" in report else "Nothing else was tried."
    sections = (
        Section("", ("This step does not fit into the memory of a device, so it has no times.",)),
        Section("The step", (facts,)),
        Section("Memory", _memory_parts(read_memory(report.get("memory") or {}, origin))),
        Section("What was tried instead", (tried,)),
    )
    return Report(title, sections, "plan", {"title": title, "fits": False, "trials": len(trials)})


def _memory_parts(memory: MemoryReport) -> list[Any]:
    buffers = [_buffers_chart(memory), buffers_table(memory)] if memory.largest else []
    return [*memory_parts(memory), *buffers]


def module_path(op: OpRow) -> tuple[str, ...]:
    """The modules around an operation, outermost first: its JAX scopes without JAX's own wrappers and the operation.

    `jit(step)/jvp(Model)/layers/attention/dot_general` gives (`Model`, `layers`, `attention`). An operation of the
    backward pass gives the same path; its `direction` tells the two apart.
    """
    words = []
    for bare in op.op_name.split("/")[:-1]:
        while match := WRAPPED.fullmatch(bare):
            bare = "" if match.group(1) in ("jit", "pjit") else match.group(2)
        words += [bare] if bare and bare not in PLUMBING else []
    return tuple(words)


def _boxes(breakdown: Breakdown, path_of: Callable[[OpRow], tuple[str, ...]]) -> tuple[dict[str, Any], str]:
    """A tree of boxes for plotly (the step, then the path that `path_of` gives each operation, then the operations) and
    the caption of the figure."""
    least = LEAST_DRAWN * breakdown.step_seconds
    # By id: label, parent, milliseconds, colour. A parent's own value is 0 and plotly adds up its children, because our
    # own sums of rounded values would not match exactly.
    boxes: dict[str, tuple[str, str, float, str]] = {"step": ("step", "", 0.0, PARENT)}
    small: dict[str, tuple[float, int]] = {}
    for place, op in enumerate(breakdown.ops):
        if op.seconds <= 0:
            continue
        above = "step"
        for word in path_of(op):
            boxes.setdefault(f"{above}/{word}", (label(word), above, 0.0, PARENT))
            above = f"{above}/{word}"
        if op.seconds < least:
            time, count = small.get(above, (0.0, 0))
            small[above] = (time + op.seconds, count + 1)
        else:
            boxes[f"{above}/%{place}"] = label(op.name), above, 1e3 * op.seconds, step.COLOURS[op.category]
    for above, (time, count) in small.items():
        boxes[f"{above}/%small"] = f"{count} short operations", above, 1e3 * time, PARENT
    labels, parents, values, colours = map(list, zip(*boxes.values(), strict=True))
    trace = {"ids": list(boxes), "labels": labels, "parents": parents, "values": values, "branchvalues": "remainder"}
    trace |= {
        "marker": {"colors": colours, "line": {"width": 0.5}},
        "textinfo": "label+percent root",
        "textfont": {"color": "#1c2530"},
        "hovertemplate": "%{label}<br>%{value:.4f} ms, %{percentRoot:.2%} of the step<extra></extra>",
    }
    top = ", ".join(f"{op.name} {percent(breakdown.group(op.name, [op]).share)}" for op in breakdown.top(3))
    n_small = sum(count for _, count in small.values())
    short = f" {n_small:,} operations below {100 * LEAST_DRAWN:g} % are drawn together." if n_small else ""
    return trace, f"A click opens a box. Longest operations: {top}.{short} The tables have all of it."


def _box_charts(breakdown: Breakdown) -> list[Figure]:
    """Two charts of the step: a flame chart from the top by direction, module and operation, and nested boxes by kind
    of operation, part of the model and operation."""

    def modules(op: OpRow) -> tuple[str, ...]:
        return (str(op.direction) or "no direction", *(module_path(op) or (NO_MODULE,)))

    def kinds(op: OpRow) -> tuple[str, ...]:
        return str(op.category), f"{op.part}, {op.direction}" if op.direction else str(op.part)

    flames = {"type": "icicle", "maxdepth": 9, "tiling": {"orientation": "v"}, "leaf": {"opacity": 1}}
    tiles = {"type": "treemap", "maxdepth": 4, "pathbar": {"visible": True}}
    flame_words = "The step on top, below it the direction, the model's modules and the operations; "
    flame_words += "width is time, colour the kind of operation."
    tile_words = "Kinds of operations, in these the parts of the model, in these the operations; area is time."
    figures = []
    for title, path_of, look, words, height in (
        ("Flame chart: the step by module and operation", modules, flames, flame_words, 520),
        ("Treemap: the step by kind, part and operation", kinds, tiles, tile_words, 460),
    ):
        trace, said = _boxes(breakdown, path_of)
        figures.append(Figure(title, [trace | look], _TIGHT, f"{words} {said}", height))
    return figures


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
