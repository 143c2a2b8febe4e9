"""Reads one host's ``*.xplane.pb``: its planes, the HLO modules in ``/host:metadata``, the times of its session."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.perf.profile.hlo_files import program_from_bytes
from tomat.perf.profile.planes import DEVICE_PLANE, Kinds, Plane, as_integer, read_planes
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace_data import LONGEST_TRACE_PS, HostTrace, damaged, program_name_and_id


class _XPlane(Plane):
    """An XPlane message."""

    def __init__(self, host: HostTrace, proto: Any, origin_ns: int) -> None:
        """`origin_ns` is the `timestamp_ns` of lines that counts as time 0."""
        super().__init__(host)
        self.proto, self.origin_ns = proto, origin_ns
        self.stat_names: dict[int, str] = {key: value.name for key, value in proto.stat_metadata.items()}
        self.name, self.stats = proto.name, self._named(proto.stats)
        self.lines = [(line.display_name or line.name, line) for line in proto.lines]
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
        starts, durations, _ = self._columns(line)
        return zip(line.events, starts.tolist(), durations.tolist(), strict=True)

    def operations(self, line: Any, index: int, kinds: Kinds) -> np.ndarray:
        if self.name.startswith("/device:GPU"):
            return super().operations(line, index, kinds)
        # On a TPU the kind of an operation depends on its metadata alone.
        starts, durations, metadata_ids = self._columns(line)
        ids, first, inverse = np.unique(metadata_ids, return_index=True, return_inverse=True)
        numbers = [
            kinds.number_of(self, line.events[at], key) for key, at in zip(ids.tolist(), first.tolist(), strict=True)
        ]
        kind = np.array(numbers, dtype=np.int64)[inverse]
        return np.stack([kind, starts, durations, np.full(len(starts), index)], axis=1)

    def _columns(self, line: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [n] each: start_ps, duration_ps and metadata id of a line's events."""
        events = line.events

        def column(values: Iterable[int]) -> np.ndarray:
            return np.fromiter(values, dtype=np.int64, count=len(events))

        metadata_ids = column(e.metadata_id for e in events)
        offsets, durations = column(e.offset_ps for e in events), column(e.duration_ps for e in events)
        shift = (line.timestamp_ns - self.origin_ns) * 1000
        place = f"{self.host.origin}, {self.name}"
        if np.isin(metadata_ids, list(self._labels), invert=True).any():
            raise damaged(
                place,
                "events have name metadata that the file does not hold; it may come from a profiler with another "
                "schema than that of jax 0.11.1",
            )
        # Offsets are compared before they are added, since a damaged one may be as large as 64 bits hold.
        far = (offsets > LONGEST_TRACE_PS) | (offsets < -LONGEST_TRACE_PS) | (abs(shift) > LONGEST_TRACE_PS)
        if np.any(far | (durations < 0) | (durations > LONGEST_TRACE_PS)):
            raise damaged(place, "events have a negative duration, or lie or last more than a day from the others")
        # A sum over many events has no place in time.
        if any(e.num_occurrences for e in events):
            raise damaged(place, "events are sums over many and have no time")
        return offsets + shift, durations, metadata_ids


def read_xplane_bytes(data: bytes, origin: str, host_name: str) -> HostTrace:
    """One host's trace.

    Args:
        data: the file.
        origin: where it is from, for messages.
        host_name: of a file that does not name its host.

    Raises:
        TomatError: the file is empty, truncated, not an XSpace, or one of its events is damaged.
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
    for plane in planes:
        _read_session(plane, host)
    return read_planes(host, planes)


def _origin_ns(planes: Iterable[Any]) -> int:
    """The time from which to count: that of the devices' first line, or of all where the CPU is the device.

    Some writers count from 1970, in picoseconds more than 64 bits hold.
    """
    times: dict[bool, list[int]] = {True: [], False: []}
    for plane in planes:
        on_device = DEVICE_PLANE.match(plane.name) is not None
        times[on_device] += [line.timestamp_ns for line in plane.lines if line.events]
    return min(times[True] or times[False], default=0)


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
