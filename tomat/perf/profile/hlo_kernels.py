"""Which instructions of a program run, how often, and where their values come from.

A *kernel* is an instruction that the machine executes as a unit. Fusions are not opened; the bodies of ``while``,
``call`` and ``conditional`` are, and count as often as they run. XLA carries constants through its loops: the mask of
an attention kernel, in a scan inside the loop over microbatches, is an element of the inner loop's tuple. That is an
element of the outer loop's tuple, which is a constant before both loops."""

import array
from collections.abc import Iterator
from dataclasses import dataclass

from tomat.perf.profile.hlo import CONTROL_OPCODES, FREE_OPCODES, HloProgram, Instruction

Path = tuple[int, ...]
"""Index into nested tuples: the element of the tuple, then the element of that, and so on; empty for an array."""

HANDING_ON = frozenset(
    {"copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "opt-barrier", "optimization-barrier"}
)
"""Opcodes whose result has the values of their first operand, in the same order."""


def origin(
    program: HloProgram, instruction: Instruction, path: Path = (), open_loops: frozenset[int] = frozenset()
) -> tuple[Instruction, Path]:
    """The instruction that makes a value, and the value's element in the tuple of that instruction. `path` is the
    element of `instruction` that is asked for.

    If a loop's body returns an element of its tuple unchanged, also through inner loops, the origin is before the loop.
    Otherwise it is the loop's parameter, or the loop. In the body of one of `open_loops` (ids) it is the parameter.
    """
    while True:
        operands = program.operands(instruction)
        opcode = instruction.opcode
        if opcode in HANDING_ON and operands:
            # `copy-start` returns (destination, source, context), and `copy-done` passes on the destination.
            path = () if opcode == "copy-start" else path
            instruction = operands[0]
        elif opcode == "get-tuple-element" and operands:
            instruction, path = operands[0], (int(instruction.proto.tuple_index), *path)
        elif opcode == "tuple" and path and path[0] < len(operands):
            instruction, path = operands[path[0]], path[1:]
        elif opcode == "while":
            if not _handed_on(program, instruction, path, open_loops):
                return instruction, path
            instruction = operands[0]
        elif opcode == "parameter":
            # The only loop, call, fusion or branch that runs the computation.
            callers = program.callers.get(instruction.computation_id, [])
            if len(callers) != 1 or callers[0].proto.id in open_loops:
                return instruction, path
            caller = callers[0]
            given = program.operands(caller)
            if caller.opcode == "while":
                if not _handed_on(program, caller, path, open_loops):
                    return instruction, path
                instruction = given[0]
            else:
                # in a conditional, operand 0 chooses the branch, and each branch has one of the others
                number = int(instruction.proto.parameter_number)
                if caller.opcode == "conditional":
                    number = 1 + caller.called_ids.index(instruction.computation_id)
                if number >= len(given):
                    return instruction, path
                instruction = given[number]
        else:
            return instruction, path


def constant_values(found: tuple[Instruction, Path]) -> list[int] | None:
    """The integers of a constant that `origin` found; None if it is no constant of integers."""
    instruction, path = found
    if instruction.opcode != "constant" or path:
        return None
    literal = instruction.proto.literal
    for code, data in (("b", literal.s8s), ("h", literal.s16s)):
        if data:  # little-endian, as the hosts of XLA are
            return list(array.array(code, data))
    for values in (literal.s32s, literal.s64s, literal.u32s, literal.u64s):
        if len(values):
            return [int(value) for value in values]
    return None


def _handed_on(program: HloProgram, loop: Instruction, path: Path, open_loops: frozenset[int]) -> bool:
    """Whether a loop's body returns an element of its tuple unchanged."""
    if not path:
        return False
    found, element = origin(program, program.root(loop.called_ids[0]), path, open_loops | {loop.proto.id})
    return found.opcode == "parameter" and found.computation_id == loop.called_ids[0] and element == path


MAX_TRIPS = 2**40


@dataclass(frozen=True)
class Kernel:
    """An executed instruction and how often one run of the program executes it."""

    instruction: Instruction
    executions: float


def executed_kernels(program: HloProgram, computation_id: int | None = None) -> list[Kernel]:
    """Every executed instruction, once, with its executions per run of a computation, without free opcodes."""
    executions: dict[str, float] = {}
    instructions: dict[str, Instruction] = {}
    for instruction, times in _executed(program, program.entry_id if computation_id is None else computation_id, 1.0):
        executions[instruction.name] = executions.get(instruction.name, 0.0) + times
        instructions[instruction.name] = instruction
    return [Kernel(instruction, executions[name]) for name, instruction in instructions.items()]


def loop_notes(program: HloProgram) -> list[str]:
    """One note for each loop whose body `executed_kernels` counts once because its trip count is unknown."""
    loops = [k.instruction for k in executed_kernels(program) if k.instruction.opcode == "while"]
    unknown = [loop.name for loop in loops if trip_count(program, loop) is None]
    return sorted(f"loop {name}: trip count unknown, its body is counted once" for name in unknown)


def _executed(program: HloProgram, computation_id: int, times: float) -> Iterator[tuple[Instruction, float]]:
    for instruction in program.computations[computation_id]:
        if instruction.opcode in FREE_OPCODES:
            continue
        yield instruction, times
        if instruction.opcode == "while":
            trips = trip_count(program, instruction)
            # called computations of a while: the body, then the condition (xla/hlo/ir/hlo_instruction.cc).
            body, condition = instruction.called_ids[:2]
            yield from _executed(program, body, times * (1 if trips is None else trips))
            yield from _executed(program, condition, times * (1 if trips is None else trips + 1))
        elif instruction.opcode in CONTROL_OPCODES:
            # One branch of a conditional runs. Which one is not known in advance, so each gets an equal share.
            share = 1.0 / len(instruction.called_ids) if instruction.opcode == "conditional" else 1.0
            for called in instruction.called_ids:
                yield from _executed(program, called, times * share)


def trip_count(program: HloProgram, loop: Instruction) -> float | None:
    """How often a `while` body runs, from XLA's annotation, which TPU modules do not have, or else from the condition,
    in which scans compare a counter in the loop's tuple with a constant; None if neither tells. If the count depends on
    the loop around it (attention up to the diagonal runs from block 0 to i), the mean over that loop's turns."""
    known = loop.backend_config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known) if 0 <= int(known) < MAX_TRIPS else None
    span = _span(program, loop)
    if span is None:
        return None
    counter, start, limit, step, inclusive = span
    first, last = _constant(start), _constant(limit)
    if first is not None and last is not None:
        return len(range(0, max(0, last - first + inclusive), step))
    outer = next(iter(program.callers.get(loop.computation_id, ())), None)
    turns = _counter(program, outer) if outer is not None and outer.opcode == "while" else None
    if outer is None or turns is None:
        return None
    starts, limits = (_in_turns(program, found, outer.called_ids[0], *turns) for found in (start, limit))
    if starts is None or limits is None:
        return None
    counts = [len(range(0, max(0, to - at + inclusive), step)) for at, to in zip(starts, limits, strict=True)]
    return sum(counts) / len(counts)


MAX_TURNS = 4096
"""Most turns of a loop on which an inner loop's count depends: attention has a turn for each block of positions."""


def _span(
    program: HloProgram, loop: Instruction
) -> tuple[int, tuple[Instruction, Path], tuple[Instruction, Path], int, int] | None:
    """How a loop counts: the counter's element in its tuple, the origins of its first value and its limit, the step
    upwards, and 1 if the limit is included. A loop that counts down is reversed."""
    body_id, condition_id = loop.called_ids[0], loop.called_ids[1]
    compare = program.root(condition_id)
    if compare.opcode != "compare" or len(compare.operand_ids) != 2:
        return None
    left, right = (program.by_id[i] for i in compare.operand_ids)
    counter, path = origin(program, left)
    if counter.opcode != "parameter" or counter.computation_id != condition_id or len(path) != 1:
        return None
    step = _step(program, body_id, path[0])
    direction = compare.proto.comparison_direction
    if not step or direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    start, limit = origin(program, program.operands(loop)[0], path), origin(program, right)
    if direction in ("GT", "GE") or (direction == "NE" and step < 0):
        start, limit = limit, start
    return path[0], start, limit, abs(step), 1 if direction in ("LE", "GE") else 0


def _counter(program: HloProgram, loop: Instruction) -> tuple[int, list[int]] | None:
    """The counter's element in the tuple of a loop that counts up, and its value in each turn."""
    span, trips = _span(program, loop), trip_count(program, loop)
    step = None if span is None else _step(program, loop.called_ids[0], span[0])
    start = None if span is None else _constant(span[1])
    if span is None or step is None or step < 1 or start is None or not trips or trips != int(trips):
        return None
    return (span[0], [start + step * turn for turn in range(int(trips))]) if trips <= MAX_TURNS else None


ARITHMETIC = {"add": int.__add__, "subtract": int.__sub__, "multiply": int.__mul__, "minimum": min, "maximum": max}


def _in_turns(
    program: HloProgram, found: tuple[Instruction, Path], body_id: int, counter: int, values: list[int]
) -> list[int] | None:
    """The value in each turn of an integer that a loop's body computes from its counter."""
    instruction, path = found
    if (constant := _constant(found)) is not None:
        return [constant] * len(values)
    if instruction.opcode == "parameter" and instruction.computation_id == body_id and path == (counter,):
        return values
    if instruction.opcode not in ARITHMETIC or path:
        return None
    sides = [
        _in_turns(program, origin(program, one), body_id, counter, values) for one in program.operands(instruction)
    ]
    if len(sides) != 2 or sides[0] is None or sides[1] is None:
        return None
    return [ARITHMETIC[instruction.opcode](a, b) for a, b in zip(sides[0], sides[1], strict=True)]


def _constant(found: tuple[Instruction, Path]) -> int | None:
    values = constant_values(found)
    return values[0] if values is not None and len(values) == 1 else None


def _step(program: HloProgram, body_id: int, counter: int) -> int | None:
    """By how much the body advances tuple element `counter`; None if that is no constant."""
    root = program.root(body_id)
    if root.opcode != "tuple" or counter >= len(root.operand_ids):
        return None
    update, _ = origin(program, program.by_id[root.operand_ids[counter]])
    if update.opcode == "fusion":  # CPU and GPU wrap the scalar add in a separate fusion
        update = program.root(update.called_ids[0])
    if update.opcode not in ("add", "subtract"):
        return None
    sign = 1 if update.opcode == "add" else -1
    for operand in program.operands(update):
        value = _constant(origin(program, operand))
        if value is not None:
            return sign * value
    return None
