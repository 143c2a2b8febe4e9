"""Where the value of an HLO instruction comes from: through copies, tuples, and loops that hand it on unchanged.

XLA carries constants through its loops: the mask of an attention kernel in a scan inside the loop over microbatches is
element n of the inner loop's tuple, which is element m of the outer one's, which is a constant before both.
"""

from __future__ import annotations

import array

from tomat.perf.profile.hlo import HloProgram, Instruction

Path = tuple[int, ...]
"""Which element of a tuple, of which element, and so on; empty for an array."""

HANDING_ON = frozenset(
    {"copy", "copy-start", "copy-done", "bitcast", "reshape", "convert", "opt-barrier", "optimization-barrier"}
)
"""Opcodes whose value, read in order, is that of their first operand."""


def origin(
    program: HloProgram, instruction: Instruction, path: Path = (), open_loops: frozenset[int] = frozenset()
) -> tuple[Instruction, Path]:
    """The instruction that makes a value, and which element of its tuple that is.

    An element of a loop's tuple comes from before the loop where the body returns it as it got it, itself through any
    number of inner loops. What a loop changes ends at the loop's parameter, or at the loop itself.

    Args:
        program: The program.
        instruction: Where the value is read.
        path: Element of the instruction's tuple; empty for an array.
        open_loops: Loops (instruction ids) whose bodies are being looked at: their parameters are where it ends.
    """
    while True:
        operands = program.operands(instruction)
        opcode = instruction.opcode
        if opcode in HANDING_ON and operands:
            # `copy-start` returns (destination, source, context) of what `copy-done` then hands on.
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
            caller = _caller(program, instruction.computation_id)
            if caller is None or caller.proto.id in open_loops:
                return instruction, path
            given = program.operands(caller)
            if caller.opcode == "while":
                if not _handed_on(program, caller, path, open_loops):
                    return instruction, path
                instruction = given[0]
            else:
                # of a conditional, operand 0 chooses and each branch has one of the others
                number = int(instruction.proto.parameter_number)
                if caller.opcode == "conditional":
                    number = 1 + caller.called_ids.index(instruction.computation_id)
                if number >= len(given):
                    return instruction, path
                instruction = given[number]
        else:
            return instruction, path


def constant_values(found: tuple[Instruction, Path]) -> list[int] | None:
    """The integers of what `origin` found; None where it is no constant of integers."""
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
    """Whether a loop's body returns an element of its tuple as it got it."""
    root = program.root(loop.called_ids[0])
    if not path or root is None:
        return False
    found, element = origin(program, root, path, open_loops | {loop.proto.id})
    return found.opcode == "parameter" and found.computation_id == loop.called_ids[0] and element == path


def _caller(program: HloProgram, computation_id: int) -> Instruction | None:
    """The one loop, call, fusion or branch that runs a computation; None where there is none, or more than one."""
    callers = program.callers.get(computation_id, [])
    return callers[0] if len(callers) == 1 else None
