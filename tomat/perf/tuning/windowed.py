"""Windowed einsums: matmuls that XLA's partitioner cut into a loop because an operand is split over the mesh.

With parameters split over `embed` each projection becomes a loop over the chips: a step multiplies the part of the
weights that is at hand, passes it on, and adds to the whole result. The loops can be told by the names of their bodies
(`windowed_dot_general_body_ag`, `..._rs`: xla/service/spmd/dot_handler.cc).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_costs import instruction_flops
from tomat.perf.profile.hlo_kernels import executed_kernels

LOOP_NAME = re.compile(r"windowed_dot_general_(body|cond)")
MATMULS = frozenset({"dot", "convolution"})
"""The TPU compiler writes matmuls as convolutions."""


@dataclass(frozen=True)
class WindowedEinsums:
    """The windowed einsums of one step of one device."""

    n_loops: int
    """Loops in the program, each of which runs once a layer."""
    steps: float
    """Executions of all loop bodies together."""
    seconds: float
    """All that runs in the loops, the sum of their operations' time."""
    share: float
    """`seconds` of the step."""
    narrowest_contraction: int
    """Least length of the sum in one of their matmuls, the length of the cut: 128 in the reference's 200M and 1B, whose
    whole matmuls sum over 1,024 and 2,048. (Those of weight gradients sum over the batch, which is long.)"""


def windowed_einsums(
    program: HloProgram, operation_seconds: Mapping[str, float], step_seconds: float
) -> WindowedEinsums | None:
    """The windowed einsums of a compiled step; None if there are none.

    Args:
        program: The optimised module.
        operation_seconds: Time in the step of each operation, by its name in the module.
        step_seconds: Of the step.
    """
    seconds = 0.0
    contractions: list[int] = []
    executions: dict[int, float] = {}
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        found = LOOP_NAME.search(program.computation_names.get(instruction.computation_id, ""))
        if found is None:
            continue
        seconds += operation_seconds.get(instruction.name, 0.0)
        if found.group(1) != "body":
            continue
        executions[instruction.computation_id] = kernel.executions
        for inner in program.inner(instruction):
            if inner.opcode in MATMULS and inner.shape.elements:
                # A matmul's flops are two for each element of its result and of the sum behind it.
                contractions.append(round(instruction_flops(program, inner) / (2 * inner.shape.elements)))
    if not contractions:
        return None
    share = seconds / step_seconds if step_seconds else 0.0
    return WindowedEinsums(len(executions), sum(executions.values()), seconds, share, min(contractions))
