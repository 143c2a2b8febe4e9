"""A process that no longer gets anywhere: its stacks are written down, and it ends.

A host that hangs holds all hosts of a slice, and costs as much as one that trains. Levanter's `ProgressWatchdog`
(0.2.227) finds it, from the events that the trainer emits, and ends the process; tomat adds what a person needs to see
why: the stacks of all threads, from every process and not the first alone, and a line in the run's history.
"""

import datetime
import faulthandler
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import fsspec
import jax
from levanter.callbacks.progress_watchdog import ProgressTimeout, ProgressWatchdog

from tomat.base.layout import HISTORY_FILE, HUNG_STATUS
from tomat.base.storage import is_remote
from tomat.train.folder import RunFolder
from tomat.train.runs.history import append_event

POLLS_PER_LIMIT = 10
"""How often within a limit progress is looked at; the limit is overrun by a tenth at most."""

LONGEST_POLL_SECONDS = 60.0
"""Levanter's own interval."""

DUMP_SECONDS = 60.0
"""How long writing the stacks, and copying them to a bucket, may take before the process ends without."""


class HangGuard:
    """The watchdog of one process. The stacks go into the run's folder, and into its bucket where it has one."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self.step = 0
        """Steps done, for the history."""

    def count(self, info: Any) -> None:
        self.step = int(info.next_step)

    @contextmanager
    def watching(self) -> Iterator[ProgressWatchdog | None]:
        """Watch while the context is open; gives the callback that the trainer has to tell its progress to, None where
        no limit is set."""
        config = self._folder.config.guards
        hang, startup = (
            timedelta(seconds=seconds) if seconds > 0 else None
            for seconds in (config.hang_seconds, config.startup_hang_seconds)
        )
        limits = [limit.total_seconds() for limit in (hang, startup) if limit is not None]
        if not limits:
            yield None
            return
        watchdog = ProgressWatchdog(
            step_timeout=None,
            process_timeout=hang,
            startup_timeout=startup,
            startup_grace_period=timedelta(0),
            diagnostic=self._record,
            diagnostic_timeout=timedelta(seconds=DUMP_SECONDS),
            poll_interval=min(LONGEST_POLL_SECONDS, min(limits) / POLLS_PER_LIMIT),
        )
        try:
            yield watchdog
        finally:
            watchdog.stop()

    def _record(self, timeout: ProgressTimeout) -> None:
        """Write the stacks, then the history; called in a thread of its own, after which the process ends."""
        run_dir, run_url = self._folder.path, self._folder.config.run_dir
        path = _dump_stacks(run_dir)
        append_event(
            run_dir,
            "guard:hang",
            self.step,
            process=jax.process_index(),
            after=timeout.event.value,
            seconds=round(timeout.elapsed, 1),
            stacks=path.name,
        )
        # Standard error, unbuffered: nothing else of this process may work any more.
        message = (
            f"error: no progress for {timeout.elapsed:.0f} s after {timeout.event.value} (step {self.step}); the "
            f"stacks of all threads are in {path}. Exiting with status {HUNG_STATUS}; the same command "
            "continues the run from its last checkpoint.\n"
        )
        os.write(2, message.encode())
        if is_remote(run_url):
            files, root = fsspec.core.url_to_fs(run_url)
            for name in (path.name, *([HISTORY_FILE] if jax.process_index() == 0 else [])):
                files.pipe_file(f"{root}/{name}", (run_dir / name).read_bytes())


def _dump_stacks(run_dir: Path) -> Path:
    """Write the Python stacks of all threads of this process to the file `stacks-<process>-<time>.txt`."""
    time = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    path = run_dir / f"stacks-{jax.process_index()}-{time}.txt"
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    with path.open("w", encoding="utf-8") as file:
        # Python 3.12's faulthandler knows threads by their number alone.
        file.writelines(f"thread 0x{ident or 0:016x}: {name}\n" for ident, name in names.items())
        file.write("\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return path
