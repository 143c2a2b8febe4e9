"""Ends a process that makes no progress, with its stacks written down, and reports one that compiles again.

Levanter's `ProgressWatchdog` (0.2.227) finds it, from the events that the trainer emits, and ends the process. tomat
adds why: the stacks of all threads, from every process and not only the first, and a line in the run's history.
"""

import datetime
import faulthandler
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import jax
import levanter.tracker
from levanter.callbacks import Callback, ProgressEvent
from levanter.callbacks.progress_watchdog import ProgressTimeout, ProgressWatchdog

from tomat.base.layout import HISTORY_FILE, HUNG_STATUS
from tomat.base.ports.jax import joined_as
from tomat.base.reporting import warn
from tomat.base.storage import files_at, is_remote
from tomat.train.folder import RunFolder
from tomat.train.runs.history import append_event
from tomat.train.tracking import BACKEND_COMPILE_EVENT, listening_to_durations

POLLS_PER_LIMIT = 10
"""How often progress is looked at within a limit; the limit is overrun by a tenth at most."""

LONGEST_POLL_SECONDS = 60.0
"""Levanter's own interval."""

DUMP_SECONDS = 60.0
"""How long writing the stacks, and copying them to a bucket, may take before the process ends without."""


class HangGuard:
    """The watchdog of one process. The stacks go into the run's folder, and into its bucket where it has one."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self.step = 0

    def count(self, info: Any) -> None:
        self.step = int(info.next_step)

    @contextmanager
    def watching(self) -> Iterator[ProgressWatchdog | None]:
        """Watch while the context is open. Yields the callback that the trainer must tell its progress to; None where
        no limit is set."""
        config = self._folder.config.guards
        limits = [seconds for seconds in (config.hang_seconds, config.startup_hang_seconds) if seconds > 0]
        if not limits:
            yield None
            return
        watchdog = ProgressWatchdog(
            step_timeout=None,
            process_timeout=timedelta(seconds=config.hang_seconds) or None,
            startup_timeout=timedelta(seconds=config.startup_hang_seconds) or None,
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
        """Write the stacks of all threads, then the history; in a thread of its own, after which the process ends."""
        run_dir, run_url = self._folder.path, self._folder.config.run_dir
        run_dir.mkdir(parents=True, exist_ok=True)  # the hang may come before anything is written
        # Not `jax.process_index`, which opens the devices: what hangs may be just that.
        process, _ = joined_as()
        time = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
        path = run_dir / f"stacks-{process}-{time}.txt"
        with path.open("w", encoding="utf-8") as file:
            # Python 3.12's faulthandler knows threads by their number alone.
            file.writelines(f"thread 0x{one.ident or 0:016x}: {one.name}\n" for one in threading.enumerate())
            file.write("\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        after = timeout.event.value
        details = {"process": process, "after": after, "seconds": round(timeout.elapsed, 1)}
        append_event(run_dir, "guard:hang", self.step, **details, stacks=path.name)
        # Standard error, unbuffered: nothing else of this process may work any more.
        message = (
            f"error: no progress for {timeout.elapsed:.0f} s after {after} (step {self.step}); the stacks are in {path}"
            f". Exiting with status {HUNG_STATUS}; the same command continues the run from its last checkpoint.\n"
        )
        os.write(2, message.encode())
        if is_remote(run_url):
            files, root = files_at(run_url)
            for name in (path.name, *([HISTORY_FILE] if process == 0 else [])):
                files.pipe_file(f"{root}/{name}", (run_dir / name).read_bytes())


WATCHED = ("jit(_train_step)", "jit(validation_loss)")
"""The two large programs of a run: Levanter's training step and the evaluation. Helpers are compiled often."""


class RecompileGuard(Callback):
    """Reports each compilation of a large program after its first: a batch of another shape, a weak type or a layout
    that changes makes JAX compile anew, on a TPU for minutes in which the chips do nothing."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._compiled: Counter[str] = Counter()
        self._unreported: list[tuple[int, str, float]] = []
        self._dispatched = self._read = self._total = 0

    def listening(self) -> AbstractContextManager[None]:
        def listen(event: str, duration_secs: float, **details: str | int) -> None:
            name = str(details.get("fun_name"))
            if event != BACKEND_COMPILE_EVENT or name not in WATCHED:
                return
            self._compiled[name] += 1
            if self._compiled[name] > 1:
                self._unreported.append((self._dispatched, name, duration_secs))

        return listening_to_durations(listen)

    def on_event(self, event: ProgressEvent) -> None:
        """Count the steps that are dispatched: a compilation is reported with its step, once that is read."""
        self._dispatched += event is ProgressEvent.TRAIN_STEP_STARTED

    def on_step(self, info: Any, force: bool = False) -> None:
        del force
        step = int(info.step)
        self._read += 1
        reported = [one for one in self._unreported if one[0] <= self._read]
        del self._unreported[: len(reported)]
        self._total += len(reported)
        if self._total:
            levanter.tracker.log({"guards/recompilations": self._total}, step=step)
        if jax.process_index() != 0:
            return
        for _, name, seconds in reported:
            self._folder.record("guard:recompilation", step, function=name, seconds=round(seconds, 3))
            warn(
                f"{name} was compiled again at step {step}, which took {seconds:.1f} s; "
                "shapes or types of its input have changed. `jax_log_compiles` in trainer.jax_config says which."
            )
