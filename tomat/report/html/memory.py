"""The memory of a step in a page: what it is made of, and the buffers that are live when most of it is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tomat.base.report.formats import number
from tomat.base.report.model import Column, Facts, Table
from tomat.base.reporting import readable_bytes
from tomat.perf.cost.memory import Buffer, MemoryReport
from tomat.report.html.document import Figure, label

GIB = 2**30
MIB = 2**20


def memory_parts(memory: MemoryReport) -> list[Any]:
    """Whether a plan fits, what its memory is made of, and what is live when most of it is used."""
    over = -memory.headroom_bytes
    said = {
        "verdict": "fits" if memory.fits else f"does not fit: {readable_bytes(over)} too much",
        "required": f"{readable_bytes(memory.required_bytes)} of {readable_bytes(memory.capacity_bytes)} of "
        f"{memory.memory_space.upper()}",
        "arguments": _bytes(memory.argument_bytes),
        "temporaries": _bytes(memory.temporary_bytes),
        "outputs of their own": _bytes(memory.output_bytes),
        "program": _bytes(memory.program_bytes),
        "live at the peak": _bytes(memory.peak_bytes),
        "holes in the heap": _bytes(memory.fragmentation_bytes),
    }
    parts: list[Any] = [Facts(said)]
    if memory.timeline:
        parts.append(_timeline(memory))
    elif memory.fits:
        parts.append("The plan does not hold its memory over the schedule: an earlier tomat made it. Plan again.")
    if memory.largest:
        parts += [_peak(memory), _buffers(memory.largest, memory.largest_are)]
    return parts


def _bytes(count: int | None) -> str | None:
    return None if count is None else readable_bytes(count)


def _timeline(memory: MemoryReport) -> Figure:
    """Bytes in use along the schedule of the step."""
    spans = memory.timeline
    ends = [place for place, _ in spans]
    values = [size / GIB for _, size in spans]
    top = max(range(len(values)), key=values.__getitem__)
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "line": {"width": 1.5, "shape": "hv"},
            "fill": "tozeroy",
            "name": "in use",
            "x": [100 * place for place in ends],
            "y": values,
            "hovertemplate": "%{x:.1f} % of the schedule: %{y:.3f} GiB<extra></extra>",
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "peak",
            "x": [100 * ends[top]],
            "y": [values[top]],
            "marker": {"size": 10, "color": "#c94f4f"},
            "hovertemplate": "peak: %{y:.3f} GiB<extra></extra>",
        },
    ]
    layout = {
        "xaxis": {"title": {"text": "% of the allocations and frees of the schedule"}, "range": [0, 100]},
        "yaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"},
        "showlegend": False,
    }
    said = (
        f"Memory of a device along the step's schedule: {values[0]:.3f} GiB at its start, at most "
        f"{values[top]:.3f} GiB at {100 * ends[top]:.0f} % of it. Of each stretch the largest value is drawn; the "
        "buffers that are live there follow."
    )
    return Figure("Memory over the schedule", traces, layout, said, 300)


def _peak(memory: MemoryReport) -> Figure:
    shown = memory.largest[:24]
    rest = (memory.peak_bytes or memory.required_bytes) - sum(buffer.hbm_bytes for buffer in shown)
    names = [label(f"{place}. {buffer.instruction or buffer.opcode}") for place, buffer in enumerate(shown, 1)]
    sizes = [buffer.hbm_bytes / MIB for buffer in shown]
    if rest > 0:
        names.append("all others")
        sizes.append(rest / MIB)
    trace = {
        "type": "treemap",
        "labels": names,
        "parents": [""] * len(names),
        "values": sizes,
        "texttemplate": "%{label}<br>%{value:,.0f} MiB",
        "text": [label(f"{buffer.shape} {buffer.op_name}") for buffer in shown] + ([""] if rest > 0 else []),
        "hovertemplate": "%{label}<br>%{value:,.1f} MiB<br>%{text}<extra></extra>",
    }
    said = f"The {len(shown)} largest buffers, {memory.largest_are}, in MiB; the table lists them."
    return Figure(
        f"Largest buffers, {memory.largest_are}", [trace], {"margin": {"l": 4, "r": 4, "t": 8, "b": 4}}, said, 340
    )


def _buffers(buffers: Sequence[Buffer], caption: str) -> Table:
    heads = (
        Column("buffer"),
        Column("MiB", number(2, 1 / MIB)),
        Column("MiB without padding", number(2, 1 / MIB)),
        Column("shape"),
        Column("operation"),
        Column("source"),
    )
    rows = [
        (f"{i}. {b.instruction or b.opcode}", b.hbm_bytes, b.logical_bytes, b.shape, b.op_name, b.source)
        for i, b in enumerate(buffers, 1)
    ]
    return Table(f"Largest buffers, {caption}", heads, rows)
