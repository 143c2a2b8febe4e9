"""Starts `tomat` verbs as processes of the lab and of studies, which watch or kill them."""

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
    """Start a process that runs `command` and appends its output to `log`. If it still runs when the context is left,
    for example by Ctrl-C or SIGTERM, `end` ends it."""
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
    """SIGTERM raises `SystemExit` in the main thread. Otherwise Python would end at once, and the processes started
    here would go on. In another thread nothing changes."""
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
    """A `trainer.jax_config` that caches every compiled program in `folder`, for the other processes of a benchmark."""
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
