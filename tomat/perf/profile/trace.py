"""Opens the profile of real steps, in any trace format.

``load_trace`` takes a JAX profile directory (local or ``gs://``; the hosts of one session are merged), one
``*.xplane.pb``, or a Chrome/Perfetto JSON trace.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tomat.base.documents import read_bytes
from tomat.base.errors import TomatError
from tomat.perf.profile.chrome import read_chrome_bytes
from tomat.perf.profile.hlo_files import XPLANE_SUFFIX
from tomat.perf.profile.trace_data import HostTrace, Trace, main_program
from tomat.perf.profile.xplane import read_xplane_bytes

SESSION_GLOB = "plugins/profile/*"
CHROME_SUFFIXES = (".trace.json.gz", ".trace.json", ".json.gz", ".json")
SESSION_SUFFIXES = (XPLANE_SUFFIX, *CHROME_SUFFIXES[:2])


def load_trace(origin: str | Path, *, session: str | None = None) -> Trace:
    """The trace at `origin`: a profile directory (local path or fsspec URL such as `gs://...`), or one file.

    Args:
        origin: the run's profiler directory, a session directory, a `*.xplane.pb` or a Chrome/Perfetto JSON file.
        session: name of the session (`<date>` under `plugins/profile/`); default: the newest.

    Raises:
        TomatError: nothing readable there, or the files are not hosts of one run.
    """
    location = str(origin)
    notes: list[str] = []
    if "://" in location:
        filesystem, found = _listed(location)
        files = _session_files(location, found, session, notes)
        hosts = [_read_file(filesystem.unstrip_protocol(file), filesystem.cat_file(file)) for file in files]
        return merge_hosts(location, hosts, notes)
    path = Path(location)
    if not path.exists():
        raise TomatError(f"{location}: no such file or directory. Give a JAX profile directory or a trace file.")
    files = [location]
    if not path.is_file():
        found = [str(file) for file in path.rglob("*") if file.name.endswith(SESSION_SUFFIXES) and file.is_file()]
        files = _session_files(location, found, session, notes)
    return merge_hosts(location, [_read_file(file, read_bytes(Path(file))) for file in files], notes)


def _listed(url: str) -> tuple[Any, list[str]]:
    """The fsspec filesystem of a URL, and the files beneath it or itself."""
    import fsspec

    filesystem, root = fsspec.core.url_to_fs(url)
    try:
        return filesystem, [root] if filesystem.isfile(root) else filesystem.find(root)
    except (OSError, ValueError) as error:
        raise TomatError(f"{url}: cannot be listed ({error}). Check the address and the credentials.") from None


def _session_files(origin: str, files: list[str], session: str | None, notes: list[str]) -> list[str]:
    """The trace files of one session out of all that are beneath `origin`; JSON ones only where no xplane file is."""
    for suffixes in ((XPLANE_SUFFIX,), CHROME_SUFFIXES[:2]):
        sessions: dict[str, list[str]] = {}
        for file in sorted(files):
            if file.endswith(suffixes):
                sessions.setdefault(str(Path(file).parent), []).append(file)
        if not sessions:
            continue
        if session is not None:
            chosen = [s for s in sessions if Path(s).name == session]
            if not chosen:
                names = ", ".join(sorted(Path(s).name for s in sessions))
                raise TomatError(f"{origin}: no session {session!r}. Sessions there: {names}.")
        else:
            chosen = [sorted(sessions, key=lambda s: (natural_order(Path(s).name), natural_order(s)))[-1]]
            if len(sessions) > 1:
                notes.append(f"{len(sessions)} sessions found, the newest by its name ({Path(chosen[0]).name}) is read")
        return sessions[chosen[0]]
    raise TomatError(
        f"{origin}: no *{XPLANE_SUFFIX} file beneath it. A JAX profile directory has "
        f"{SESSION_GLOB}/<host>{XPLANE_SUFFIX}; was the profiler on, and did the run reach its start step?"
    )


def natural_order(name: str) -> tuple[tuple[str, int, str], ...]:
    """A sort key in which numbers count as such: `run_9` before `run_10`."""
    pairs = re.findall(r"(\D*)(\d*)", name, re.ASCII)
    return tuple((text, len(digits.lstrip("0")), digits.lstrip("0")) for text, digits in pairs)


def _read_file(origin: str, data: bytes) -> HostTrace:
    name = origin.rsplit("/", 1)[-1]
    if name.endswith(XPLANE_SUFFIX):
        return read_xplane_bytes(data, origin, name.removesuffix(XPLANE_SUFFIX))
    if name.endswith(CHROME_SUFFIXES):
        return read_chrome_bytes(data, origin)
    raise TomatError(
        f"{origin}: not a trace by its name. Expected *{XPLANE_SUFFIX} or one of {', '.join(CHROME_SUFFIXES)}."
    )


def merge_hosts(origin: str, hosts: list[HostTrace], notes: list[str] | None = None) -> Trace:
    """The hosts of one session as one trace.

    Raises:
        TomatError: no host has device events, or the files come from different runs.
    """
    trace = Trace(origin, hosts, list(notes or []))
    if not trace.devices:
        raise TomatError(
            f"{origin}: no device timeline in {len(hosts)} file(s). Expected a /device:TPU:N or /device:GPU:N plane, "
            "or CPU events with an hlo_op stat. Profile a step that runs on the accelerator, with the device tracer on."
        )
    for host in hosts:
        trace.notes += [f"{host.host}: {w}" for w in host.warnings]
        if not host.devices:
            trace.notes.append(f"{host.host}: host without a device plane, it contributes no operations")
    _refuse_mixed_runs(trace)
    return trace


def _refuse_mixed_runs(trace: Trace) -> None:
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
        if mine and theirs and mine != theirs:
            reason = f"they run different programs, {mine} and {theirs}"
        if first.devices and host.devices and first.devices[0].device_kind != host.devices[0].device_kind:
            reason = f"their devices differ, {first.devices[0].device_kind!r} and {host.devices[0].device_kind!r}"
        if reason:
            raise TomatError(
                f"{trace.origin}: {first.origin} and {host.origin} are not hosts of one run: {reason}. "
                "Give a directory that holds the hosts of one session only."
            )
