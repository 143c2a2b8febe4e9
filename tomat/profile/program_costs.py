"""Seconds of one execution of a compiled kernel, by the compiler's own estimate, else by a roofline.

The simplest of the cycle models: XLA:TPU writes ``estimated_cycles`` into the fusions it schedules; what has none is
given the larger of flops over peak and HBM bytes over bandwidth, at least one cycle. A kernel that neither knows (a
Pallas call without a cost estimate, a collective, whose time the interconnect decides) costs `None`: the caller says
what it takes, or reports it as unknown.
"""

from __future__ import annotations

from tomat.profile.breakdown import Roofs
from tomat.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.profile.hlo_costs import COLLECTIVES, base_opcode, kernel_flops, kernel_hbm_bytes


def compiler_seconds(program: HloProgram, instruction: Instruction, roofs: Roofs) -> float | None:
    """Seconds of one execution, None where neither the compiler nor the roofline knows (see the module)."""
    if instruction.opcode in CONTROL_OPCODES:
        return 0.0
    cycles = instruction.estimated_cycles
    if cycles is not None and roofs.clock_hz:
        return cycles / roofs.clock_hz
    if _communicates(program, instruction):
        return None
    seconds = roofline_seconds(program, instruction, roofs)
    # Nothing takes less: a scalar's bytes over the bandwidth are a third of a cycle, and a rate of 100 %.
    return max(seconds, 1 / roofs.clock_hz) if seconds and roofs.clock_hz else seconds


def _communicates(program: HloProgram, instruction: Instruction) -> bool:
    """Whether a kernel is, starts or holds a collective; the end of an asynchronous one has no work of its own."""
    if instruction.opcode.endswith(("-update", "-done")):
        return False
    return any(base_opcode(inner.opcode) in COLLECTIVES for inner in program.inner(instruction))


def roofline_seconds(program: HloProgram, instruction: Instruction, roofs: Roofs) -> float | None:
    """max(flops / peak, HBM bytes / bandwidth) of one execution; None for opaque kernels and unknown chips."""
    flops = kernel_flops(program, instruction)
    if flops is None or not roofs.flops_per_second or not roofs.hbm_bytes_per_second:
        return None
    moved = kernel_hbm_bytes(program, instruction)
    return max(flops / roofs.flops_per_second, moved / roofs.hbm_bytes_per_second)
