"""Kernels of libraries in a GPU's CUDA graphs, told by their order.

XLA launches most of a step as CUDA graphs, whose kernels name no instruction. Those that XLA wrote are called after
theirs; those of cuBLAS and cuDNN are not. But they run in the order of the program's schedule: where as many ran as it
has calls that are not named otherwise, the first is the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tomat.perf.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import library_flops
from tomat.perf.profile.hlo_kernels import trip_count
from tomat.perf.profile.trace_data import DeviceTrace, OpKind

CUBLAS, FORWARD, BACKWARD = "cublas", "forward", "backward"
"""What a kernel computes: a product, cuDNN's attention or its gradients."""
KERNELS = (
    (r"splitk|memset", ""),
    (r"(sdpa|fmha|flash).*fprop", FORWARD),
    (r"(sdpa|fmha|flash).*bprop|cudnn::fusion::(compute_dot_do_o|convert_dq)", BACKWARD),
    (r"nvjet|gemm|cutlass|xmma|cublas", CUBLAS),
)
"""Patterns of their names, of which the first that matches counts; "": what a call does beside its own kernel."""
MOST_CALLS = 10**6
"""Of a loop; a step has thousands. A damaged program may say more."""


def with_library_kernels(device: DeviceTrace, program: HloProgram) -> DeviceTrace:
    """The device, the kernels of libraries that ran in its program named by their instruction; as it is where their
    numbers differ, or where a loop does not tell how often it runs."""
    roles = np.array([_role_of_kernel(kind, program) for kind in device.kinds])
    named = {kind.name for kind in device.kinds if kind.name in program.by_name}
    try:
        calls = [call for call in _calls(program, program.entry_id) if call.name not in named]
    except _UnknownTrips:
        return device
    kinds, numbers = list(device.kinds), device.ops.kind.copy()
    known: dict[tuple[int, str], int] = {}
    start = device.ops.start_ps
    for role in (CUBLAS, FORWARD, BACKWARD):
        wanted = [call.name for call in calls if _role(program, call) == role]
        of_role = np.flatnonzero(roles == role)
        # cuBLAS has many kernels of which each call runs one, cuDNN few of which each call runs all.
        for group in [of_role] if role == CUBLAS else of_role[:, None]:
            chosen = np.isin(device.ops.kind, group)
            for run in device.modules:
                mine = np.flatnonzero(chosen & (start >= run.start_ps) & (start < run.end_ps))
                if run.program_id != program.program_id or len(mine) != len(wanted):
                    continue
                for at, name in zip(mine[np.argsort(start[mine], kind="stable")].tolist(), wanted, strict=True):
                    key = int(device.ops.kind[at]), name
                    if key not in known:
                        known[key] = len(kinds)
                        kinds.append(replace(kinds[key[0]], name=name))
                    numbers[at] = known[key]
    return replace(device, kinds=kinds, ops=replace(device.ops, kind=numbers))


class _UnknownTrips(Exception):
    """A loop that runs calls does not tell how often, or so often that it cannot be."""


def _role_of_kernel(kind: OpKind, program: HloProgram) -> str:
    if kind.name in program.by_name:
        return ""
    return next((role for pattern, role in KERNELS if re.search(pattern, kind.name.lower())), "")


def _role(program: HloProgram, instruction: Instruction) -> str:
    """Of an instruction that calls a library, or a fusion around one; else ""."""
    if instruction.opcode in CONTROL_OPCODES:
        return ""
    for inner in program.inner(instruction):
        if inner.opcode == "custom-call" and library_flops(program, inner) is not None:
            if "fmha" not in inner.custom_call_target:
                return CUBLAS
            return BACKWARD if "Backward" in inner.custom_call_target else FORWARD
    return ""


def _calls(program: HloProgram, computation_id: int) -> Iterator[Instruction]:
    """Instructions that call a library, in the order of the schedule, as often as they run."""
    sequences = program.module.schedule.sequences
    scheduled = sequences[computation_id].instruction_ids if computation_id in sequences else ()
    ordered = [program.by_id[one] for one in scheduled if one in program.by_id] or program.computations[computation_id]
    for instruction in ordered:
        if instruction.opcode in CONTROL_OPCODES:
            inside = [call for called in instruction.called_ids for call in _calls(program, called)]
            if not inside:
                continue
            trips = trip_count(program, instruction) if instruction.opcode == "while" else 1
            if trips is None or trips * len(inside) > MOST_CALLS or instruction.opcode == "conditional":
                raise _UnknownTrips
            yield from inside * trips
        elif _role(program, instruction):
            yield instruction
