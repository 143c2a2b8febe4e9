"""One external command: what a dry run prints and what an execution runs are the same object."""

import contextlib
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tomat.base.errors import TomatError

KEPT_LINES = 30
"""Last lines of a shown command's output that are kept for the error message."""
TIMEOUT_STATUS = 124
"""Status of a command that ran past its time, as of coreutils' `timeout`."""


@dataclass(frozen=True)
class Command:
    purpose: str
    """What it is for, in a few words; the comment above it in a dry run."""
    argv: tuple[str, ...]
    timeout_seconds: float
    """After this it is killed and counts as failed."""
    quiet: bool = False
    """Its output is read by tomat and not shown."""
    folder: str | None = None
    """Where it runs; None: here."""
    stdin: str = ""
    """What a quiet one reads."""

    @property
    def line(self) -> str:
        line = shlex.join(self.argv)
        return line if self.folder is None else f"(cd {shlex.quote(self.folder)} && {line})"


@dataclass(frozen=True)
class Result:
    status: int
    """Its exit status; 124 where it ran past its time."""
    output: str
    """Standard output of a quiet command; of a shown one the last lines of both streams."""
    errors: str = ""
    """Standard error of a quiet command."""

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def last_line(self) -> str:
        """What it said of its failure: gcloud's line of the error, which advice may follow, or the last line."""
        lines = [line.strip() for line in (self.errors or self.output).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR: ")]
        return (errors or lines or ["it said nothing"])[-1]


def require_program(name: str, where_from: str) -> None:
    if shutil.which(name) is None:
        raise TomatError(f"`{name}` is not on PATH; install {where_from}, or leave --execute out to see the commands.")


def run_command(command: Command) -> Result:
    """Run a command to its end, showing its output as it comes unless it is quiet."""
    streams: dict[str, Any] = {"encoding": "utf-8", "errors": "replace", "cwd": command.folder}
    if command.quiet:
        streams |= {"input": command.stdin, "timeout": command.timeout_seconds}
        try:
            done = subprocess.run(command.argv, capture_output=True, **streams)
        except subprocess.TimeoutExpired as late:
            so_far = (late.stdout or b"").decode(errors="replace")  # bytes, whatever the encoding
            return Result(TIMEOUT_STATUS, so_far, f"no answer within {command.timeout_seconds:.0f} s")
        return Result(done.returncode, done.stdout, done.stderr)
    kept: deque[str] = deque(maxlen=KEPT_LINES)
    began = time.monotonic()
    streams |= {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command.argv, **streams) as process:
        timer = threading.Timer(command.timeout_seconds, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                kept.append(line)
                # That nobody can read it any more does not end the command.
                with contextlib.suppress(OSError, ValueError):
                    sys.stdout.write(line)
                    sys.stdout.flush()
            status = process.wait()
        finally:
            timer.cancel()
    if time.monotonic() - began >= command.timeout_seconds:
        return Result(TIMEOUT_STATUS, "".join(kept) + f"no end within {command.timeout_seconds:.0f} s\n")
    return Result(status, "".join(kept))
