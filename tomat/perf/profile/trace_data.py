"""The content of a trace, whatever its format: for each device, which operation ran when, in integer picoseconds on the
session's clock."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tomat.base.errors import TomatError
from tomat.perf.profile.hlo import HloProgram

LONGEST_TRACE_PS = 86_400 * 10**12
"""A day. Profiles last seconds, so an event that is longer, or further from the others, has a damaged time."""


def damaged(place: str, wrong: str) -> TomatError:
    """The error for a trace with damaged events. The other events would not be a true picture of the step."""
    return TomatError(
        f"{place} is damaged: {wrong}. Copy the file again from the host that wrote it, or take the profile again."
    )


@dataclass(frozen=True)
class OpKind:
    """What the trace itself states about an operation; `None` or "" where it states nothing."""

    name: str
    program_id: int
    program: str
    long_name: str = ""
    hlo_category: str = ""
    op_name: str = ""
    source: str = ""
    flops: float | None = None
    bytes_accessed: float | None = None


@dataclass(frozen=True)
class Events:
    """Events of one device as parallel arrays, in order of start within a line."""

    kind: np.ndarray
    """int32 [n]: index into `DeviceTrace.kinds`."""
    start_ps: np.ndarray
    """int64 [n]."""
    duration_ps: np.ndarray
    """int64 [n]."""
    line: np.ndarray
    """int32 [n]: events of one line nest, events of different lines run concurrently."""

    def __len__(self) -> int:
        return len(self.kind)

    @staticmethod
    def build(rows: Sequence[tuple[int, int, int, int]] | np.ndarray) -> "Events":
        """From (kind, start_ps, duration_ps, line), tuples or [n, 4]. Sorted by line and start, outer events first."""
        table = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
        order = np.lexsort((-table[:, 2], table[:, 1], table[:, 3]))
        kind, start, duration, line = (table[order, column] for column in range(4))
        return Events(kind.astype(np.int32), start, duration, line.astype(np.int32))


@dataclass(frozen=True)
class ModuleRun:
    """One execution of a program on a device."""

    program: str
    program_id: int
    start_ps: int
    end_ps: int


@dataclass(frozen=True)
class StepMark:
    number: int
    start_ps: int
    end_ps: int


@dataclass
class DeviceTrace:
    """One device (TPU core complex, GPU, or the CPU as a device) of one host."""

    host: str
    name: str
    device_kind: str
    """The trace's name of the chip, such as `TPU v6 Lite` (JAX: `TPU v6 lite`); "" if it has none."""
    kinds: list[OpKind]
    ops: Events
    async_ops: Events = field(default_factory=lambda: Events.build([]))
    """The `Async XLA Ops` line of a TPU: transfers in flight beside the operations."""
    modules: list[ModuleRun] = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)
    peak_flops_per_second: float | None = None
    """The peak that the trace states, or None; the bandwidth likewise."""
    peak_hbm_bytes_per_second: float | None = None


@dataclass
class HostTrace:
    origin: str
    host: str
    devices: list[DeviceTrace] = field(default_factory=list)
    span_names: list[str] = field(default_factory=list)
    spans: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """Activity of its threads: int64 [n, 3] of (index into `span_names`, start_ps, end_ps)."""
    host_steps: list[StepMark] = field(default_factory=list)
    programs: dict[int, HloProgram] = field(default_factory=dict)
    session_ns: tuple[int, int] | None = None
    """Start and stop of the profiling session, Unix nanoseconds."""
    warnings: list[str] = field(default_factory=list)


@dataclass
class Trace:
    origin: str
    hosts: list[HostTrace]
    notes: list[str] = field(default_factory=list)

    @property
    def devices(self) -> list[DeviceTrace]:
        return [device for host in self.hosts for device in host.devices]

    def program(self, program_id: int, name: str = "") -> HloProgram | None:
        """The HLO of a program by its id, or else by a name that only one program has; None if the trace has none."""
        for host in self.hosts:
            if program_id in host.programs:
                return host.programs[program_id]
        named = {p.program_id: p for host in self.hosts for p in host.programs.values() if name and p.name == name}
        return next(iter(named.values())) if len(named) == 1 else None


def program_name_and_id(text: str) -> tuple[str, int]:
    """`jit_step(28)` -> (`jit_step`, 28). Without an id it is 0."""
    match = re.fullmatch(r"(.*)\((\d{1,20})\)", text.strip(), re.ASCII | re.DOTALL)
    return (match.group(1), int(match.group(2))) if match else (text, 0)


def with_program_of_run(kinds: list[OpKind], ops: Events, modules: list[ModuleRun]) -> list[OpKind]:
    """The kinds. Those without a program get the program of the execution in which they first ran."""
    nameless = [index for index, kind in enumerate(kinds) if not kind.program]
    if not nameless or not modules or not len(ops):
        return kinds
    first = np.full(len(kinds), np.iinfo(np.int64).max)
    np.minimum.at(first, ops.kind, ops.start_ps)
    starts = np.array([m.start_ps for m in modules], dtype=np.int64)
    named = list(kinds)
    for index in nameless:
        run = int(np.searchsorted(starts, first[index], side="right")) - 1
        if run >= 0 and first[index] < modules[run].end_ps:
            program_id = kinds[index].program_id or modules[run].program_id
            named[index] = replace(kinds[index], program=modules[run].program, program_id=program_id)
    return named


EVALUATION = frozenset({"eval", "evaluate", "evaluation", "valid", "validate", "validation", "test"})
"""Words in the name of an evaluation program, which runs now and then between training steps."""
LEAST_SHARE = 0.1
"""A program may be the step if it takes at least this share of the time of the program that takes the most."""


def main_program(devices: list[DeviceTrace], program: str | None = None) -> str:
    """Name of the program whose executions are the steps; "" if the trace names none.

    Candidates take the most time, or at least a tenth of that, within the marks of steps (in the whole trace if the
    devices have no marks). Preferred, in this order, is a program whose name is not that of an evaluation
    (`EVALUATION`), that ran more than once, and that takes longest per run. `program` names it instead.
    """
    seconds = _seconds_by_program(devices, in_marks=True)
    if not any(seconds.values()):
        seconds = _seconds_by_program(devices, in_marks=False)
    named = {name: total for name, total in seconds.items() if name and total > 0} or seconds
    if not named:
        return ""
    enough = LEAST_SHARE * max(named.values())
    candidates = [name for name, total in named.items() if total >= enough]
    runs = Counter(run.program for device in devices for run in device.modules)

    def likely(name: str) -> tuple[bool, bool, float, str]:
        evaluates = bool(EVALUATION & set(name.lower().split("_")))
        return not evaluates, runs[name] > 1, named[name] / max(1, runs[name]), name

    if program is None:
        return max(candidates, key=likely)
    if program not in seconds:
        ran = ", ".join(sorted(named, key=lambda p: -named[p])[:8])
        raise TomatError(f"no program {program!r} ran; expected one of {ran}.")
    return program


def _seconds_by_program(devices: list[DeviceTrace], in_marks: bool) -> dict[str, float]:
    """Operation time of each program on all devices. With `in_marks`, only operations that begin in a step's mark."""
    found: dict[str, float] = {}
    for device in devices:
        ops = device.ops
        weights = ops.duration_ps.astype(np.float64) / 1e12
        if in_marks:
            marks = sorted(device.steps, key=lambda mark: mark.start_ps)
            ends = np.array([mark.end_ps for mark in marks] + [0], dtype=np.int64)
            place = np.searchsorted([mark.start_ps for mark in marks], ops.start_ps, side="right") - 1
            weights = np.where((place >= 0) & (ops.start_ps < ends[place]), weights, 0.0)
        totals = np.bincount(ops.kind, weights=weights, minlength=len(device.kinds))
        for kind, total in zip(device.kinds, totals, strict=True):
            found[kind.program] = found.get(kind.program, 0.0) + float(total)
    return found
