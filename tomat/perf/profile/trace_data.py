"""What a trace holds, whatever format it was read from: per device, which operation ran when, in integer picoseconds on
the session's clock."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tomat.base.errors import TomatError
from tomat.perf.profile.hlo import HloProgram

LONGEST_TRACE_PS = 86_400 * 10**12
"""A day. Profilers keep seconds; an event further than this from the others, or longer, has a damaged time."""


def damaged(place: str, wrong: str) -> TomatError:
    """The refusal of a trace with damaged events: what is left would be no picture of the step."""
    return TomatError(
        f"{place} is damaged: {wrong}. Copy the file again from the host that wrote it, or take the profile again."
    )


@dataclass(frozen=True)
class OpKind:
    """What the trace itself says about an operation; `None` or "" where it does not."""

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
        """From (kind, start_ps, duration_ps, line) tuples or [n, 4]: sorted by line and start, outer events first."""
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
    """What the trace calls the chip, such as `TPU v6 Lite` (JAX: `TPU v6 lite`); "" where it does not."""
    kinds: list[OpKind]
    ops: Events
    async_ops: Events = field(default_factory=lambda: Events.build([]))
    """The `Async XLA Ops` line of a TPU: transfers in flight beside the operations."""
    modules: list[ModuleRun] = field(default_factory=list)
    steps: list[StepMark] = field(default_factory=list)
    peak_flops_per_second: float | None = None
    """As the trace states it, None where it does not; the bandwidth too."""
    peak_hbm_bytes_per_second: float | None = None


@dataclass
class HostTrace:
    origin: str
    host: str
    devices: list[DeviceTrace] = field(default_factory=list)
    span_names: list[str] = field(default_factory=list)
    spans: np.ndarray = field(default_factory=lambda: np.empty((0, 3), np.int64))
    """What its threads were doing: int64 [n, 3] of (index into `span_names`, start_ps, end_ps)."""
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
        """The HLO of a program by its id, else by a name that only one program has; None where the trace has none."""
        for host in self.hosts:
            if program_id in host.programs:
                return host.programs[program_id]
        named = {p.program_id: p for host in self.hosts for p in host.programs.values() if name and p.name == name}
        return next(iter(named.values())) if len(named) == 1 else None


def program_name_and_id(text: str) -> tuple[str, int]:
    """`jit_step(28)` -> (`jit_step`, 28); the id is 0 where there is none."""
    match = re.fullmatch(r"(.*)\((\d{1,20})\)", text.strip(), re.ASCII | re.DOTALL)
    return (match.group(1), int(match.group(2))) if match else (text, 0)


def with_program_of_run(kinds: list[OpKind], ops: Events, modules: list[ModuleRun]) -> list[OpKind]:
    """The kinds, those that name no program given that of the execution in which they first ran."""
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
"""Words in the name of a program that runs now and then among a training's steps."""
LEAST_SHARE = 0.1
"""Of the time of the program with the most, what another one takes that may be the step."""


def main_program(devices: list[DeviceTrace], program: str | None = None) -> str:
    """Name of the program whose executions are the steps; "" where the trace names none.

    Of the programs that take the most time, or a tenth of it at the least, in the marks of steps (in all of the trace
    where the devices have none), it is the one whose name does not say that it evaluates (`EVALUATION`), that ran more
    than once, and that takes longest each time.
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
    """Operation time of each program on all devices; with `in_marks`, of what begins in marks of steps."""
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
