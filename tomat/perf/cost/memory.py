"""Does a compiled step fit, and what fills the memory: read from the compiler's refusal, or from what it compiled.

libtpu 0.0.46 refuses with one line: "Ran out of memory on HBM, the total memory required for HLO temporaries (35.64G)
exceeds available HBM (31.24G)". That total is *not* the temporaries alone: for the 200M model on v6e-16 (batch 64,
context 4608, no checkpointing) its buffer assignment holds 38,062,899,808 bytes of temporaries, 203,272,192 of
arguments, 163,840 of constants and 1,216 of outputs, together 35.64 GiB. The paths of it that find out later print
"Used 36.01G of 31.25G hbm". G is 2**30 bytes throughout.

The line names no buffer; the buffer assignment, which ``--xla_dump_to`` writes before the compiler gives up, does.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, typed
from tomat.perf.cost.buffers import Buffer, read_assignment

ROUNDING_BYTES = 2**30 // 100
"""Messages print two decimals of a GiB."""

LIVE_AT_PEAK = "live at the peak"

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(-?\d+(?:\.\d+)?)\s*([KMGT]?)i?B?"

# (what the compiler required, what it had), by the sentences of XLA:TPU; see the module.
_TOTALS = (
    re.compile(rf"memory required for HLO temporaries \({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} (?P<space>hbm|vmem|smem|sflag|cmem)\."),
    re.compile(rf"Scoped allocation with size {_SIZE} and limit {_SIZE} exceeded scoped (?P<space>vmem) limit"),
)


@dataclass(frozen=True)
class MemoryReport:
    """The memory of one device's program, bytes; None where the compiler did not tell."""

    fits: bool
    required_bytes: Count
    """What the compiler compares with the capacity: arguments, temporaries with their fragmentation, constants,
    outputs."""
    capacity_bytes: Count
    argument_bytes: Count | None = None
    output_bytes: Count | None = None
    """Outputs with a place of their own, not those that overwrite donated arguments."""
    alias_bytes: Count | None = None
    """Part of the arguments that outputs overwrite."""
    temporary_bytes: Count | None = None
    """The heap of temporaries, fragmentation included."""
    program_bytes: Count | None = None
    """The machine code, which comes on top of `required_bytes`."""
    peak_bytes: Count | None = None
    """Arguments and the buffers live together when most are: `required_bytes` without fragmentation."""
    largest: tuple[Buffer, ...] = ()
    largest_are: str = ""
    """What `largest` holds: `LIVE_AT_PEAK`; "" where there is no buffer assignment."""
    timeline: tuple[tuple[Amount, Count], ...] = ()
    """Bytes in use along the schedule: (share of its allocations and frees, bytes), the largest of each stretch; empty
    where there is no buffer assignment."""
    memory_space: str = "hbm"
    """`hbm`, or the on-chip memory that a kernel's blocks did not fit (`vmem`): no batch size helps there."""
    notes: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int:
        """Capacity left; negative: the overshoot."""
        return self.capacity_bytes - self.required_bytes

    @property
    def fragmentation_bytes(self) -> int | None:
        """Holes in the heap at the peak."""
        return None if self.peak_bytes is None else max(0, self.required_bytes - self.peak_bytes)

    def by_kind(self) -> dict[str, int]:
        """What `required_bytes` is made of, by kind; the kinds that the compiler did not tell are the rest."""
        known = {
            "arguments": self.argument_bytes,
            "outputs": self.output_bytes,
            "temporaries": self.temporary_bytes,
        }
        kinds = {name: size for name, size in known.items() if size}
        rest = self.required_bytes - sum(kinds.values())
        name = "constants" if None not in known.values() else "others"
        return kinds | ({name: rest} if rest > 0 else {})

    def to_dict(self) -> dict[str, Any]:
        """JSON; `read_memory` reads it back."""
        return {**asdict(self), "headroom_bytes": self.headroom_bytes, "fragmentation_bytes": self.fragmentation_bytes}


def read_memory(data: Any) -> MemoryReport:
    """The report that `MemoryReport.to_dict` wrote.

    Raises:
        TomatError: `data` is something else.
    """
    return typed(data, MemoryReport, "the memory of the plan", "Plan again.")


def memory_of_oom(message: str, hlo_proto: bytes | None = None) -> MemoryReport | None:
    """What a refusal for want of memory says; None if `message` is about something else.

    Args:
        message: The compiler's error, whole.
        hlo_proto: A serialised `HloProto` with a buffer assignment (`*.after_optimizations.hlo.pb` of
            ``--xla_dump_to``): exact bytes, and the buffers live at the peak.
    """
    found = next((match for pattern in _TOTALS if (match := pattern.search(message))), None)
    if found is None:
        return None
    required, capacity = _bytes(found.group(1), found.group(2)), _bytes(found.group(3), found.group(4))
    space = found.groupdict().get("space") or "hbm"
    assigned = read_assignment(hlo_proto) if hlo_proto is not None and space == "hbm" else None
    if assigned is not None:
        # A figure further from it than its rounding counts more than buffers (machine code, what the system reserves).
        if abs(required - assigned["required_bytes"]) > ROUNDING_BYTES:
            assigned["required_bytes"] = required
        return MemoryReport(fits=False, capacity_bytes=capacity, largest_are=LIVE_AT_PEAK, **assigned)
    return MemoryReport(fits=False, required_bytes=required, capacity_bytes=capacity, memory_space=space)


def memory_of_compiled(hlo_proto: bytes, capacity_bytes: int, program_bytes: int | None = None) -> MemoryReport:
    """The memory of a program that the compiler accepted.

    Args:
        hlo_proto: A serialised `HloProto` with a buffer assignment, as for `memory_of_oom`.
        capacity_bytes: Memory of one device.
        program_bytes: The machine code, where it is made already.

    Raises:
        TomatError: `hlo_proto` holds no buffer assignment.

    `compiled.memory_analysis()` would say too much. libtpu 0.0.46 adds to its `temp_size_in_bytes` the part of the heap
    that the assignment's own list of peak buffers does not name, and 32,704 bytes (three programs, to the byte). That
    list misses what loops carry: 1B on v6e-32 reports 16,687,908,896 bytes for a heap of 11,311,530,016.
    """
    assigned = read_assignment(hlo_proto)
    if assigned is None:
        raise TomatError(
            "the compiler left no buffer assignment, which says what memory a program takes; libtpu 0.0.46 writes one: "
            "install it with `uv sync --extra plan`."
        )
    return MemoryReport(
        fits=True, capacity_bytes=capacity_bytes, program_bytes=program_bytes, largest_are=LIVE_AT_PEAK, **assigned
    )


def _bytes(figure: str, unit: str) -> int:
    return round(float(figure) * _UNITS[unit])
