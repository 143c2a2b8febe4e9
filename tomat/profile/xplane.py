"""Reads one host's ``*.xplane.pb``: devices, operations, steps, programs, host activity.

Planes and lines as JAX and xprof write them: ``/device:TPU:N`` with lines ``XLA Ops``, ``Async XLA Ops``,
``XLA Modules`` and ``Steps``; ``/device:GPU:N`` with one line a CUDA stream; on a CPU the operations are events of the
threads in ``/host:CPU`` that carry an ``hlo_op`` stat; ``/host:metadata`` holds the HLO modules.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.profile.damage import (
    FAR_AWAY,
    LONGEST_TRACE_PS,
    NEGATIVE_DURATION,
    NO_TIME,
    UNKNOWN_METADATA,
    clock_origin,
    refuse_damaged,
)
from tomat.profile.hlo_files import XPLANE_SUFFIX, program_from_bytes
from tomat.profile.protos import new_message
from tomat.profile.trace_data import (
    DeviceTrace,
    Events,
    HostActivity,
    HostTrace,
    ModuleRun,
    OpKind,
    StepMark,
    program_name_and_id,
    with_program_of_run,
)

SPARSE_CORE_PLANE = re.compile(r"^/device:TPU:\d+ SparseCore")
DEVICE_PLANE = re.compile(r"^/device:(TPU|GPU):\d+$")
OPS_LINE, ASYNC_LINE, MODULES_LINE, STEPS_LINE = "XLA Ops", "Async XLA Ops", "XLA Modules", "Steps"
MAX_STEP_DIGITS = 18
"""A step's number with more is none: it may be more than 64 bits hold."""


class _Plane:
    """Accessors over one XPlane message."""

    def __init__(self, proto: Any, origin_ns: int) -> None:
        """`origin_ns` is the `timestamp_ns` of lines that counts as time 0."""
        self.proto, self.origin_ns = proto, origin_ns
        self.stat_names: dict[int, str] = {key: value.name for key, value in proto.stat_metadata.items()}

    def value(self, stat: Any) -> Any:
        kind = stat.WhichOneof("value")
        if kind is None:
            return None
        value = getattr(stat, kind)
        return self.stat_names.get(value, "") if kind == "ref_value" else value

    def stats(self, stats: Iterable[Any]) -> dict[str, Any]:
        return {self.stat_names.get(s.metadata_id, ""): self.value(s) for s in stats}

    def base_ps(self, line: Any) -> int:
        """Where the offsets of a line's events count from; more than 64 bits where its time is damaged."""
        return (line.timestamp_ns - self.origin_ns) * 1000

    def placed(self, line: Any, host: HostTrace) -> Iterator[tuple[Any, int, int]]:
        """(event, start_ps, duration_ps) of a line's events; damaged ones are counted in `host` and left out."""
        base, known = self.base_ps(line), self.proto.event_metadata
        for event in line.events:
            start, duration = base + event.offset_ps, event.duration_ps
            if event.metadata_id not in known:
                host.leave_out(UNKNOWN_METADATA)
            elif event.num_occurrences:  # a sum over many events, which has no place in time
                host.leave_out(NO_TIME)
            elif duration < 0:
                host.leave_out(NEGATIVE_DURATION)
            elif abs(start) > LONGEST_TRACE_PS or duration > LONGEST_TRACE_PS:
                host.leave_out(FAR_AWAY)
            else:
                yield event, start, duration

    def stat_id(self, name: str) -> int | None:
        return next((key for key, value in self.stat_names.items() if value == name), None)


def read_xplane_file(path: Path) -> HostTrace:
    """One host's trace.

    Raises:
        TomatError: the file is empty, truncated, not an XSpace, or more than a few of its events are damaged. Up to
            that many are left out and counted.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TomatError(f"{path}: cannot be read ({error}).") from None
    return read_xplane_bytes(data, str(path), path.name.removesuffix(XPLANE_SUFFIX))


def read_xplane_bytes(data: bytes, origin: str, host_name: str) -> HostTrace:
    """`read_xplane_file` for bytes already in memory."""
    from google.protobuf.message import DecodeError

    if not data:
        raise TomatError(f"{origin}: empty file. The profiler was stopped before it wrote; take the profile again.")
    space = new_message("XSpace")
    try:
        space.ParseFromString(data)
    except DecodeError:
        raise TomatError(
            f"{origin}: {len(data):,} bytes that do not decode as an XSpace: truncated, or not an xplane file. "
            "Copy the file again from the host that wrote it."
        ) from None
    if not space.planes:
        raise TomatError(
            f"{origin}: an XSpace without planes. Expected the planes of a profile: /device:..., /host:..."
        )
    host = HostTrace(origin, space.hostnames[0] if space.hostnames else host_name)
    host.warnings += [f"profiler: {text}" for text in (*space.errors, *space.warnings)]
    origin_ns = _origin_ns(space.planes)
    planes = [_Plane(p, origin_ns) for p in space.planes]
    host.event_count = sum(len(line.events) for p in planes for line in p.proto.lines)
    for plane in planes:
        _read_session(plane, host)
    for plane in planes:
        name, before = plane.proto.name, Counter(host.left_out)
        if device := DEVICE_PLANE.match(name):
            host.devices.append((_read_tpu if device.group(1) == "TPU" else _read_gpu)(plane, host))
        elif SPARSE_CORE_PLANE.match(name):
            host.warnings.append(f"{name} is not part of the breakdown (it runs beside the TensorCore)")
        count = sum(len(line.events) for line in plane.proto.lines)
        refuse_damaged(f"{origin}, {name}", Counter(host.left_out) - before, count)
    for plane in planes:
        if plane.proto.name.startswith("/host:CPU"):
            _read_host_plane(plane, host, as_device=not host.devices)
    host.devices = [d for d in host.devices if len(d.ops)]
    refuse_damaged(origin, host.left_out, host.event_count)
    return host


def _origin_ns(planes: Iterable[Any]) -> int:
    """The time from which to count: that of the devices' lines, or of all where the CPU is the device."""
    times: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for plane in planes:
        on_device = DEVICE_PLANE.match(plane.name) is not None
        times[on_device] += [(line.timestamp_ns, len(line.events)) for line in plane.lines if line.events]
    return clock_origin(times[True] or times[False], LONGEST_TRACE_PS // 1000)


def _read_session(plane: _Plane, host: HostTrace) -> None:
    name = plane.proto.name
    if name == "Task Environment":
        stats = plane.stats(plane.proto.stats)
        start, stop = _as_integer(stats.get("profile_start_time")), _as_integer(stats.get("profile_stop_time"))
        if 0 < start <= stop:
            host.session_ns = (start, stop)
    if name == "/host:metadata":
        for key, metadata in plane.proto.event_metadata.items():
            _read_program(plane, key, metadata, host)


def _read_program(plane: _Plane, key: int, metadata: Any, host: HostTrace) -> None:
    for stat in metadata.stats:
        if plane.stat_names.get(stat.metadata_id) not in ("Hlo Proto", "hlo_proto") or not stat.bytes_value:
            continue
        name, program_id = program_name_and_id(metadata.name)
        program_id = program_id or unsigned(int(key))
        try:
            program = program_from_bytes(stat.bytes_value, f"{host.origin}, module {name}", program_id)
        except TomatError as error:
            host.warnings.append(f"the HLO of {name} cannot be read: {error}")
            continue
        host.programs[program_id] = program


def _steps_from(line: Any, plane: _Plane, host: HostTrace) -> list[StepMark]:
    marks = []
    for event, start, duration in plane.placed(line, host):
        metadata = plane.proto.event_metadata[event.metadata_id]
        label = metadata.name or metadata.display_name
        number = plane.stats(event.stats).get("step_num", label)
        found = re.search(r"\d+", str(number), re.ASCII)
        digits = found.group() if found else ""
        counts = 0 < len(digits) <= MAX_STEP_DIGITS
        marks.append(StepMark(int(digits) if counts else len(marks), start, start + duration))
    return sorted(marks, key=lambda m: m.start_ps)


def _modules_from(line: Any, plane: _Plane, host: HostTrace) -> list[ModuleRun]:
    runs = []
    for event, start, duration in plane.placed(line, host):
        metadata = plane.proto.event_metadata[event.metadata_id]
        name, program_id = program_name_and_id(metadata.name or metadata.display_name)
        runs.append(ModuleRun(name, program_id, start, start + duration))
    return sorted(runs, key=lambda r: r.start_ps)


def _number(value: Any) -> float | None:
    """A count as the profiler wrote it, None where it wrote none or one that cannot be."""
    return float(value) if isinstance(value, int | float) and 0 <= value < math.inf else None


def _kind_from(plane: _Plane, metadata: Any, event: Any, host: HostTrace) -> OpKind:
    """The kind of a TPU or GPU operation, from its metadata's stats and, where those are silent, its first event's."""
    stats = {**plane.stats(event.stats), **plane.stats(metadata.stats)}
    long_name = str(stats.get("long_name") or metadata.name)
    name = str(stats.get("hlo_op") or metadata.display_name or metadata.name)
    if name.startswith("%"):  # the whole instruction: `%fusion.3 = bf16[8,128]{1,0} fusion(...)`
        name = name[1:].split(" ", 1)[0]
    program_id = _as_integer(stats.get("program_id"))
    module = host.programs.get(program_id)
    program = str(stats.get("hlo_module") or (module.name if module else ""))
    return OpKind(
        name=name,
        program_id=program_id,
        program=program_name_and_id(program)[0],
        long_name=long_name,
        hlo_category=str(stats.get("hlo_category") or ""),
        op_name=str(stats.get("tf_op") or "").removesuffix(":"),
        source=str(stats.get("source") or ""),
        flops=_number(stats.get("model_flops") if "flops" not in stats else stats["flops"]),
        bytes_accessed=_number(stats.get("bytes_accessed")),
    )


def _read_line(plane: _Plane, line: Any, line_index: int, table: dict[int, int], kinds: list[OpKind],
               host: HostTrace) -> np.ndarray:  # fmt: skip
    """int64 [n, 4] of (kind, start, duration, line) of a line whose events' kinds depend on their metadata alone."""
    events = line.events
    n_events = len(events)

    def column(values: Iterable[int]) -> np.ndarray:
        return np.fromiter(values, dtype=np.int64, count=n_events)

    metadata_ids = column(e.metadata_id for e in events)
    offsets, durations = column(e.offset_ps for e in events), column(e.duration_ps for e in events)
    sums = column(e.num_occurrences for e in events) != 0
    base = plane.base_ps(line)
    base_fits = abs(base) <= LONGEST_TRACE_PS
    shift = base if base_fits else 0
    # Offsets are compared before they are added, since a damaged one may be as large as 64 bits hold.
    far = (offsets > LONGEST_TRACE_PS - shift) | (offsets < -LONGEST_TRACE_PS - shift)
    far |= (durations > LONGEST_TRACE_PS) | (not base_fits)
    unknown = np.isin(metadata_ids, list(plane.proto.event_metadata), invert=True)
    good = np.ones(n_events, dtype=bool)
    for wrong, which in (
        (UNKNOWN_METADATA, unknown), (NO_TIME, sums), (NEGATIVE_DURATION, durations < 0), (FAR_AWAY, far)
    ):  # fmt: skip
        host.leave_out(wrong, int((good & which).sum()))
        good &= ~which
    kept = np.flatnonzero(good)
    metadata_ids, count = metadata_ids[kept], len(kept)
    rows = np.empty((count, 4), dtype=np.int64)
    rows[:, 1] = offsets[kept] + shift
    rows[:, 2] = durations[kept]
    rows[:, 3] = line_index
    ids, first, inverse = np.unique(metadata_ids, return_index=True, return_inverse=True)
    for key, index in zip(ids.tolist(), first.tolist(), strict=True):
        if key not in table:
            table[key] = len(kinds)
            kinds.append(_kind_from(plane, plane.proto.event_metadata[key], events[int(kept[index])], host))
    rows[:, 0] = np.array([table[key] for key in ids.tolist()], dtype=np.int64)[inverse] if count else 0
    return rows


def _read_tpu(plane: _Plane, host: HostTrace) -> DeviceTrace:
    stats = plane.stats(plane.proto.stats)
    kinds: list[OpKind] = []
    table: dict[int, int] = {}
    rows: dict[str, list[np.ndarray]] = {line: [np.empty((0, 4), np.int64)] for line in (OPS_LINE, ASYNC_LINE)}
    modules: list[ModuleRun] = []
    steps: list[StepMark] = []
    for index, line in enumerate(plane.proto.lines):
        name = line.display_name or line.name
        if name in rows:
            rows[name].append(_read_line(plane, line, index, table, kinds, host))
        elif name == MODULES_LINE:
            modules = _modules_from(line, plane, host)
        elif name == STEPS_LINE:
            steps = _steps_from(line, plane, host)
    device_kind = str(stats.get("device_type_string") or stats.get("device_type") or "")
    operations = Events.of_table(np.concatenate(rows[OPS_LINE]))
    return DeviceTrace(
        host=host.host,
        name=plane.proto.name,
        device_kind=device_kind,
        kinds=with_program_of_run(kinds, operations, modules),
        ops=operations,
        async_ops=Events.of_table(np.concatenate(rows[ASYNC_LINE])),
        modules=modules,
        steps=steps,
    )


def _read_gpu(plane: _Plane, host: HostTrace) -> DeviceTrace:
    """A GPU plane: kernels and copies on `Stream` lines; lines that xprof derives from them are left out."""
    stats = plane.stats(plane.proto.stats)
    kinds: list[OpKind] = []
    rows: list[tuple[int, int, int, int]] = []
    steps: list[StepMark] = []
    named: dict[tuple[int, str, int], int] = {}
    for index, line in enumerate(plane.proto.lines):
        name = line.display_name or line.name
        if name == STEPS_LINE:
            steps = _steps_from(line, plane, host)
        if not name.startswith("Stream"):
            continue
        for event, start, duration in plane.placed(line, host):
            # One CUDA kernel serves many HLO operations, so the kind depends on the event's own stats.
            own = plane.stats(event.stats)
            key = (event.metadata_id, str(own.get("hlo_op", "")), _as_integer(own.get("program_id")))
            kind = named.get(key)
            if kind is None:
                kind = named[key] = len(kinds)
                kinds.append(_kind_from(plane, plane.proto.event_metadata[event.metadata_id], event, host))
            rows.append((kind, start, duration, index))
    device_kind = str(stats.get("device_type_string") or stats.get("device_name") or "")
    return DeviceTrace(host.host, plane.proto.name, device_kind, kinds, Events.build(rows), steps=steps)


def _read_host_plane(plane: _Plane, host: HostTrace, as_device: bool) -> None:
    """Host threads: steps and activity; with `as_device` the CPU's HLO operations as well."""
    op_stat, step_stat = plane.stat_id("hlo_op"), plane.stat_id("step_num")
    role: dict[int, str] = {}
    kinds: list[OpKind] = []
    table: dict[tuple[int, int], int] = {}
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    runs: dict[tuple[int, int, int], list[int]] = {}
    names: dict[int, int] = {}
    spans: list[tuple[int, int, int]] = []
    for index, line in enumerate(plane.proto.lines):
        for event, start, duration in plane.placed(line, host):
            key = event.metadata_id
            kind_of_event = role.get(key)
            if kind_of_event is None:
                present = {s.metadata_id for s in event.stats}
                kind_of_event = "op" if op_stat in present else "step" if step_stat in present else "span"
                role[key] = kind_of_event
            if kind_of_event == "span":
                if duration > 0:
                    spans.append((names.setdefault(key, len(names)), start, start + duration))
                continue
            if kind_of_event == "step":
                number = _as_integer(plane.stats(event.stats).get("step_num"))
                host.host_steps.append(StepMark(number, start, start + duration))
                continue
            if not as_device:
                continue
            stats = plane.stats(event.stats)
            program_id, ordinal = _as_integer(stats.get("program_id")), _as_integer(stats.get("device_ordinal"))
            kind = table.get((key, program_id))
            if kind is None:
                kind = table[key, program_id] = len(kinds)
                name = str(stats.get("hlo_op") or plane.proto.event_metadata[key].name)
                kinds.append(OpKind(name, program_id, str(stats.get("hlo_module") or "")))
            rows.setdefault(ordinal, []).append((kind, start, duration, index))
            run = (ordinal, program_id, _as_integer(stats.get("run_id")))
            span = runs.setdefault(run, [start, start + duration, kind])
            span[0], span[1] = min(span[0], start), max(span[1], start + duration)
    host.host_steps.sort(key=lambda m: m.start_ps)
    metadata = plane.proto.event_metadata
    host.activity = HostActivity([metadata[k].name for k in names], np.array(spans, dtype=np.int64).reshape(-1, 3))
    for ordinal in sorted(rows):
        mine = {run: span for run, span in runs.items() if run[0] == ordinal}
        modules = [ModuleRun(kinds[span[2]].program, run[1], span[0], span[1]) for run, span in mine.items()]
        host.devices.append(
            DeviceTrace(
                host.host,
                f"/host:CPU:{ordinal}",
                "cpu",
                kinds,
                Events.build(rows[ordinal]),
                modules=sorted(modules, key=lambda r: r.start_ps),
            )
        )


def _as_integer(value: Any) -> int:
    """A stat's value as an integer, 0 where absent: ids are written as numbers or as decimal text."""
    # never through a float: a TPU's program id is a 64-bit fingerprint
    try:
        return unsigned(int(value or 0))
    except (TypeError, ValueError, OverflowError):
        return 0


def unsigned(value: int) -> int:
    """An id as an unsigned 64-bit number: writers store the same fingerprint as int64, uint64 and text."""
    return value % 2**64
