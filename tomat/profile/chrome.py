"""Reads a Chrome or Perfetto JSON trace (``*.trace.json[.gz]``, as JAX writes beside the xplane file).

It holds less than the xplane: no HLO, and the profiler may have dropped events above its limit. Use it where nothing
else was kept.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.profile.damage import (
    FAR_AWAY,
    LONGEST_TRACE_PS,
    MALFORMED,
    NEGATIVE_DURATION,
    NO_DURATION,
    NO_TIME,
    clock_origin,
    refuse_damaged,
)
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
from tomat.profile.unpack import read_unpacked

PS_PER_US = 1_000_000
US_PER_DAY = LONGEST_TRACE_PS // PS_PER_US
LATEST_US = 10**16
"""The year 2286 in microseconds since 1970. The present in nanoseconds is 1.8e18."""
MAX_EVENTS_WRITTEN = 1_000_000
"""The profiler's own limit on a Chrome trace; a file that reaches it has lost events (tsl trace_viewer)."""


def read_chrome_file(path: Path) -> HostTrace:
    """The trace in a JSON file.

    Raises:
        TomatError: not gzip or JSON, no `traceEvents` in it, times in another unit, or more than a few damaged events.
            Up to that many are left out and counted.
    """
    data = read_unpacked(path, "JSON trace")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TomatError(f"{path}: not a JSON trace ({error}). It may be truncated: copy it again.") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise TomatError(f"{path}: JSON without a list `traceEvents`; it is not a Chrome or Perfetto trace.")
    host = path.name.split(".trace.json")[0].removesuffix(".json.gz").removesuffix(".json")
    return _Reader(host, str(path)).read(events)


@dataclass(frozen=True)
class _Placed:
    """A complete event and its time on the trace's clock."""

    event: dict[str, Any]
    start_ps: int
    duration_ps: int

    @property
    def end_ps(self) -> int:
        return self.start_ps + self.duration_ps


def _args(event: dict[str, Any]) -> dict[str, Any]:
    return event.get("args") or {}


def _track(event: dict[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


def _is_formed(event: dict[str, Any]) -> bool:
    """Whether its process and thread are names or numbers, and its arguments, if any, keys and values."""
    plain = all(not isinstance(key, list | dict) for key in _track(event))
    return plain and isinstance(event.get("args"), dict | None)


class _Reader:
    """Sorts events by process and thread, then builds devices out of them."""

    def __init__(self, host: str, origin: str) -> None:
        self.host, self.origin = host, origin
        self.processes: dict[Any, str] = {}
        self.threads: dict[tuple[Any, Any], str] = {}
        self.left_out: dict[Any, Counter[str]] = {}
        """Damaged events of each process, by what is wrong with them."""

    def read(self, events: list[dict[str, Any]]) -> HostTrace:
        tracks: dict[tuple[Any, Any], list[_Placed]] = {}
        result = HostTrace(self.origin, self.host)
        complete = [event for event in events if event.get("ph") == "X"]
        for event in events:
            if event.get("ph") == "M":
                self._name(event)
        for placed in self._placed(complete, result):
            tracks.setdefault(_track(placed.event), []).append(placed)
        count = result.event_count = len(complete)
        refuse_damaged(self.origin, result.left_out, count)
        if count >= MAX_EVENTS_WRITTEN:
            result.warnings.append(f"{count:,} events: the writer's limit is reached, so events are missing")
        for pid, process in sorted(self.processes.items(), key=lambda item: str(item[0])):
            mine = {key: track for key, track in tracks.items() if key[0] == pid}
            if re.match(r"^/device:(TPU|GPU):\d+", process):
                damaged = self.left_out.get(pid, Counter())
                refuse_damaged(f"{self.origin}, {process}", damaged, damaged.total() + sum(map(len, mine.values())))
                result.devices.append(self._device(process, mine))
        host_tracks = {k: t for k, t in tracks.items() if self.processes.get(k[0], "").startswith("/host:CPU")}
        self._host(host_tracks, result, as_device=not result.devices)
        result.devices = [d for d in result.devices if len(d.ops)]
        return result

    def _name(self, event: dict[str, Any]) -> None:
        if not _is_formed(event):
            return
        name = str(_args(event).get("name", ""))
        if event.get("name") == "process_name":
            self.processes[event.get("pid")] = re.sub(r" \(pid.*\)$", "", name)
        elif event.get("name") == "thread_name":
            self.threads[_track(event)] = name

    def _placed(self, events: list[dict[str, Any]], result: HostTrace) -> Iterator[_Placed]:
        """The events with their times in picoseconds; damaged ones are counted in `result` and left out."""
        times = [_number(event.get("ts")) for event in events]
        origin_us = clock_origin([(math.floor(t), 1) for t in times if t is not None], US_PER_DAY)
        if abs(origin_us) > LATEST_US:
            raise TomatError(
                f"{self.origin}: its times, such as {origin_us}, cannot be the microseconds that a Chrome trace has; "
                "nanoseconds since 1970? Divide `ts` and `dur` by 1,000 if they are."
            )
        for event, time in zip(events, times, strict=True):
            duration = _number(event.get("dur"))
            if not _is_formed(event):
                self._leave_out(event, MALFORMED, result)
            elif time is None:
                self._leave_out(event, NO_TIME, result)
            elif duration is None:
                self._leave_out(event, NO_DURATION, result)
            elif duration < 0:
                self._leave_out(event, NEGATIVE_DURATION, result)
            elif abs(time - origin_us) > US_PER_DAY or duration > US_PER_DAY:
                self._leave_out(event, FAR_AWAY, result)
            else:
                yield _Placed(event, round((time - origin_us) * PS_PER_US), round(duration * PS_PER_US))

    def _leave_out(self, event: dict[str, Any], wrong: str, result: HostTrace) -> None:
        result.leave_out(wrong)
        if not isinstance(event.get("pid"), list | dict):
            self.left_out.setdefault(event.get("pid"), Counter())[wrong] += 1

    def _device(self, process: str, tracks: dict[tuple[Any, Any], list[_Placed]]) -> DeviceTrace:
        table: dict[tuple[str, str, int], int] = {}
        kinds: list[OpKind] = []
        ops: list[tuple[int, int, int, int]] = []
        transfers: list[tuple[int, int, int, int]] = []
        modules: list[ModuleRun] = []
        steps: list[StepMark] = []
        for line, (key, track) in enumerate(sorted(tracks.items(), key=lambda item: str(item[0]))):
            name = self.threads.get(key, "")
            if name == "XLA Modules":
                for placed in track:
                    program, program_id = program_name_and_id(str(placed.event.get("name", "")))
                    modules.append(ModuleRun(program, program_id, placed.start_ps, placed.end_ps))
            elif name == "Steps":
                steps += [_step(e, i) for i, e in enumerate(track)]
            elif name in ("XLA Ops", "Async XLA Ops") or ("TPU" not in process and name.startswith("Stream")):
                rows = transfers if name.startswith("Async") else ops
                rows += [_row(e, line, table, kinds) for e in track]
        modules.sort(key=lambda m: m.start_ps)
        operations = Events.build(ops)
        kinds = with_program_of_run(kinds, operations, modules)
        return DeviceTrace(self.host, process, "", kinds, operations, Events.build(transfers), modules,
                           sorted(steps, key=lambda s: s.start_ps))  # fmt: skip

    def _host(self, tracks: dict[tuple[Any, Any], list[_Placed]], result: HostTrace, as_device: bool) -> None:
        table: dict[tuple[str, str, int], int] = {}
        kinds: list[OpKind] = []
        rows: list[tuple[int, int, int, int]] = []
        names: dict[str, int] = {}
        spans: list[tuple[int, int, int]] = []
        for line, (_, track) in enumerate(sorted(tracks.items(), key=lambda item: str(item[0]))):
            for placed in track:
                args = _args(placed.event)
                if "hlo_op" in args and as_device:
                    rows.append(_row(placed, line, table, kinds))
                elif "step_num" in args:
                    result.host_steps.append(_step(placed, len(result.host_steps)))
                elif placed.duration_ps > 0:
                    name = str(placed.event.get("name", ""))
                    spans.append((names.setdefault(name, len(names)), placed.start_ps, placed.end_ps))
        result.host_steps.sort(key=lambda s: s.start_ps)
        result.activity = HostActivity(list(names), np.array(spans, dtype=np.int64).reshape(-1, 3))
        if rows:
            # JSON keeps no run_id, so executions cannot be told apart: steps must come from the host's annotations.
            result.devices.append(DeviceTrace(self.host, "/host:CPU:0", "cpu", kinds, Events.build(rows)))


def _step(placed: _Placed, index: int) -> StepMark:
    number = str(_args(placed.event).get("step_num", placed.event.get("name", index)))
    counted = re.fullmatch(r"\d{1,18}", number, re.ASCII)
    return StepMark(int(number) if counted else index, placed.start_ps, placed.end_ps)


def _row(
    placed: _Placed, line: int, table: dict[tuple[str, str, int], int], kinds: list[OpKind]
) -> tuple[int, int, int, int]:
    event, args = placed.event, _args(placed.event)
    name = str(args.get("hlo_op") or event.get("name", ""))
    program, program_id = program_name_and_id(str(args.get("hlo_module", "")))
    program_id = _integer(args.get("program_id")) or program_id
    key = (name, program, program_id)
    kind = table.get(key)
    if kind is None:
        kind = table[key] = len(kinds)
        kinds.append(
            OpKind(
                name=name,
                program_id=program_id,
                program=program,
                long_name=str(args.get("long_name", "")),
                hlo_category=str(args.get("hlo_category", "")),
                op_name=str(args.get("tf_op", "")).removesuffix(":"),
                source=str(args.get("source", "")),
                flops=_optional(args.get("flops") or args.get("model_flops")),
                bytes_accessed=_optional(args.get("bytes_accessed") or args.get("raw_bytes_accessed")),
            )
        )
    return kind, placed.start_ps, placed.duration_ps, line


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _number(value: Any) -> float | int | None:
    """A finite number, exact where it is an integer; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _optional(value: Any) -> float | None:
    """A count, None where there is none or one that cannot be."""
    number = _number(value)
    return float(number) if number is not None and 0 <= number < 1e300 else None
