"""One external command. A dry run prints the same object that an execution runs."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tomat.base.errors import TomatError

KEPT_LINES = 30
"""Number of last output lines of a shown command that are kept for the error message."""
TIMEOUT_STATUS = 124
"""Status of a command that ran past its time, as in coreutils' `timeout`."""
_ERROR_OF_OPERATION = re.compile(r"^(?P<error>ERROR: \(\S+\)) (?P<json>\{$.*?^\})$", re.MULTILINE | re.DOTALL)
"""gcloud's report of the error of a long operation: code and message, over several lines."""
_OF_A_WORKER = "##### "
"""Start of gcloud's line about a host whose command failed. It follows the output of the command itself."""


@dataclass(frozen=True)
class Command:
    purpose: str
    """The purpose of the command in a few words; a dry run prints it as a comment above the command."""
    argv: tuple[str, ...]
    timeout_seconds: float
    quiet: bool = False
    """tomat reads the output of the command and does not show it."""
    folder: str | None = None
    """The folder where the command runs; None: the current one."""
    stdin: str = ""

    @property
    def line(self) -> str:
        line = shlex.join(self.argv)
        return line if self.folder is None else f"(cd {shlex.quote(self.folder)} && {line})"


@dataclass(frozen=True)
class Result:
    status: int
    """The exit status of the command; 124 if it ran past its time."""
    output: str
    """Standard output of a quiet command; of a shown one the last lines of both streams."""
    errors: str = ""

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def last_line(self) -> str:
        """The message of a failure: gcloud's line with the error (advice may follow it), or the last line."""
        said = _ERROR_OF_OPERATION.sub(_of_operation, self.errors or self.output)
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")]
        own = [line for line in lines if not line.startswith(_OF_A_WORKER)]
        return (errors or own or lines or ["it said nothing"])[-1]


def _of_operation(found: re.Match[str]) -> str:
    try:
        return f"{found['error']} {json.loads(found['json'])['message']}"
    except (ValueError, KeyError):
        return found[0]


def require_program(name: str, where_from: str) -> None:
    if shutil.which(name) is None:
        raise TomatError(f"`{name}` is not on PATH; install {where_from}, or leave --execute out to see the commands.")


def run_command(command: Command) -> Result:
    """Run a command to its end and show its output as it comes, unless it is quiet. After its time it is killed with
    all its children: gcloud leaves its ssh to a hung host running, which would keep the output open for hours."""
    streams: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "cwd": command.folder}
    streams |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE if command.quiet else subprocess.STDOUT}
    streams["stdin"] = subprocess.PIPE if command.quiet else subprocess.DEVNULL
    # In a session of its own, gcloud's children are in its group. Ctrl-C only reaches the launcher, which kills them.
    with subprocess.Popen(command.argv, start_new_session=True, **streams) as process:
        try:
            return _quietly(command, process) if command.quiet else _shown(command, process)
        except BaseException:
            _kill(process)
            raise


def _quietly(command: Command, process: subprocess.Popen[str]) -> Result:
    try:
        output, errors = process.communicate(command.stdin, timeout=command.timeout_seconds)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, _ = process.communicate()
        return Result(TIMEOUT_STATUS, output, f"no answer within {command.timeout_seconds:.0f} s")
    return Result(process.returncode, output, errors)


def _shown(command: Command, process: subprocess.Popen[str]) -> Result:
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    began = time.monotonic()
    timer = threading.Timer(command.timeout_seconds, _kill, (process,))
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            kept.append(line)
            # A closed output does not end the command.
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.write(line)
                sys.stdout.flush()
        status = process.wait()
    finally:
        timer.cancel()
    if time.monotonic() - began >= command.timeout_seconds:
        return Result(TIMEOUT_STATUS, "".join(kept) + f"no end within {command.timeout_seconds:.0f} s\n")
    return Result(status, "".join(kept))


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process with its group, unless it has been waited for: then its id may belong to another process."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
