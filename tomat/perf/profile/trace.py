"""Opens the profile of real steps: a JAX profile directory (local or ``gs://``; the hosts of one session are merged),
one ``*.xplane.pb``, or a Chrome/Perfetto JSON trace (``*.trace.json[.gz]``, which JAX writes beside the xplane file).
The JSON trace holds less: it has no HLO, and the profiler may have dropped events above its limit."""

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.storage import explaining_storage, files_at
from tomat.perf.profile.hlo_files import XPLANE_SUFFIX, program_from_bytes, unpacked
from tomat.perf.profile.planes import DEVICE_PLANE, Plane, as_integer, number_or_none, read_planes
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.trace_data import LONGEST_TRACE_PS, HostTrace, Trace, damaged, main_program, program_name_and_id


def read_xplane_bytes(data: bytes, origin: str, host_name: str) -> HostTrace:
    """The trace of one host. `host_name` is used if the file does not name its host."""
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
        raise TomatError(f"{origin}: an XSpace without planes; expected those of a profile: /device:..., /host:...")
    host = HostTrace(origin, space.hostnames[0] if space.hostnames else host_name)
    host.warnings += [f"profiler: {text}" for text in (*space.errors, *space.warnings)]
    # Times count from the first line of the devices, or of all planes if the CPU is the device. Some writers count from
    # 1970, which in picoseconds exceeds 64 bits.
    times: dict[bool, list[int]] = {True: [], False: []}
    for plane in space.planes:
        on_device = DEVICE_PLANE.match(plane.name) is not None
        times[on_device] += [line.timestamp_ns for line in plane.lines if line.events]
    origin_ns = min(times[True] or times[False], default=0)
    planes = [Plane(host, proto, origin_ns) for proto in space.planes]
    for plane in planes:
        if plane.name == "Task Environment":
            start, stop = (as_integer(plane.stats.get(f"profile_{end}_time")) for end in ("start", "stop"))
            if 0 < start <= stop:
                host.session_ns = (start, stop)
        if plane.name == "/host:metadata":
            for key, metadata in plane.proto.event_metadata.items():
                _read_program(plane, key, metadata, host)
    return read_planes(host, planes)


def _read_program(plane: Plane, key: int, metadata: Any, host: HostTrace) -> None:
    for stat in metadata.stats:
        if plane.stat_names.get(stat.metadata_id) not in ("Hlo Proto", "hlo_proto") or not stat.bytes_value:
            continue
        name, program_id = program_name_and_id(metadata.name)
        program_id = program_id or as_integer(key)
        try:
            place = f"{host.origin}, module {name}"
            host.programs[program_id] = program_from_bytes(stat.bytes_value, place, program_id)
        except TomatError as error:
            host.warnings.append(f"the HLO of {name} cannot be read: {error}")


PS_PER_US = 1_000_000
US_PER_DAY = LONGEST_TRACE_PS // PS_PER_US
LATEST_US = 10**16
"""The year 2286 in microseconds since 1970. The present in nanoseconds is 1.8e18."""
MAX_EVENTS_WRITTEN = 1_000_000
"""The profiler's own limit on a Chrome trace; a file that reaches it has lost events (tsl trace_viewer)."""


READ_ARGUMENTS = frozenset(
    {"hlo_op", "hlo_module", "program_id", "step_num", "device_ordinal", "run_id", "correlation_id", "long_name",
     "hlo_category", "tf_op", "source", "flops", "model_flops", "bytes_accessed", "raw_bytes_accessed"}
)  # fmt: skip
"""The arguments of an event that `planes.py` reads."""


def read_chrome_bytes(data: bytes, origin: str) -> HostTrace:
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
    for event in (*naming, *complete):
        nested = any(isinstance(event.get(key), list | dict) for key in ("pid", "tid"))
        if nested or not isinstance(event.get("args"), dict | None):
            raise damaged(origin, "an event has a list where a process, a thread or named arguments are expected")
    return read_planes(host, _processes(host, naming, complete))


def _processes(host: HostTrace, naming: list[dict[str, Any]], complete: list[dict[str, Any]]) -> list[Plane]:
    """The processes of the trace as XPlanes, with their threads as lines that hold the complete events."""
    names: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    for event in naming:
        name = _text((event.get("args") or {}).get("name", ""))
        if event.get("name") == "process_name":
            names[event.get("pid")] = re.sub(r" \(pid.*\)$", "", name)
        elif event.get("name") == "thread_name":
            threads[event.get("pid"), event.get("tid")] = name
    timed = [(event, number_or_none(event.get("ts")), number_or_none(event.get("dur"))) for event in complete]
    origin_us = math.floor(min((time for _, time, _ in timed if time is not None), default=0))
    if abs(origin_us) > LATEST_US:
        raise TomatError(
            f"{host.origin}: its times, such as {origin_us}, cannot be microseconds, as a Chrome trace has them; if "
            "they are nanoseconds since 1970, divide `ts` and `dur` by 1,000."
        )
    protos: dict[Any, Any] = {}
    lines: dict[tuple[Any, Any], Any] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    stat_numbers = {name: number for number, name in enumerate(sorted(READ_ARGUMENTS), 1)}
    for event, time, duration in timed:
        if time is None or duration is None or duration < 0 or max(time - origin_us, duration) > US_PER_DAY:
            at, lasts = event.get("ts"), event.get("dur")
            raise damaged(host.origin, f"an event begins at {at} us and lasts {lasts} us; expected 0 to a day")
        pid, tid, arguments = event.get("pid"), event.get("tid"), event.get("args") or {}
        if pid not in protos:
            protos[pid] = new_message("XPlane")
            protos[pid].name = names.get(pid, "")
            for name, number in stat_numbers.items():
                protos[pid].stat_metadata[number].name = name
        if (pid, tid) not in lines:
            lines[pid, tid] = protos[pid].lines.add(name=threads.get((pid, tid), ""))
        # Events with one name may be operations or others. Planes tell them apart by metadata, so each gets its own.
        key = (_text(event.get("name", "")), "hlo_op" in arguments, "step_num" in arguments)
        number = numbers.setdefault(key, len(numbers))
        protos[pid].event_metadata[number].name = key[0]
        start_ps, duration_ps = round((time - origin_us) * PS_PER_US), round(duration * PS_PER_US)
        placed = lines[pid, tid].events.add(metadata_id=number, offset_ps=start_ps, duration_ps=duration_ps)
        for name in READ_ARGUMENTS & arguments.keys():
            if arguments[name] is not None:
                placed.stats.add(metadata_id=stat_numbers[name], str_value=_text(arguments[name]))
    return [Plane(host, protos[pid], from_json=True) for pid in sorted(protos, key=str)]


def _text(value: Any) -> str:
    """`value` as text that a protocol buffer accepts."""
    return str(value).encode(errors="replace").decode()


SESSION_GLOB = "plugins/profile/*"
CHROME_SUFFIXES = (".trace.json.gz", ".trace.json", ".json.gz", ".json")


def load_trace(origin: str | Path, *, session: str | None = None) -> Trace:
    """The trace at `origin`: the profiler directory of a run or of a session (local path or fsspec URL such as
    `gs://...`), a `*.xplane.pb` or a Chrome/Perfetto JSON file. `session` names a session (`<date>` under
    `plugins/profile/`); default: the newest.
    """
    location = str(origin)
    notes: list[str] = []
    with explaining_storage(f"{location} cannot be read", "Check the address and the credentials."):
        filesystem, root = files_at(location)
        if not filesystem.exists(root):
            raise TomatError(f"{location}: no such file or directory. Give a JAX profile directory or a trace file.")
        is_file = filesystem.isfile(root)
        if is_file and session is not None:
            raise TomatError(f"{location} is one file, which has no session {session!r}; leave --session out.")
        files = [root] if is_file else _session_files(location, filesystem.find(root), session, notes)
        contents = {file: filesystem.cat_file(file) for file in files}
    named = filesystem.unstrip_protocol if "://" in location else str
    return merge_hosts(location, [_read_file(named(file), content) for file, content in contents.items()], notes)


def _session_files(origin: str, files: list[str], session: str | None, notes: list[str]) -> list[str]:
    """The trace files of one session, out of all below `origin`. JSON files count only if there is no xplane file."""
    for suffixes in ((XPLANE_SUFFIX,), CHROME_SUFFIXES[:2]):
        sessions: dict[str, list[str]] = {}
        for file in sorted(files):
            if file.endswith(suffixes):
                sessions.setdefault(str(Path(file).parent), []).append(file)
        if not sessions:
            continue
        if session is not None:
            chosen = next((folder for folder in sessions if Path(folder).name == session), None)
            if chosen is None:
                names = ", ".join(sorted(Path(folder).name for folder in sessions))
                raise TomatError(f"{origin}: no session {session!r}. Sessions there: {names}.")
        else:
            chosen = max(sessions, key=lambda folder: (natural_order(Path(folder).name), natural_order(folder)))
            if len(sessions) > 1:
                notes.append(f"{len(sessions)} sessions found, the newest by its name ({Path(chosen).name}) is read")
        return sessions[chosen]
    raise TomatError(
        f"{origin}: no *{XPLANE_SUFFIX} file beneath it. A JAX profile directory has "
        f"{SESSION_GLOB}/<host>{XPLANE_SUFFIX}; was the profiler on, and did the run reach its start step?"
    )


def natural_order(name: str) -> tuple[tuple[str, int, str], ...]:
    """A sort key that compares numbers by value: `run_9` comes before `run_10`."""
    pairs = re.findall(r"(\D*)(\d*)", name, re.ASCII)
    return tuple((text, len(digits.lstrip("0")), digits.lstrip("0")) for text, digits in pairs)


def _read_file(origin: str, data: bytes) -> HostTrace:
    name = origin.rsplit("/", 1)[-1]
    if name.endswith(XPLANE_SUFFIX):
        return read_xplane_bytes(data, origin, name.removesuffix(XPLANE_SUFFIX))
    if name.endswith(CHROME_SUFFIXES):
        return read_chrome_bytes(data, origin)
    expected = ", ".join((f"*{XPLANE_SUFFIX}", *CHROME_SUFFIXES))
    raise TomatError(f"{origin}: not a trace by its name. Expected one of {expected}.")


def merge_hosts(origin: str, hosts: list[HostTrace], notes: list[str] | None = None) -> Trace:
    trace = Trace(origin, hosts, list(notes or []))
    if not trace.devices:
        raise TomatError(
            f"{origin}: no device timeline in {len(hosts)} file(s). Expected /device:TPU:N or /device:GPU:N, or CPU "
            "events with an hlo_op stat: profile a step on the accelerator, with the device tracer on."
        )
    for host in hosts:
        trace.notes += [f"{host.host}: {w}" for w in host.warnings]
        if not host.devices:
            trace.notes.append(f"{host.host}: host without a device plane, it contributes no operations")
    mains = [main_program(host.devices) for host in hosts]
    for (first, mine), (host, theirs) in itertools.combinations(zip(hosts, mains, strict=True), 2):
        reason = ""
        if host.host == first.host and {d.name for d in host.devices} & {d.name for d in first.devices}:
            reason = f"both claim host {host.host!r} and the same devices"
        if first.session_ns and host.session_ns:
            apart = max(first.session_ns[0], host.session_ns[0]) - min(first.session_ns[1], host.session_ns[1])
            if apart > 0:
                reason = f"their profiling sessions lie {apart / 1e9:,.1f} s apart"
        if mine and theirs and mine != theirs:
            reason = f"they run different programs, {mine} and {theirs}"
        if first.devices and host.devices and first.devices[0].device_kind != host.devices[0].device_kind:
            reason = f"their devices differ, {first.devices[0].device_kind!r} and {host.devices[0].device_kind!r}"
        if reason:
            raise TomatError(
                f"{origin}: {first.origin} and {host.origin} are not hosts of one run: {reason}. "
                "Give a directory that holds the hosts of one session only."
            )
    return trace
