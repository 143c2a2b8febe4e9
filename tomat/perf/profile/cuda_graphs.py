"""Matches library kernels in a GPU's CUDA graphs with instructions, by their order.

XLA launches most of a step as CUDA graphs, whose kernels do not state their instruction. Kernels that XLA wrote are
named after it; those of cuBLAS and cuDNN are not. But they run in the order of the program's schedule. If as many ran
as the program has calls that are not otherwise matched, they are matched one by one, in order.
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
"""Roles of a kernel: a product, cuDNN's attention, or the gradients of that."""
KERNELS = (
    (r"splitk|memset", ""),
    (r"(sdpa|fmha|flash).*fprop", FORWARD),
    (r"(sdpa|fmha|flash).*bprop|cudnn::fusion::(compute_dot_do_o|convert_dq)", BACKWARD),
    (r"nvjet|gemm|cutlass|xmma|cublas", CUBLAS),
)
"""Patterns of kernel names and their role; the first match counts. "": work that a call does beside its main kernel."""


def with_library_kernels(device: DeviceTrace, program: HloProgram) -> DeviceTrace:
    """The device, with the library kernels of `program` named after their instructions. Kernels keep their names if
    their number differs from the calls, or if neither program nor trace tells how often a loop ran."""
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
            # cuBLAS has many kernels, and each call runs one of them. cuDNN has few, and each call runs all of them.
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
    """It is unknown how often a loop with library calls ran, or the stated number is impossible."""


@dataclass
class _Run:
    """One run of a program. `ran` holds its kernels in order; `of_library` marks those of libraries."""

    program: HloProgram
    role_of: dict[str, str]
    """The role of each instruction that the trace does not name; "" if it calls no library."""
    ran: list[str]
    of_library: np.ndarray
    trips: dict[str, Iterator[int]] = field(default_factory=dict)  # by loop: the trips of its next executions

    def calls(self) -> list[str]:
        """The instructions that call a library, in the order of the schedule, repeated as often as they ran."""
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
                # A mean over the turns of an outer loop is not the count of one execution.
                for _ in range(trips if isinstance(trips, int) else self._traced_trips(instruction)):
                    for called in instruction.called_ids:
                        yield from self._calls(called)

    def _calls_inside(self, control: Instruction) -> bool:
        if control.opcode not in CONTROL_OPCODES:
            return False
        inside = [one for called in control.called_ids for one in self.program.computations[called]]
        return any(self.role_of.get(one.name) or self._calls_inside(one) for one in inside)

    def _traced_trips(self, loop: Instruction) -> int:
        """Trips of the loop's next execution. The host reads the condition before each trip and after the last, with a
        copy that the trace names after the loop. Between two copies lies a trip, or the end of one execution and the
        beginning of the next. All trips run the same kernels, and as many of libraries as the body has calls."""
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
    """The role of an instruction that calls a library, or of a fusion around such a call; else ""."""
    if instruction.opcode in CONTROL_OPCODES:
        return ""
    for inner in program.inner(instruction):
        if inner.opcode == "custom-call" and library_flops(program, inner) is not None:
            if "fmha" not in inner.custom_call_target:
                return CUBLAS
            return BACKWARD if "Backward" in inner.custom_call_target else FORWARD
    return ""
