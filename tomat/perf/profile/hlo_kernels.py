"""Which instructions of a program run, and how often.

A *kernel* is an instruction that the machine executes as a unit: fusions are not opened, the bodies of ``while``,
``call`` and ``conditional`` are, times their trip counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tomat.perf.profile.hlo import CONTROL_OPCODES, FREE_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_values import Path, constant_values, origin

MAX_TRIPS = 2**40


@dataclass(frozen=True)
class Kernel:
    """An executed instruction and how often one run of the program executes it."""

    instruction: Instruction
    executions: float


def executed_kernels(program: HloProgram, computation_id: int | None = None) -> list[Kernel]:
    """Every executed instruction, once, with its executions per run of a computation; free opcodes left out.

    Args:
        program: The program.
        computation_id: The computation; default: the whole program.
    """
    executions: dict[str, float] = {}
    instructions: dict[str, Instruction] = {}
    for instruction, times in _executed(program, program.entry_id if computation_id is None else computation_id, 1.0):
        executions[instruction.name] = executions.get(instruction.name, 0.0) + times
        instructions[instruction.name] = instruction
    return [Kernel(instruction, executions[name]) for name, instruction in instructions.items()]


def loop_notes(program: HloProgram) -> list[str]:
    """The loops whose bodies `executed_kernels` counts once because nothing tells how often they run, one note each."""
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
            body, condition = instruction.called_ids[0], instruction.called_ids[1]
            yield from _executed(program, body, times * (1 if trips is None else trips))
            yield from _executed(program, condition, times * (1 if trips is None else trips + 1))
        elif instruction.opcode in CONTROL_OPCODES:
            # One branch of a conditional runs; which one is not known before it runs.
            share = 1.0 / len(instruction.called_ids) if instruction.opcode == "conditional" else 1.0
            for called in instruction.called_ids:
                yield from _executed(program, called, times * share)


def trip_count(program: HloProgram, loop: Instruction) -> int | None:
    """How often a `while` body runs: XLA's annotation, else read off the condition; None if neither tells.

    TPU modules carry no annotation. Their scans compare a counter in the loop's tuple with a constant.
    """
    known = loop.backend_config.get("known_trip_count", {}).get("n")
    if known is not None:
        return int(known) if 0 <= int(known) < MAX_TRIPS else None
    body_id, condition_id = loop.called_ids[0], loop.called_ids[1]
    compare = program.root(condition_id)
    if compare is None or compare.opcode != "compare" or len(compare.operand_ids) != 2:
        return None
    left, right = (program.by_id[i] for i in compare.operand_ids)
    counter, path = origin(program, left)
    if counter.opcode != "parameter" or counter.computation_id != condition_id or len(path) != 1:
        return None
    limit = _constant(origin(program, right))
    start = _constant(origin(program, program.operands(loop)[0], path))
    step = _step(program, body_id, path[0])
    direction = compare.proto.comparison_direction
    if limit is None or start is None or not step or direction not in ("LT", "LE", "GT", "GE", "NE"):
        return None
    span = limit - start if direction in ("LT", "LE", "NE") else start - limit
    inclusive = 1 if direction in ("LE", "GE") else 0
    return max(0, -(-(span + inclusive) // abs(step)))


def _constant(found: tuple[Instruction, Path]) -> int | None:
    values = constant_values(found)
    return values[0] if values is not None and len(values) == 1 else None


def _step(program: HloProgram, body_id: int, counter: int) -> int | None:
    """By how much the body advances tuple element `counter`; None where that is no constant."""
    root = program.root(body_id)
    if root is None or root.opcode != "tuple" or counter >= len(root.operand_ids):
        return None
    update: Instruction | None
    update, _ = origin(program, program.by_id[root.operand_ids[counter]])
    if update.opcode == "fusion":  # CPU and GPU wrap the scalar add in a fusion of its own
        update = program.root(update.called_ids[0])
    if update is None or update.opcode not in ("add", "subtract"):
        return None
    sign = 1 if update.opcode == "add" else -1
    for operand in program.operands(update):
        value = _constant(origin(program, operand))
        if value is not None:
            return sign * value
    return None
