"""The buffers that a compiled program holds at its peak, from XLA's buffer assignment.

XLA packs all temporaries of a memory space into one allocation by simulating a heap: its trace of allocations, frees
and shares (``xla/service/heap_simulator``) is part of the ``HloProto`` that ``--xla_dump_to`` writes, also for a
program that does not fit. Replaying the trace tells which buffers are live together when most bytes are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tomat.base.records import Count
from tomat.perf.profile.hlo import HBM_MEMORY_SPACE, PRIMITIVE_TYPES, UNKNOWN_TYPE, HloProgram, Instruction, Shape
from tomat.perf.profile.protos import new_message

LARGEST_COUNT = 24
"""Buffers a report keeps."""
STRETCHES = 240
"""Points that a report keeps of the memory over the schedule."""

ALLOCATE, FREE, SHARE = 0, 1, 2
"""`HeapSimulatorTrace.Event.Kind` (xla/service/hlo.proto)."""


@dataclass(frozen=True)
class Buffer:
    """One buffer in HBM and the operation that made it."""

    hbm_bytes: Count
    """Bytes it takes, the padding to the layout's tiles included."""
    logical_bytes: Count
    """Bytes of its elements alone."""
    shape: str
    """As in HLO text, with its layout: `bf16[20,8,8192,2048]{2,3,1,0:T(8,128)(2,1)}`."""
    instruction: str
    opcode: str
    op_name: str
    """JAX's scopes; "" where the compiler made the operation."""
    source: str
    """`file:line` of the model's code, "" where unknown."""


def shape_text(shape: Any) -> str:
    """A `ShapeProto` as HLO text spells it, layout and tiles included."""
    if shape.tuple_shapes:
        return "(" + ", ".join(shape_text(part) for part in shape.tuple_shapes) + ")"
    text = f"{PRIMITIVE_TYPES.get(shape.element_type, UNKNOWN_TYPE)[0]}[{','.join(map(str, shape.dimensions))}]"
    tiles = "".join(f"({','.join(map(str, tile.dimensions))})" for tile in shape.layout.tiles)
    space = f"S({shape.layout.memory_space})" if shape.layout.memory_space else ""
    minor_to_major = ",".join(map(str, shape.layout.minor_to_major))
    if not minor_to_major and not tiles and not space:
        return text
    return f"{text}{{{minor_to_major}{':' if tiles or space else ''}{'T' if tiles else ''}{tiles}{space}}}"


def read_assignment(hlo_proto: bytes) -> dict[str, Any] | None:
    """What the buffer assignment in a serialised `HloProto` says of HBM, as arguments of `MemoryReport`.

    Returns:
        Bytes, and `largest`, the arguments and the temporaries live at the peak; None if it holds no assignment.
    """
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
            sizes = {i: b.size for i, b in logical.items()}
            found, groups = replayed(_trace_of(assignment, assigned), sizes)
            # Of several heaps in HBM (none was seen) the largest.
            levels = max(levels, found, key=lambda one: max(one, default=0))
            if not groups:  # an allocation without a heap is one buffer, live all the time
                live += allocation.size
                buffers += _described(program, logical, sorted(assigned), allocation.size)
            for group in groups:
                live += logical[group[0]].size
                buffers += _described(program, logical, group, logical[group[0]].size)
    buffers.sort(key=lambda b: (-b.hbm_bytes, b.instruction))
    held = arguments + outputs + constants + live
    return {
        "required_bytes": arguments + outputs + constants + heap,
        "argument_bytes": arguments,
        "output_bytes": outputs,
        "alias_bytes": aliased,
        "temporary_bytes": heap,
        "peak_bytes": held,
        "largest": tuple(buffers[:LARGEST_COUNT]),
        "timeline": over_schedule(levels, held - max(levels, default=0)),
    }


def _trace_of(assignment: Any, assigned: set[int]) -> Any:
    """The events of the heap that holds `assigned` (a trace's own index counts allocations before sorting)."""
    best, most = (), 0
    for trace in assignment.heap_simulator_traces:
        shared = len({e.buffer_id for e in trace.events} & assigned)
        if shared > most:
            best, most = trace.events, shared
    return best


def replayed(events: Any, sizes: dict[int, int]) -> tuple[list[int], list[list[int]]]:
    """A heap's trace replayed: the bytes that are live after each event, and, of when most are, groups of live
    buffers: each shares one place, its owner first."""
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


def over_schedule(levels: Sequence[int], rest: int) -> tuple[tuple[float, int], ...]:
    """Live bytes along a schedule, at most `STRETCHES` of them: of each stretch its largest.

    Args:
        levels: After each event of the heap.
        rest: Bytes in use all the time.

    Returns:
        (share of the events, bytes), in order; the largest of all is among them.
    """
    size = -(-len(levels) // STRETCHES)
    tops = (
        max(range(at, min(at + size, len(levels))), key=levels.__getitem__) for at in range(0, len(levels), size or 1)
    )
    return tuple((at / len(levels), rest + levels[at]) for at in tops)


def _described(program: HloProgram, logical: dict[int, Any], ids: list[int], size: int) -> list[Buffer]:
    """The buffer of a group that shares one place, told by the first of its operations that has a line in the model."""
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
    # A buffer that a loop fills is told by what is stored in it rather than by the operation that reserved it.
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
"""Opcodes that hand a value on: whose value it is, their operand says."""


def saved_value(program: HloProgram, instruction: Instruction, shape_index: Any = ()) -> Instruction:
    """What an in-place update stores (the value a scan keeps for its backward pass), or `instruction` itself.

    The update itself stands on the scan's line for every value it keeps; the value stands on the line that made it.
    """
    fused, value = None, instruction
    if instruction.opcode == "fusion":
        fused = instruction
        root = program.root(instruction.called_ids[0])
        if root is not None and root.opcode == "tuple":
            root = program.operands(root)[shape_index[0]] if shape_index else None
        if root is None:
            return instruction
        value = root
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
