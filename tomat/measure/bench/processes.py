"""Processes that the lab and studies start: `tomat` verbs that are watched or killed."""

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.layout import STOPPED_STATUS

Process = subprocess.Popen[str]


def tomat_command(*words: str) -> list[str]:
    return [sys.executable, "-m", "tomat.app.cli", *words]


@contextlib.contextmanager
def started(
    command: list[str], log: Path, end: Callable[[Process], None] = subprocess.Popen.kill, **options: Any
) -> Iterator[Process]:
    """A process that runs `command`, its output at the end of `log`; ended by `end` when the context is left by an
    exception, such as Ctrl-C, or by SIGTERM."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with sigterm_raised():
        with log.open("a") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, **options)
        try:
            yield process
        except subprocess.TimeoutExpired as error:
            raise TomatError(f"a process did not end within {error.timeout:.0f} s: {end_of(log)}") from None
        finally:
            if process.poll() is None:
                end(process)
                process.wait()


@contextlib.contextmanager
def sigterm_raised() -> Iterator[None]:
    """SIGTERM raises `SystemExit` in the main thread: left to itself, Python ends there and then, and what this process
    has started runs on. In another thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(STOPPED_STATUS)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-1500:]


def compile_cache(folder: Path) -> dict[str, Any]:
    """`trainer.jax_config` that keeps every compiled program in `folder`, for the other processes of a benchmark."""
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
