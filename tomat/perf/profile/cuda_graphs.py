"""Kernels of libraries in a GPU's CUDA graphs, told by their order.

XLA launches most of a step as CUDA graphs, whose kernels name no instruction. Those that XLA wrote are called after
theirs; those of cuBLAS and cuDNN are not. But they run in the order of the program's schedule: where as many ran as it
has calls that are not named otherwise, the first is the first.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import compress, islice, pairwise

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


def with_library_kernels(device: DeviceTrace, program: HloProgram) -> DeviceTrace:
    """The device, the kernels of libraries that ran in its program named by their instruction; as it is where their
    numbers differ, or where neither program nor trace tells how often a loop ran."""
    roles = np.array([_role_of_kernel(kind, program) for kind in device.kinds])
    named = {kind.name for kind in device.kinds if kind.name in program.by_name}
    role_of = {one.name: _role(program, one) for one in program.by_id.values() if one.name not in named}
    kinds, numbers = list(device.kinds), device.ops.kind.copy()
    known: dict[tuple[int, str], int] = {}
    start = device.ops.start_ps
    for run in device.modules:
        if run.program_id != program.program_id:
            continue
        inside = np.flatnonzero((start >= run.start_ps) & (start < run.end_ps))
        inside = inside[np.argsort(start[inside], kind="stable")]
        ran = device.ops.kind[inside]
        try:
            calls = _Run(program, role_of, [kinds[one].name for one in ran], roles[ran] != "").calls()
        except _UnknownTrips:
            continue
        for role in (CUBLAS, FORWARD, BACKWARD):
            wanted = [name for name in calls if role_of[name] == role]
            of_role = np.flatnonzero(roles == role)
            # cuBLAS has many kernels of which each call runs one, cuDNN few of which each call runs all.
            for group in [of_role] if role == CUBLAS else of_role[:, None]:
                mine = inside[np.isin(ran, group)]
                if len(mine) != len(wanted):
                    continue
                for at, name in zip(mine.tolist(), wanted, strict=True):
                    key = int(device.ops.kind[at]), name
                    if key not in known:
                        known[key] = len(kinds)
                        kinds.append(replace(kinds[key[0]], name=name))
                    numbers[at] = known[key]
    return replace(device, kinds=kinds, ops=replace(device.ops, kind=numbers))


class _UnknownTrips(Exception):
    """Nothing tells how often a loop that runs calls ran, or what tells it cannot be."""


@dataclass
class _Run:
    """One run of a program, whose kernels `ran` in that order; `of_library` are those of libraries."""

    program: HloProgram
    role_of: dict[str, str]
    """Of instructions that the trace does not name; "" where one calls no library."""
    ran: list[str]
    of_library: np.ndarray
    trips: dict[str, Iterator[int]] = field(default_factory=dict)  # by loop, of its next executions

    def calls(self) -> list[str]:
        """Instructions that call a library, in the order of the schedule, as often as they ran."""
        found = list(islice(self._calls(self.program.entry_id), len(self.ran) + 1))  # a damaged program may say 10^12
        if len(found) > len(self.ran) or any(next(left, None) is not None for left in self.trips.values()):
            raise _UnknownTrips
        return found

    def _calls(self, computation_id: int) -> Iterator[str]:
        program = self.program
        for instruction in program.scheduled(computation_id):
            if self.role_of.get(instruction.name):
                yield instruction.name
            elif self._calls_inside(instruction):
                if instruction.opcode == "conditional":
                    raise _UnknownTrips
                trips = trip_count(program, instruction) if instruction.opcode == "while" else 1
                # A mean over the turns of a loop around it is no count of one.
                for _ in range(trips if isinstance(trips, int) else self._traced_trips(instruction)):
                    for called in instruction.called_ids:
                        yield from self._calls(called)

    def _calls_inside(self, control: Instruction) -> bool:
        if control.opcode not in CONTROL_OPCODES:
            return False
        inside = [one for called in control.called_ids for one in self.program.computations[called]]
        return any(self.role_of.get(one.name) or self._calls_inside(one) for one in inside)

    def _traced_trips(self, loop: Instruction) -> int:
        """Trips of the loop's next execution. The host reads its condition before each and after the last, by a copy
        that the trace calls after the loop. What ran between two of them is a trip, or the end of one execution and the
        beginning of the next: trips run the same kernels, of libraries as many as the body calls."""
        if loop.name not in self.trips:
            calls = (call for called in loop.called_ids for call in self._calls(called))
            body = sum(1 for _ in islice(calls, len(self.ran) + 1))
            read = [at for at, name in enumerate(self.ran) if name == loop.name]
            between = [slice(*two) for two in pairwise(read)]
            kernels = [self.program.by_name.keys() & self.ran[part] for part in between]
            fits = [np.count_nonzero(self.of_library[part]) == body for part in between]
            of_trip = min(compress(kernels, fits), key=len, default=None)
            ends = [at for at, fit in enumerate(fits) if not fit or kernels[at] != of_trip]
            found = [after - at - 1 for at, after in pairwise([-1, *ends, len(fits)])]
            self.trips[loop.name] = iter(found if read else ())
        if (trips := next(self.trips[loop.name], None)) is None:
            raise _UnknownTrips
        return trips


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
