"""Reads a Chrome or Perfetto JSON trace (``*.trace.json[.gz]``, as JAX writes beside the xplane file).

It holds less than the xplane: no HLO, and the profiler may have dropped events above its limit. Use it where nothing
else was kept.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from tomat.errors import TomatError
from tomat.performance.trace import (
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

PS_PER_US = 1_000_000
MAX_EVENTS_WRITTEN = 1_000_000
"""The profiler's own limit on a Chrome trace; a file that reaches it has lost events (tsl trace_viewer)."""


def read_chrome_file(path: Path) -> HostTrace:
    """The trace in a JSON file.

    Raises:
        TomatError: not gzip or JSON, or no `traceEvents` in it.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        document = json.loads(data)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TomatError(f"{path}: not a JSON trace ({error}). It may be truncated: copy it again.") from None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise TomatError(f"{path}: JSON without a list `traceEvents`; it is not a Chrome or Perfetto trace.")
    host = path.name.split(".trace.json")[0].removesuffix(".json.gz").removesuffix(".json")
    return _Reader(host, str(path)).read(events)


class _Reader:
    """Sorts events by process and thread, then builds devices out of them."""

    def __init__(self, host: str, origin: str) -> None:
        self.host, self.origin = host, origin
        self.processes: dict[Any, str] = {}
        self.threads: dict[tuple[Any, Any], str] = {}

    def read(self, events: list[dict[str, Any]]) -> HostTrace:
        tracks: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
        for event in events:
            phase = event.get("ph")
            if phase == "M":
                self._name(event)
            elif phase == "X" and "ts" in event:
                tracks.setdefault((event.get("pid"), event.get("tid")), []).append(event)
        count = sum(len(t) for t in tracks.values())
        result = HostTrace(self.origin, self.host, [], HostActivity(), [], {}, None, {}, count)
        if count >= MAX_EVENTS_WRITTEN:
            result.warnings.append(f"{count:,} events: the writer's limit is reached, so events are missing")
        for pid, process in sorted(self.processes.items(), key=lambda item: str(item[0])):
            mine = {key: track for key, track in tracks.items() if key[0] == pid}
            if re.match(r"^/device:(TPU|GPU):\d+", process):
                result.devices.append(self._device(process, mine))
        host_tracks = {k: t for k, t in tracks.items() if self.processes.get(k[0], "").startswith("/host:CPU")}
        self._host(host_tracks, result, as_device=not result.devices)
        result.devices = [d for d in result.devices if len(d.ops)]
        return result

    def _name(self, event: dict[str, Any]) -> None:
        name = str(event.get("args", {}).get("name", ""))
        if event.get("name") == "process_name":
            self.processes[event.get("pid")] = re.sub(r" \(pid.*\)$", "", name)
        elif event.get("name") == "thread_name":
            self.threads[event.get("pid"), event.get("tid")] = name

    def _device(self, process: str, tracks: dict[tuple[Any, Any], list[dict[str, Any]]]) -> DeviceTrace:
        platform = "tpu" if "TPU" in process else "gpu"
        table: dict[tuple[str, str, int], int] = {}
        kinds: list[OpKind] = []
        ops: list[tuple[int, int, int, int]] = []
        transfers: list[tuple[int, int, int, int]] = []
        modules: list[ModuleRun] = []
        steps: list[StepMark] = []
        for line, (key, track) in enumerate(sorted(tracks.items(), key=lambda item: str(item[0]))):
            name = self.threads.get(key, "")
            if name == "XLA Modules":
                for event in track:
                    program, program_id = program_name_and_id(str(event.get("name", "")))
                    start = _ps(event["ts"])
                    modules.append(ModuleRun(program, program_id, start, start + _ps(event.get("dur", 0))))
            elif name == "Steps":
                steps += [_step(e, i) for i, e in enumerate(track)]
            elif name in ("XLA Ops", "Async XLA Ops") or (platform == "gpu" and name.startswith("Stream")):
                rows = transfers if name.startswith("Async") else ops
                rows += [_row(e, line, table, kinds) for e in track]
        modules.sort(key=lambda m: m.start_ps)
        operations = Events.build(ops)
        kinds = with_program_of_run(kinds, operations, modules)
        return DeviceTrace(self.host, process, platform, "", kinds, operations, Events.build(transfers), modules,
                           sorted(steps, key=lambda s: s.start_ps))  # fmt: skip

    def _host(self, tracks: dict[tuple[Any, Any], list[dict[str, Any]]], result: HostTrace, as_device: bool) -> None:
        table: dict[tuple[str, str, int], int] = {}
        kinds: list[OpKind] = []
        rows: list[tuple[int, int, int, int]] = []
        names: dict[str, int] = {}
        spans: list[tuple[int, int, int]] = []
        for line, (_, track) in enumerate(sorted(tracks.items(), key=lambda item: str(item[0]))):
            for event in track:
                args = event.get("args", {})
                start, duration = _ps(event["ts"]), _ps(event.get("dur", 0))
                if "hlo_op" in args and as_device:
                    rows.append(_row(event, line, table, kinds))
                elif "step_num" in args:
                    result.host_steps.append(_step(event, len(result.host_steps)))
                elif duration > 0:
                    spans.append((names.setdefault(str(event.get("name", "")), len(names)), start, start + duration))
        result.host_steps.sort(key=lambda s: s.start_ps)
        array = np.array(spans, dtype=np.int64).reshape(-1, 3)
        result.activity = HostActivity(list(names), array[:, 0].astype(np.int32), array[:, 1], array[:, 2])
        if rows:
            empty = Events.build([])
            # JSON keeps no run_id, so executions cannot be told apart: steps must come from the host's annotations.
            result.devices.append(
                DeviceTrace(self.host, "/host:CPU:0", "cpu", "cpu", kinds, Events.build(rows), empty, [], [])
            )


def _ps(microseconds: Any) -> int:
    return round(float(microseconds) * PS_PER_US)


def _step(event: dict[str, Any], index: int) -> StepMark:
    number = str(event.get("args", {}).get("step_num", event.get("name", index)))
    start = _ps(event["ts"])
    return StepMark(int(number) if number.isdigit() else index, start, start + _ps(event.get("dur", 0)))


def _row(
    event: dict[str, Any], line: int, table: dict[tuple[str, str, int], int], kinds: list[OpKind]
) -> tuple[int, int, int, int]:
    args = event.get("args", {})
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
    return kind, _ps(event["ts"]), _ps(event.get("dur", 0)), line


def _integer(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError):
        return 0


def _optional(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None
