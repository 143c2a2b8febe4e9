"""Reads one host's ``*.xplane.pb``: its planes, the HLO modules in ``/host:metadata``, the times of its session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.perf.profile.damage import (
    FAR_AWAY,
    LONGEST_TRACE_PS,
    NEGATIVE_DURATION,
    NO_TIME,
    UNKNOWN_METADATA,
    clock_origin,
)
from tomat.perf.profile.hlo_files import program_from_bytes
from tomat.perf.profile.planes import DEVICE_PLANE, Kinds, Plane, as_integer, read_planes
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace_data import HostTrace, program_name_and_id


class _XPlane(Plane):
    """An XPlane message."""

    def __init__(self, host: HostTrace, proto: Any, origin_ns: int) -> None:
        """`origin_ns` is the `timestamp_ns` of lines that counts as time 0."""
        super().__init__(host)
        self.proto, self.origin_ns = proto, origin_ns
        self.stat_names: dict[int, str] = {key: value.name for key, value in proto.stat_metadata.items()}
        self.name, self.stats = proto.name, self._named(proto.stats)
        self.lines = [(line.display_name or line.name, line) for line in proto.lines]
        self.event_count = sum(len(line.events) for line in proto.lines)
        self._labels = {key: value.name or value.display_name for key, value in proto.event_metadata.items()}
        self._metadata_stats: dict[int, dict[str, Any]] = {}
        self._roles: dict[int, str] = {}

    def _named(self, stats: Iterable[Any]) -> dict[str, Any]:
        return {self.stat_names.get(s.metadata_id, ""): self._value(s) for s in stats}

    def _value(self, stat: Any) -> Any:
        kind = stat.WhichOneof("value")
        if kind is None:
            return None
        value = getattr(stat, kind)
        return self.stat_names.get(value, "") if kind == "ref_value" else value

    def label(self, event: Any) -> str:
        return self._labels[event.metadata_id]

    def short_name(self, event: Any) -> str:
        return self.proto.event_metadata[event.metadata_id].display_name or self.label(event)

    def event_stats(self, event: Any) -> dict[str, Any]:
        """Those of its metadata and, where those are silent, its own."""
        key = event.metadata_id
        if key not in self._metadata_stats:
            self._metadata_stats[key] = self._named(self.proto.event_metadata[key].stats)
        return {**self._named(event.stats), **self._metadata_stats[key]}

    def role(self, event: Any) -> str:
        """That of the first event with its metadata: looking at the stats of each takes long."""
        role = self._roles.get(event.metadata_id)
        if role is None:
            role = self._roles[event.metadata_id] = super().role(event)
        return role

    def placed(self, line: Any) -> Iterator[tuple[Any, int, int]]:
        kept, starts, durations, _ = self._columns(line)
        events = line.events if len(kept) == len(line.events) else (line.events[i] for i in kept.tolist())
        return zip(events, starts.tolist(), durations.tolist(), strict=True)

    def operations(self, line: Any, index: int, kinds: Kinds) -> np.ndarray:
        if self.name.startswith("/device:GPU"):
            return super().operations(line, index, kinds)
        # On a TPU the kind of an operation depends on its metadata alone.
        kept, starts, durations, metadata_ids = self._columns(line)
        ids, first, inverse = np.unique(metadata_ids, return_index=True, return_inverse=True)
        numbers = [
            kinds.number_of(self, line.events[at], key)
            for key, at in zip(ids.tolist(), kept[first].tolist(), strict=True)
        ]
        kind = np.array(numbers, dtype=np.int64)[inverse]
        return np.stack([kind, starts, durations, np.full(len(kept), index)], axis=1)

    def _columns(self, line: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """int64 [n] each: which events of a line are sound, their start_ps, duration_ps and metadata ids."""
        events = line.events

        def column(values: Iterable[int]) -> np.ndarray:
            return np.fromiter(values, dtype=np.int64, count=len(events))

        metadata_ids = column(e.metadata_id for e in events)
        offsets, durations = column(e.offset_ps for e in events), column(e.duration_ps for e in events)
        # A sum over many events has no place in time.
        sums = column(e.num_occurrences for e in events) != 0
        base_ps = (line.timestamp_ns - self.origin_ns) * 1000  # more than 64 bits where the line's time is damaged
        base_fits = abs(base_ps) <= LONGEST_TRACE_PS
        shift = base_ps if base_fits else 0
        # Offsets are compared before they are added, since a damaged one may be as large as 64 bits hold.
        far = (offsets > LONGEST_TRACE_PS - shift) | (offsets < -LONGEST_TRACE_PS - shift)
        far |= (durations > LONGEST_TRACE_PS) | (not base_fits)
        unknown = np.isin(metadata_ids, list(self._labels), invert=True)
        good = np.ones(len(events), dtype=bool)
        for wrong, which in (
            (UNKNOWN_METADATA, unknown), (NO_TIME, sums), (NEGATIVE_DURATION, durations < 0), (FAR_AWAY, far)
        ):  # fmt: skip
            self.leave_out(wrong, int((good & which).sum()))
            good &= ~which
        kept = np.flatnonzero(good)
        return kept, offsets[kept] + shift, durations[kept], metadata_ids[kept]


def read_xplane_bytes(data: bytes, origin: str, host_name: str) -> HostTrace:
    """One host's trace.

    Args:
        data: the file.
        origin: where it is from, for messages.
        host_name: of a file that does not name its host.

    Raises:
        TomatError: the file is empty, truncated, not an XSpace, or more than a few of its events are damaged. Up to
            that many are left out and counted.
    """
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
    planes = [_XPlane(host, proto, origin_ns) for proto in space.planes]
    host.event_count = sum(plane.event_count for plane in planes)
    for plane in planes:
        _read_session(plane, host)
    return read_planes(host, planes)


def _origin_ns(planes: Iterable[Any]) -> int:
    """The time from which to count: that of the devices' lines, or of all where the CPU is the device."""
    times: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for plane in planes:
        on_device = DEVICE_PLANE.match(plane.name) is not None
        times[on_device] += [(line.timestamp_ns, len(line.events)) for line in plane.lines if line.events]
    return clock_origin(times[True] or times[False], LONGEST_TRACE_PS // 1000)


def _read_session(plane: _XPlane, host: HostTrace) -> None:
    if plane.name == "Task Environment":
        start, stop = (as_integer(plane.stats.get(f"profile_{end}_time")) for end in ("start", "stop"))
        if 0 < start <= stop:
            host.session_ns = (start, stop)
    if plane.name == "/host:metadata":
        for key, metadata in plane.proto.event_metadata.items():
            _read_program(plane, key, metadata, host)


def _read_program(plane: _XPlane, key: int, metadata: Any, host: HostTrace) -> None:
    for stat in metadata.stats:
        if plane.stat_names.get(stat.metadata_id) not in ("Hlo Proto", "hlo_proto") or not stat.bytes_value:
            continue
        name, program_id = program_name_and_id(metadata.name)
        program_id = program_id or as_integer(key)
        try:
            program = program_from_bytes(stat.bytes_value, f"{host.origin}, module {name}", program_id)
        except TomatError as error:
            host.warnings.append(f"the HLO of {name} cannot be read: {error}")
            continue
        host.programs[program_id] = program
