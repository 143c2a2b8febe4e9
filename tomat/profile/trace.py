"""A profile of real steps, as read from any trace format: per device, which operation ran when.

``load_trace`` takes a JAX profile directory (local or ``gs://``; the hosts of one session are merged), one
``*.xplane.pb``, or a Chrome/Perfetto JSON trace. Times are integer picoseconds on the session's clock.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.places import local_target
from tomat.profile.hlo import HloProgram

SESSION_GLOB = "plugins/profile/*"
XPLANE_SUFFIX = ".xplane.pb"
CHROME_SUFFIXES = (".trace.json.gz", ".trace.json", ".json.gz", ".json")
LONGEST_TRACE_PS = 86_400 * 10**12
"""A day. Profilers keep seconds; an event further than this from the others, or longer, has a damaged time."""
MAX_LEFT_OUT = 10
MAX_LEFT_OUT_SHARE = 0.01
"""Damaged events of a file or of one device that are left out, above which (both) the file is refused as damaged or
foreign."""
# What is wrong with an event that is left out, for the note that says so.
UNKNOWN_METADATA = "name metadata that the file does not hold"
NEGATIVE_DURATION = "have a negative duration"
NO_DURATION = "have no duration"
NO_TIME = "have no time that is a number"
FAR_AWAY = "lie or last more than a day from the others"
MALFORMED = "are not formed as events"


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
    def build(rows: list[tuple[int, int, int, int]]) -> Events:
        """From (kind, start_ps, duration_ps, line) tuples."""
        return Events.of_table(np.array(rows, dtype=np.int64).reshape(-1, 4))

    @staticmethod
    def of_table(table: np.ndarray) -> Events:
        """From int64 [n, 4] of (kind, start_ps, duration_ps, line): sorted by line and start, outer events first."""
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
    """A step as the trace marks it."""

    number: int
    start_ps: int
    end_ps: int


@dataclass
class DeviceTrace:
    """One device (TPU core complex, GPU, or the CPU as a device) of one host."""

    host: str
    name: str
    platform: str
    """`tpu`, `gpu` or `cpu`."""
    device_kind: str
    """JAX's name of the chip, e.g. `TPU v6 lite`; "" where the trace does not hold it."""
    kinds: list[OpKind]
    ops: Events
    async_ops: Events
    """The `Async XLA Ops` line of a TPU: transfers in flight beside the operations."""
    modules: list[ModuleRun]
    steps: list[StepMark]


@dataclass
class HostActivity:
    """What a host's threads were doing: named spans, for telling why a device waited."""

    names: list[str] = field(default_factory=list)
    name: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    start_ps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    end_ps: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class HostTrace:
    """One host's file."""

    origin: str
    host: str
    devices: list[DeviceTrace]
    activity: HostActivity
    host_steps: list[StepMark]
    programs: dict[int, HloProgram]
    session_ns: tuple[int, int] | None
    """Start and stop of the profiling session, Unix nanoseconds."""
    versions: dict[str, str]
    event_count: int
    warnings: list[str] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)
    """Events that are damaged and in none of the above: what is wrong with them, and how many."""

    def leave_out(self, wrong: str, count: int = 1) -> None:
        """Count events that cannot be used."""
        if count:
            self.left_out[wrong] = self.left_out.get(wrong, 0) + count


@dataclass
class Trace:
    """The merged hosts of one session."""

    origin: str
    hosts: list[HostTrace]
    notes: list[str] = field(default_factory=list)

    @property
    def devices(self) -> list[DeviceTrace]:
        return [device for host in self.hosts for device in host.devices]

    @property
    def event_count(self) -> int:
        return sum(host.event_count for host in self.hosts)

    @property
    def left_out_count(self) -> int:
        """Damaged events that no figure counts."""
        return sum(sum(host.left_out.values()) for host in self.hosts)

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


def clock_origin(times: Iterable[tuple[int, int]], one_day: int) -> int:
    """The time to count from: 0 where a trace counts from its own start, else the middle one of `times`.

    Args:
        times: (time, events that have it), in the writer's unit; some writers count from 1970, whose picoseconds are
            more than 64 bits hold.
        one_day: in that unit.
    """
    ordered = sorted((time, weight) for time, weight in times if weight > 0)
    half = sum(weight for _, weight in ordered) / 2
    for time, weight in ordered:
        half -= weight
        if half <= 0:
            return time if abs(time) > one_day else 0
    return 0


def left_out_note(left_out: Mapping[str, int], event_count: int) -> str:
    """Which events are in no figure, and why."""
    total = sum(left_out.values())
    return f"{total:,} of {event_count:,} events are damaged and left out: " + ", ".join(
        f"{count:,} {wrong}" for wrong, count in sorted(left_out.items())
    )


def refuse_damaged(place: str, left_out: Mapping[str, int], event_count: int) -> None:
    """Stop where so many events are damaged that what is left is no picture of the step.

    Args:
        place: A file, or a device in it. A device is judged alone too: a host has a hundred times its events.
        left_out: What is wrong with its damaged events, and how many.
        event_count: All its events.

    Raises:
        TomatError: above `MAX_LEFT_OUT` events and `MAX_LEFT_OUT_SHARE` of all.
    """
    total = sum(left_out.values())
    if total > MAX_LEFT_OUT and total > MAX_LEFT_OUT_SHARE * event_count:
        other_schema = " It may come from a profiler with another schema than that of jax 0.11.1."
        raise TomatError(
            f"{place}: {left_out_note(left_out, event_count)}. At most {MAX_LEFT_OUT_SHARE:.0%} may be; copy the file "
            "again from the host that wrote it, or take the profile again."
            f"{other_schema if UNKNOWN_METADATA in left_out else ''}"
        )


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


def load_trace(origin: str | Path, *, session: str | None = None) -> Trace:
    """The trace at `origin`: a profile directory (local path or fsspec URL such as `gs://...`), or one file.

    Args:
        origin: the run's profiler directory, a session directory, a `*.xplane.pb` or a Chrome/Perfetto JSON file.
        session: name of the session (`<date>` under `plugins/profile/`); default: the newest.

    Raises:
        TomatError: nothing readable there, or the files are not hosts of one run.
    """
    location = str(origin)
    if "://" in location:
        return _load_remote(location, session)
    path = Path(location)
    if not path.exists():
        raise TomatError(f"{location}: no such file or directory. Give a JAX profile directory or a trace file.")
    if path.is_file():
        return merge_hosts(location, [_read_file(path)])
    notes: list[str] = []
    files = _session_files(path, session, notes)
    return merge_hosts(location, [_read_file(f) for f in files], notes)


def _session_files(directory: Path, session: str | None, notes: list[str]) -> list[Path]:
    """The trace files of one session beneath a directory, xplane files before JSON ones."""
    for suffixes in ((XPLANE_SUFFIX,), CHROME_SUFFIXES[:2]):
        found = sorted(f for f in directory.rglob("*") if f.name.endswith(suffixes) and f.is_file())
        sessions: dict[str, list[Path]] = {}
        for file in found:
            sessions.setdefault(str(file.parent), []).append(file)
        if not sessions:
            continue
        if session is not None:
            chosen = [s for s in sessions if Path(s).name == session]
            if not chosen:
                names = ", ".join(sorted(Path(s).name for s in sessions))
                raise TomatError(f"{directory}: no session {session!r}. Sessions there: {names}.")
        else:
            chosen = [sorted(sessions, key=lambda s: (natural_order(Path(s).name), natural_order(s)))[-1]]
            if len(sessions) > 1:
                notes.append(f"{len(sessions)} sessions found, the newest by its name ({Path(chosen[0]).name}) is read")
        return sessions[chosen[0]]
    raise TomatError(
        f"{directory}: no *{XPLANE_SUFFIX} file beneath it. A JAX profile directory has "
        f"{SESSION_GLOB}/<host>{XPLANE_SUFFIX}; was the profiler on, and did the run reach its start step?"
    )


def natural_order(name: str) -> tuple[tuple[str, int, str], ...]:
    """A sort key in which numbers count as such: `run_9` before `run_10`."""
    pairs = re.findall(r"(\D*)(\d*)", name, re.ASCII)
    return tuple((text, len(digits.lstrip("0")), digits.lstrip("0")) for text, digits in pairs)


def _load_remote(url: str, session: str | None) -> Trace:
    """Copy the session's files out of object storage into a temporary directory and read them there."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    with tempfile.TemporaryDirectory(prefix="tomat-trace-") as scratch:
        try:
            if filesystem.isfile(root):
                files = [root]
            else:
                files = [f for f in filesystem.find(root) if f.endswith((XPLANE_SUFFIX, *CHROME_SUFFIXES[:2]))]
        except (OSError, ValueError) as error:
            raise TomatError(f"{url}: cannot be listed ({error}). Check the address and the credentials.") from None
        if any(f.endswith(XPLANE_SUFFIX) for f in files):
            files = [f for f in files if f.endswith(XPLANE_SUFFIX)]
        below = root.rstrip("/")
        names = [file.removeprefix(below).lstrip("/") or file.rsplit("/", 1)[-1] for file in files]
        remedy = "Rename the object, or give the address of the one session to read."
        targets = [local_target(Path(scratch), name, url, remedy) for name in names]
        for file, target in zip(files, targets, strict=True):
            target.parent.mkdir(parents=True, exist_ok=True)
            filesystem.get_file(file, str(target))
        if not files:
            raise TomatError(f"{url}: no *{XPLANE_SUFFIX} file beneath it. Was the profiler on?")
        notes: list[str] = []
        chosen = _session_files(Path(scratch), session, notes)
        return merge_hosts(url, [_read_file(f) for f in chosen], notes)


def _read_file(path: Path) -> HostTrace:
    from tomat.profile.chrome import read_chrome_file
    from tomat.profile.hlo_files import is_hlo_path, load_program
    from tomat.profile.xplane import read_xplane_file

    if path.name.endswith(XPLANE_SUFFIX):
        return read_xplane_file(path)
    if path.name.endswith(CHROME_SUFFIXES):
        return read_chrome_file(path)
    if is_hlo_path(path.name):
        program = load_program(path)
        raise TomatError(f"{path}: an HLO module ({program.name}), not a trace of a run.")
    raise TomatError(
        f"{path}: not a trace by its name. Expected *{XPLANE_SUFFIX} or one of {', '.join(CHROME_SUFFIXES)}."
    )


def merge_hosts(origin: str, hosts: list[HostTrace], notes: list[str] | None = None) -> Trace:
    """The hosts of one session as one trace.

    Raises:
        TomatError: no host has device events, or the files come from different runs.
    """
    trace = Trace(origin, hosts, list(notes or []))
    if not trace.devices:
        planes = "; ".join(f"{h.origin}: {h.event_count:,} events" for h in hosts)
        raise TomatError(
            f"{origin}: no device timeline ({planes}). Expected a /device:TPU:N or /device:GPU:N plane, or CPU events "
            "with an hlo_op stat. Profile a step that runs on the accelerator, with the device tracer on."
        )
    for host in hosts:
        trace.notes += [f"{host.host}: {w}" for w in host.warnings]
        if host.left_out:
            trace.notes.append(f"{host.host}: {left_out_note(host.left_out, host.event_count)}")
        if not host.devices:
            trace.notes.append(f"{host.host}: host without a device plane, it contributes no operations")
    _refuse_mixed_runs(trace)
    return trace


def _refuse_mixed_runs(trace: Trace) -> None:
    if len(trace.hosts) < 2:
        return
    first = trace.hosts[0]
    for host in trace.hosts[1:]:
        reason = ""
        if host.host == first.host and {d.name for d in host.devices} & {d.name for d in first.devices}:
            reason = f"both claim host {host.host!r} and the same devices"
        if first.session_ns and host.session_ns:
            apart = max(first.session_ns[0], host.session_ns[0]) - min(first.session_ns[1], host.session_ns[1])
            if apart > 0:
                reason = f"their profiling sessions lie {apart / 1e9:,.1f} s apart"
        mine, theirs = main_program(first.devices), main_program(host.devices)
        if mine and theirs and mine[0] != theirs[0]:
            reason = f"they run different programs, {mine[0]} and {theirs[0]}"
        elif mine and theirs and len(mine[1] ^ theirs[1]) > 0.5 * len(mine[1] | theirs[1]):
            reason = f"their programs named {mine[0]} share fewer than half of their operations"
        if first.devices and host.devices and first.devices[0].device_kind != host.devices[0].device_kind:
            reason = f"their devices differ, {first.devices[0].device_kind!r} and {host.devices[0].device_kind!r}"
        if reason:
            raise TomatError(
                f"{trace.origin}: {first.origin} and {host.origin} are not hosts of one run: {reason}. "
                "Give a directory that holds the hosts of one session only."
            )


def main_program(devices: list[DeviceTrace]) -> tuple[str, set[str]] | None:
    """Name of the program with the most operation time on the first device that ran any, and its operations."""
    for device in devices:
        if not len(device.ops):
            continue
        totals = np.bincount(device.ops.kind, weights=device.ops.duration_ps, minlength=len(device.kinds))
        by_program: dict[str, float] = {}
        for kind, total in zip(device.kinds, totals, strict=True):
            by_program[kind.program] = by_program.get(kind.program, 0.0) + float(total)
        name = max(by_program, key=lambda p: (by_program[p], p))
        return name, {k.name for k in device.kinds if k.program == name}
    return None
