"""What a plan is doing and for how long, from its first second on: on standard error, which no report shares."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn

from tomat.base.reporting import plain_console

REPEAT_SECONDS = 30.0
"""Where nobody watches a spinner (a pipe, a log), a line this often says that a stage still runs."""

DONE = "done"
"""The last thing that a compile says of itself."""

POLL_SECONDS = 0.5


class Stages:
    """On a terminal a spinner with the time, and a line for each stage that is over; elsewhere a line when one begins.

    Each line begins with the seconds since the first. Used as a context; several things may be under way at once.
    """

    def __init__(self, console: Console | None = None, repeat_seconds: float = REPEAT_SECONDS) -> None:
        self._console = console or plain_console(stderr=True)
        self._repeat_seconds = repeat_seconds
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        # Elsewhere than on a terminal it shows nothing, and only keeps what is under way.
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._tasks: dict[str, Task] = {}
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def __enter__(self) -> Stages:
        self._bar.start()
        if self._bar.disable:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for what in list(self._tasks):
            self.done(what)
        self._bar.stop()
        if self._bar.disable:
            self._thread.join()

    def show(self, what: str, stage: str) -> None:
        """Say that `what` is now at `stage`, and how long its last one took; at `done`, nothing of it runs any more."""
        with self._lock:
            self._finish(what)
            if stage != DONE:
                self._bar.add_task(f"{what}: {stage}", stage=stage, said=time.monotonic())
                self._tasks[what] = self._bar.tasks[-1]
            if stage == DONE or self._bar.disable:
                self._say(f"{what}: {stage}")

    def done(self, what: str) -> None:
        """Say how long the last stage of `what` took."""
        with self._lock:
            self._finish(what)

    def say(self, text: str) -> None:
        """Say something else."""
        with self._lock:
            self._say(text)

    def _finish(self, what: str) -> None:
        task = self._tasks.pop(what, None)
        if task is not None:
            self._bar.remove_task(task.id)
            if not self._bar.disable:
                self._say(f"{task.description} took {task.elapsed:.0f} s")

    def _say(self, text: str) -> None:
        line = f"[{time.monotonic() - self._began:5.0f} s] {text}"
        self._console.print(line, highlight=False, soft_wrap=True)

    def _repeat(self) -> None:
        while not self._ended.wait(min(POLL_SECONDS, self._repeat_seconds / 4)):
            with self._lock:
                now = time.monotonic()
                for what, task in self._tasks.items():
                    if now - task.fields["said"] >= self._repeat_seconds:
                        task.fields["said"] = now
                        self._say(f"{what}: still {task.fields['stage']}, {task.elapsed:.0f} s so far")
