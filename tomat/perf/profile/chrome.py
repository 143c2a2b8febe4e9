"""Reads a Chrome or Perfetto JSON trace (``*.trace.json[.gz]``, as JAX writes beside the xplane file).

It holds less than the xplane: no HLO, and the profiler may have dropped events above its limit. Use it where nothing
else was kept.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from tomat.base.errors import TomatError
from tomat.perf.profile.planes import Plane, number_or_none, read_planes
from tomat.perf.profile.trace_data import LONGEST_TRACE_PS, HostTrace, damaged
from tomat.perf.profile.unpack import unpacked

PS_PER_US = 1_000_000
US_PER_DAY = LONGEST_TRACE_PS // PS_PER_US
LATEST_US = 10**16
"""The year 2286 in microseconds since 1970. The present in nanoseconds is 1.8e18."""
MAX_EVENTS_WRITTEN = 1_000_000
"""The profiler's own limit on a Chrome trace; a file that reaches it has lost events (tsl trace_viewer)."""


class _Process(Plane):
    """A process of the trace: a device or a host, whose lines are threads."""

    def __init__(self, host: HostTrace, name: str) -> None:
        super().__init__(host)
        self.name, self.stats = name, {}
        self.lines: list[tuple[str, list[tuple[dict[str, Any], int, int]]]] = []
        self._tracks: dict[Any, list[tuple[dict[str, Any], int, int]]] = {}

    def add(self, event: dict[str, Any], thread: str, start_ps: int, duration_ps: int) -> None:
        tid = event.get("tid")
        if tid not in self._tracks:
            self._tracks[tid] = []
            self.lines.append((thread, self._tracks[tid]))
        self._tracks[tid].append((event, start_ps, duration_ps))

    def placed(self, line: list[tuple[dict[str, Any], int, int]]) -> list[tuple[dict[str, Any], int, int]]:
        return line

    def label(self, event: dict[str, Any]) -> str:
        return str(event.get("name", ""))

    def event_stats(self, event: dict[str, Any]) -> Mapping[str, Any]:
        return event.get("args") or {}


def read_chrome_bytes(data: bytes, origin: str) -> HostTrace:
    """The trace in a JSON file, gzipped or not.

    Args:
        data: the file.
        origin: its path or URL, for messages and the name of the host.

    Raises:
        TomatError: not gzip or JSON, no `traceEvents` in it, times in another unit, or a damaged event.
    """
    try:
        document = json.loads(unpacked(data, origin, "JSON trace"))
    except (ValueError, RecursionError) as error:
        raise TomatError(f"{origin}: not a JSON trace ({error}). It may be truncated: copy it again.") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise TomatError(f"{origin}: JSON without a list `traceEvents`; it is not a Chrome or Perfetto trace.")
    name = origin.rsplit("/", 1)[-1].split(".trace.json")[0].removesuffix(".json.gz").removesuffix(".json")
    host = HostTrace(origin, name)
    complete = [event for event in events if event.get("ph") == "X"]
    if len(complete) >= MAX_EVENTS_WRITTEN:
        host.warnings.append(f"{len(complete):,} events: the writer's limit is reached, so events are missing")
    naming = [event for event in events if event.get("ph") == "M"]
    if not all(_is_formed(event) for event in (*naming, *complete)):
        raise damaged(origin, "an event has a list where a process, a thread or named arguments are expected")
    return read_planes(host, _processes(host, naming, complete))


def _processes(host: HostTrace, naming: list[dict[str, Any]], complete: list[dict[str, Any]]) -> list[_Process]:
    """The processes of the trace with the complete events in them."""
    names: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for event in naming:
        name = str((event.get("args") or {}).get("name", ""))
        if event.get("name") == "process_name":
            names[event.get("pid")] = re.sub(r" \(pid.*\)$", "", name)
        elif event.get("name") == "thread_name":
            threads[event.get("pid"), event.get("tid")] = name
    timed = [(event, number_or_none(event.get("ts")), number_or_none(event.get("dur"))) for event in complete]
    origin_us = math.floor(min((time for _, time, _ in timed if time is not None), default=0))
    if abs(origin_us) > LATEST_US:
        raise TomatError(
            f"{host.origin}: its times, such as {origin_us}, cannot be the microseconds that a Chrome trace has; "
            "nanoseconds since 1970? Divide `ts` and `dur` by 1,000 if they are."
        )
    found: dict[Any, _Process] = {}
    for event, time, duration in timed:
        if time is None or duration is None or duration < 0 or max(time - origin_us, duration) > US_PER_DAY:
            at, lasts = event.get("ts"), event.get("dur")
            raise damaged(host.origin, f"an event begins at {at} us and lasts {lasts} us; expected 0 to a day")
        pid, tid = event.get("pid"), event.get("tid")
        if pid not in found:
            found[pid] = _Process(host, names.get(pid, ""))
        start_ps, duration_ps = round((time - origin_us) * PS_PER_US), round(duration * PS_PER_US)
        found[pid].add(event, threads.get((pid, tid), ""), start_ps, duration_ps)
    return [found[pid] for pid in sorted(found, key=str)]


def _is_formed(event: dict[str, Any]) -> bool:
    """Whether its process and thread are names or numbers, and its arguments, if any, keys and values."""
    plain = all(not isinstance(event.get(key), list | dict) for key in ("pid", "tid"))
    return plain and isinstance(event.get("args"), dict | None)
