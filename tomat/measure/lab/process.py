"""The lab's side of the process of a row: starts, asks, watches and ends it. Its failure is a `RowError`.

The processes are forked from `multiprocessing`'s fork server, which has imported JAX once without touching a device. So
a row does not pay for the imports and starts with a clean device. The server starts with the first row.
"""

import contextlib
import multiprocessing
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tomat.base.errors import TomatError
from tomat.base.reporting import readable_bytes, writing
from tomat.measure.lab.messages import FAILED, OUT_OF_MEMORY, PROCESS, TOO_LONG, Request, RowError

POLL_SECONDS = 0.05
SESSION_MODULE = "tomat.measure.lab.session"
LOG_TAIL_BYTES = 4000


class RowProcess:
    """A setting that is ready to be measured, in its own process; leaving the context ends the process. Raises a
    `RowError` if the process does not get ready within its limits."""

    def __init__(self, request: Request, on_stage: Callable[[str], None] = lambda stage: None):
        self._request, self._limits, self._on_stage = request, request.config.limits, on_stage
        self._memory_source = None
        for folder in (request.log.parent, request.scratch_dir):
            with writing(folder, "Make room, or give another --work_dir."):
                folder.mkdir(parents=True, exist_ok=True)
        on_stage("starting")
        began = time.monotonic()
        self._process, self._connection = _started("serve", request)
        self._watched = psutil.Process(self._process.pid)
        self._deadline = began + self._limits.seconds
        self._stage = "starting"
        self.waited_seconds = time.monotonic() - began
        """Time spent waiting for the process to start and for its answers."""
        try:
            self.described = self._answer("ready")
            self.start_seconds = time.monotonic() - began
        except BaseException:
            self.close()
            raise

    def window(self) -> dict[str, Any]:
        """Measure one window of steps (`Session.window`), with `others_busy_share`: the share of the processors that
        other processes used. Raises a `RowError` if the process failed or passed a limit."""
        before = self._processor_seconds()
        self._stage = "measuring"
        with contextlib.suppress(OSError):  # the process has died; `_answer` reports why
            self._connection.send(True)
        window = self._answer("window")
        wall, busy, own = (now - then for now, then in zip(self._processor_seconds(), before, strict=True))
        capacity = wall * (psutil.cpu_count() or 1)
        window["others_busy_share"] = min(1.0, max(0.0, (busy - own) / capacity))
        return window

    def extend(self) -> None:
        """Restart the time limit, for a base that is measured beside many rows."""
        self._deadline = time.monotonic() + self._limits.seconds

    def _processor_seconds(self) -> tuple[float, float, float]:
        """Seconds of wall-clock, and processor seconds of all processes and of the lab with this row's process."""
        times = psutil.cpu_times()
        busy = sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)
        own = 0.0
        with contextlib.suppress(psutil.Error):
            for process in (self._watched, psutil.Process()):
                own += sum(process.cpu_times()[:2])
        return time.monotonic(), busy, own

    def _answer(self, kind: str) -> dict[str, Any]:
        began = time.monotonic()
        try:
            while True:
                if self._connection.poll(POLL_SECONDS):
                    try:
                        said, content = self._connection.recv()
                    except (EOFError, ConnectionResetError):
                        raise self._death() from None
                    if said == "stage":
                        self._stage, self._memory_source = content["stage"], content["memory_source"]
                        self._on_stage(self._stage)
                    elif said == "failed":
                        raise RowError(content["status"], content["reason"])
                    else:
                        assert said == kind
                        self._check_memory(content["peak_memory_bytes"])
                        return content
                if time.monotonic() > self._deadline:
                    said = f"took longer than {self._limits.seconds:.0f} s, {self._stage}; raise --row_seconds"
                    raise RowError(TOO_LONG, said)
                # On an accelerator the limit is on the device's memory, which comes with the answers.
                if self._memory_source == PROCESS:
                    with contextlib.suppress(psutil.Error):
                        self._check_memory(self._watched.memory_info().rss)
        finally:
            self.waited_seconds += time.monotonic() - began

    def _check_memory(self, used_bytes: int) -> None:
        limit = self._limits.memory_bytes
        if limit is not None and used_bytes > limit:
            said = f"used {readable_bytes(used_bytes)}, {self._stage}; the limit is {readable_bytes(limit)}"
            raise RowError(OUT_OF_MEMORY, said)

    def _death(self) -> RowError:
        self._process.join(5.0)
        code = self._process.exitcode
        if code == -signal.SIGKILL:
            return RowError(OUT_OF_MEMORY, f"killed, {self._stage}: this machine's memory ran out, or a user did it")
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit status {code}"
        lines = ["it left no log"]
        with contextlib.suppress(OSError):
            lines = self._request.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").splitlines()
        last = next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")
        return RowError(FAILED, f"the process ended with {how}, {self._stage}: {last}")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()
        shutil.rmtree(self._request.scratch_dir, ignore_errors=True)

    def __enter__(self) -> "RowProcess":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def described(config_path: Path, words: Sequence[str]) -> dict[str, Any]:
    """The result of `session.describe`, run in its own process."""
    process, connection = _started("describe", str(config_path), list(words))
    try:
        said, content = connection.recv()
    except EOFError:
        process.join()
        raise TomatError(f"the process that reads {config_path} ended with status {process.exitcode}.") from None
    finally:
        process.kill()
        process.join()
        connection.close()
    if said == "failed":
        raise TomatError(content)
    return content


def _started(function: str, *given: Any) -> tuple[Any, Any]:
    """A process that runs a function of the session module, and this side's end of its connection."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([SESSION_MODULE])
    connection, theirs = context.Pipe()
    process = context.Process(target=_run, args=(function, theirs, *given), daemon=True)
    process.start()
    theirs.close()
    return process, connection


def _run(function: str, connection: Any, *given: Any) -> None:
    """Runs in the new process. The session is imported there, so that the lab itself does not import JAX."""
    # Ctrl-C reaches the whole process group; the lab decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tomat.measure.lab import session

    getattr(session, function)(connection, *given)
