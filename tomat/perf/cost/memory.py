"""Whether a compiled step fits, and what fills the memory, from the compiler's refusal or from the compiled program.

libtpu 0.0.46 refuses with one line: "Ran out of memory on HBM, the total memory required for HLO temporaries (35.64G)
exceeds available HBM (31.24G)". That total is *not* only the temporaries: for the 200M model on v6e-16 (batch 64,
context 4608, no checkpointing) the buffer assignment holds 38,062,899,808 bytes of temporaries, 203,272,192 of
arguments, 163,840 of constants and 1,216 of outputs, together 35.64 GiB. Code paths that detect it later print "Used
36.01G of 31.25G hbm". G is 2**30 bytes throughout.

The line names no buffers, but the buffer assignment does, which ``--xla_dump_to`` writes before the compiler gives up.
XLA packs all temporaries of a memory space into one allocation by simulating a heap (``xla/service/heap_simulator``).
The heap's trace is part of the ``HloProto``. A replay of it shows which buffers are live when the most bytes are.
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, typed
from tomat.base.shipped import installs

if TYPE_CHECKING:  # a plan from the cache reads no program
    from tomat.perf.profile.hlo import HloProgram, Instruction, Shape

LARGEST_COUNT = 24
"""Number of buffers that a report keeps."""
STRETCHES = 240
"""Number of points that a report keeps of the memory over the schedule."""

ALLOCATE, FREE, SHARE = 0, 1, 2
"""`HeapSimulatorTrace.Event.Kind` (xla/service/hlo.proto)."""


@dataclass(frozen=True)
class Buffer:
    """One buffer in HBM and the operation that made it."""

    hbm_bytes: Count
    """Bytes that it takes, including the padding to the layout's tiles."""
    logical_bytes: Count
    shape: str
    """As in HLO text, with its layout: `bf16[20,8,8192,2048]{2,3,1,0:T(8,128)(2,1)}`."""
    instruction: str
    opcode: str
    op_name: str
    """JAX's scopes; "" if the compiler made the operation."""
    source: str
    """`file:line` of the model's code; "" if unknown."""


def shape_text(shape: Any) -> str:
    """A `ShapeProto` in the form of HLO text, with layout and tiles."""
    if shape.tuple_shapes:
        return "(" + ", ".join(shape_text(part) for part in shape.tuple_shapes) + ")"
    from tomat.perf.profile.hlo import PRIMITIVE_TYPES, UNKNOWN_TYPE

    text = f"{PRIMITIVE_TYPES.get(shape.element_type, UNKNOWN_TYPE)[0]}[{','.join(map(str, shape.dimensions))}]"
    tiles = "".join(f"({','.join(map(str, tile.dimensions))})" for tile in shape.layout.tiles)
    space = f"S({shape.layout.memory_space})" if shape.layout.memory_space else ""
    minor_to_major = ",".join(map(str, shape.layout.minor_to_major))
    if not minor_to_major and not tiles and not space:
        return text
    return f"{text}{{{minor_to_major}{':' if tiles or space else ''}{'T' if tiles else ''}{tiles}{space}}}"


def read_assignment(hlo_proto: bytes) -> dict[str, Any] | None:
    """The HBM usage in the buffer assignment of a serialised `HloProto`, as arguments of `MemoryReport`. None if it
    holds no assignment."""
    from tomat.perf.profile.hlo import HBM_MEMORY_SPACE, HloProgram
    from tomat.perf.profile.protos import new_message

    message = new_message("HloProto")
    message.ParseFromString(hlo_proto)
    assignment = message.buffer_assignment
    if not assignment.buffer_allocations or not message.hlo_module.computations:
        return None
    program = HloProgram(message.hlo_module)
    logical = {buffer.id: buffer for buffer in assignment.logical_buffers}
    arguments = aliased = outputs = constants = heap = live = 0
    buffers: list[Buffer] = []
    levels: list[int] = []
    for allocation in assignment.buffer_allocations:
        if allocation.color != HBM_MEMORY_SPACE or allocation.is_thread_local:
            continue
        if allocation.is_entry_computation_parameter:
            arguments += allocation.size
            aliased += allocation.size if allocation.is_parameter_aliased_with_output else 0
            ids = [a.logical_buffer_id for a in allocation.assigned]
            buffers += _described(program, logical, ids, allocation.size)
        elif allocation.is_constant:
            constants += allocation.size
        elif allocation.maybe_live_out:
            outputs += allocation.size
        else:
            heap += allocation.size
            assigned = {a.logical_buffer_id for a in allocation.assigned}
            # Find the heap trace that holds these buffers. Its own index counts allocations before sorting.
            shared = [len({e.buffer_id for e in trace.events} & assigned) for trace in assignment.heap_simulator_traces]
            most = max(shared, default=0)
            events = assignment.heap_simulator_traces[shared.index(most)].events if most else ()
            found, groups = replayed(events, {i: b.size for i, b in logical.items()})
            # If HBM has several heaps (which was never seen), the largest counts.
            levels = max(levels, found, key=lambda one: max(one, default=0))
            if not groups:  # an allocation without a heap is one buffer, live all the time
                live += allocation.size
                buffers += _described(program, logical, sorted(assigned), allocation.size)
            for group in groups:
                live += logical[group[0]].size
                buffers += _described(program, logical, group, logical[group[0]].size)
    buffers.sort(key=lambda b: (-b.hbm_bytes, b.instruction))
    held = arguments + outputs + constants + live
    # The live bytes along the schedule: the largest value in each of at most `STRETCHES` stretches.
    length = -(-len(levels) // STRETCHES) or 1
    stretches = (range(at, min(at + length, len(levels))) for at in range(0, len(levels), length))
    tops = [max(stretch, key=levels.__getitem__) for stretch in stretches]
    rest = held - max(levels, default=0)  # in use all the time
    return {
        "required_bytes": arguments + outputs + constants + heap,
        "argument_bytes": arguments,
        "output_bytes": outputs,
        "alias_bytes": aliased,
        "temporary_bytes": heap,
        "peak_bytes": held,
        "largest": tuple(buffers[:LARGEST_COUNT]),
        "timeline": tuple((at / len(levels), rest + levels[at]) for at in tops),
    }


def replayed(events: Any, sizes: dict[int, int]) -> tuple[list[int], list[list[int]]]:
    """Replay a heap's trace. Returns the live bytes after each event, and the buffers that are live at the peak, in
    groups that share one place, its owner first."""
    owner: dict[int, int] = {}
    users: dict[int, int] = {}
    members: dict[int, list[int]] = {}
    levels: list[int] = []
    live = peak = 0
    at_peak: list[int] = []
    for event in events:
        buffer_id: int = event.buffer_id
        if event.kind == ALLOCATE:
            owner[buffer_id] = buffer_id
            users[buffer_id] = 1
            members[buffer_id] = [buffer_id]
            live += sizes[buffer_id]
        elif event.kind == SHARE:
            shared_with: int = event.share_with_canonical_id
            place = owner.get(shared_with, shared_with)
            owner[buffer_id] = place
            if not users.get(place):  # shared again after its last user was freed
                live += sizes[place]
            users[place] = users.get(place, 0) + 1
            members.setdefault(place, [place]).append(buffer_id)
        elif event.kind == FREE:
            place = owner[buffer_id]
            users[place] -= 1
            if users[place] == 0:
                live -= sizes[place]
        levels.append(live)
        if live > peak:
            peak, at_peak = live, [place for place, count in users.items() if count > 0]
    return levels, [members[place] for place in at_peak]


def _described(program: "HloProgram", logical: dict[int, Any], ids: list[int], size: int) -> list[Buffer]:
    """The buffer of a group that shares one place, described by its first operation with a line in the model."""
    candidates: list[tuple[Instruction, Any, Shape, Instruction]] = []
    for buffer_id in ids:
        location = logical[buffer_id].defined_at if buffer_id in logical else None
        instruction = program.by_id.get(location.instruction_id) if location is not None else None
        if instruction is not None and location is not None:
            written, shape = instruction.proto.shape, instruction.shape
            for index in location.shape_index:
                written, shape = written.tuple_shapes[index], shape.parts[index]
            candidates.append((instruction, written, shape, saved_value(program, instruction, location.shape_index)))
    if not candidates:
        return []
    telling = [c for c in candidates if program.source(c[3])] or candidates
    # A buffer that a loop fills is described by the stored value, rather than by the operation that reserved it.
    stored = [c for c in telling if c[3] is not c[0]] or telling
    instruction, written, shape, value = stored[0]
    return [
        Buffer(
            hbm_bytes=size,
            logical_bytes=shape.byte_count(),
            shape=shape_text(written),
            instruction=instruction.name,
            opcode=instruction.opcode,
            op_name=value.op_name,
            source=program.source(value),
        )
    ]


_PASSING = frozenset(
    {"bitcast", "bitcast-convert", "broadcast", "convert", "copy", "parameter", "reshape", "transpose"}
)
"""Opcodes that pass a value on. The origin of the value is their operand."""


def saved_value(program: "HloProgram", instruction: "Instruction", shape_index: Any = ()) -> "Instruction":
    """The value that an in-place update stores (which a scan keeps for its backward pass). Its source line is where it
    was computed, not the line of the scan. For other operations, `instruction` itself."""
    fused, value = None, instruction
    if instruction.opcode == "fusion":
        fused = instruction
        value = program.root(instruction.called_ids[0])
        if value.opcode == "tuple":
            if not shape_index:
                return instruction
            value = program.operands(value)[shape_index[0]]
    while value.opcode == "bitcast":
        value = program.operands(value)[0]
    if value.opcode != "dynamic-update-slice":
        return instruction
    value = program.operands(value)[1]
    while value.opcode in _PASSING:
        if value.opcode == "parameter":
            if fused is None or value.computation_id not in fused.called_ids:
                break
            value, fused = program.operands(fused)[value.proto.parameter_number], None
        else:
            value = program.operands(value)[0]
    return value if program.source(value) else instruction


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
    """The memory of one device's program, in bytes; None where the compiler did not state it."""

    fits: bool
    required_bytes: Count
    """Bytes that the compiler compares with the capacity: arguments, temporaries with their fragmentation, constants,
    outputs."""
    capacity_bytes: Count
    argument_bytes: Count | None = None
    output_bytes: Count | None = None
    """Outputs with their own place, without those that overwrite donated arguments."""
    alias_bytes: Count | None = None
    """The part of the arguments that outputs overwrite."""
    temporary_bytes: Count | None = None
    """The heap of temporaries, fragmentation included."""
    program_bytes: Count | None = None
    """The machine code, which is not part of `required_bytes`."""
    peak_bytes: Count | None = None
    """Arguments, and the buffers that are live at the peak: `required_bytes` without fragmentation."""
    largest: tuple[Buffer, ...] = ()
    largest_are: str = ""
    """What `largest` holds: `LIVE_AT_PEAK`; "" without a buffer assignment."""
    timeline: tuple[tuple[Amount, Count], ...] = ()
    """Bytes in use along the schedule: (share of its allocations and frees, bytes), the largest of each stretch; empty
    without a buffer assignment."""
    memory_space: str = "hbm"
    """`hbm`, or the on-chip memory (`vmem`) if a kernel's blocks do not fit into it. No batch size helps there."""
    notes: tuple[str, ...] = ()

    @property
    def headroom_bytes(self) -> int:
        """Capacity that is left; negative if the step does not fit."""
        return self.capacity_bytes - self.required_bytes

    @property
    def fragmentation_bytes(self) -> int | None:
        """Holes in the heap at the peak."""
        return None if self.peak_bytes is None else max(0, self.required_bytes - self.peak_bytes)

    def by_kind(self) -> dict[str, int]:
        """The parts of `required_bytes` by kind. Kinds that the compiler did not state are in the rest."""
        known = {"arguments": self.argument_bytes, "outputs": self.output_bytes, "temporaries": self.temporary_bytes}
        kinds = {name: size for name, size in known.items() if size}
        rest = self.required_bytes - sum(kinds.values())
        name = "constants" if None not in known.values() else "others"
        return kinds | ({name: rest} if rest > 0 else {})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "headroom_bytes": self.headroom_bytes, "fragmentation_bytes": self.fragmentation_bytes}


def read_memory(data: Any, origin: str | Path, remedy: str = "Plan again.") -> MemoryReport:
    """Read the report from the JSON of a plan. `origin` is its file or its name, for errors."""
    return typed(data, MemoryReport, f"the memory of the plan {origin}", remedy)


def memory_of_oom(message: str, hlo_proto: bytes | None = None) -> MemoryReport | None:
    """The memory in a refusal for lack of memory; None if `message` is about something else. `hlo_proto`, a serialised
    `HloProto` with a buffer assignment (`*.after_optimizations.hlo.pb` of ``--xla_dump_to``), adds exact bytes, and the
    buffers live at the peak."""
    found = next((match for pattern in _TOTALS if (match := pattern.search(message))), None)
    if found is None:
        return None
    required, capacity = (round(float(found[n]) * _UNITS[found[n + 1]]) for n in (1, 3))
    space = found.groupdict().get("space") or "hbm"
    assigned = read_assignment(hlo_proto) if hlo_proto is not None and space == "hbm" else None
    if assigned is not None:
        # A larger difference than rounding means that the figure includes more than buffers (machine code, reserves).
        if abs(required - assigned["required_bytes"]) > ROUNDING_BYTES:
            assigned["required_bytes"] = required
        return MemoryReport(fits=False, capacity_bytes=capacity, largest_are=LIVE_AT_PEAK, **assigned)
    return MemoryReport(fits=False, required_bytes=required, capacity_bytes=capacity, memory_space=space)


def memory_of_compiled(hlo_proto: bytes, capacity_bytes: int, program_bytes: int | None = None) -> MemoryReport:
    """The memory of a program that the compiler accepted. `hlo_proto` is as for `memory_of_oom`, `capacity_bytes` the
    memory of one device, `program_bytes` the machine code, if it is generated already.

    `compiled.memory_analysis()` would be too large. libtpu 0.0.46 adds to its `temp_size_in_bytes` the part of the heap
    that the assignment's own list of peak buffers leaves out, and 32,704 bytes (three programs, to the byte). That list
    leaves out the buffers that loops carry: 1B on v6e-32 reports 16,687,908,896 bytes for a heap of 11,311,530,016.
    """
    assigned = read_assignment(hlo_proto)
    if assigned is None:
        said = "the compiler left no buffer assignment; libtpu 0.0.46 writes one"
        raise TomatError(f"{said}: `{installs('plan')}`.")
    return MemoryReport(
        fits=True, capacity_bytes=capacity_bytes, program_bytes=program_bytes, largest_are=LIVE_AT_PEAK, **assigned
    )
