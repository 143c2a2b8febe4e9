"""How far long work is: a bar on a terminal, lines in a pipe, a file or the log of a job."""

import threading

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tomat.base.reporting import console

FIRST_SECONDS = 1.0
"""Work that takes longer says what it is where there is no terminal; shorter work says it at its end alone."""

REPEAT_SECONDS = 30.0
"""How often it says how far it is, there."""


class SpokenProgress(Progress):
    """Rich's bar. Without a terminal that shows nothing before its end (rich 15.0), so lines do until then."""

    def __init__(self, *columns: ProgressColumn, console: Console, first: float, repeat: float) -> None:
        """`first` and `repeat` in seconds, as `FIRST_SECONDS` and `REPEAT_SECONDS`."""
        super().__init__(*columns, console=console)
        self._first, self._repeat = first, repeat
        self._ended = threading.Event()
        self._speaker = threading.Thread(target=self._speak, daemon=True)

    def start(self) -> None:
        super().start()
        if not self.console.is_terminal:
            self._speaker.start()

    def stop(self) -> None:
        self._ended.set()
        if self._speaker.is_alive():
            self._speaker.join()
        super().stop()

    def _speak(self) -> None:
        wait = self._first
        while not self._ended.wait(wait):
            wait = self._repeat
            for task in self.tasks:
                if task.finished or task.start_time is None:
                    continue
                done = f"{task.completed:,.0f}" + (f" of {task.total:,.0f}" if task.total is not None else "")
                left = "" if task.time_remaining is None else f", about {task.time_remaining:,.0f} s left"
                line = f"{task.description}: {done} after {task.elapsed or 0:,.0f} s{left}"
                self.console.print(line, highlight=False, soft_wrap=True)


def progress(*, first: float = FIRST_SECONDS, repeat: float = REPEAT_SECONDS, **columns: str) -> SpokenProgress:
    """A progress bar with count, elapsed and remaining time; `columns` are further ones, name to text with the task's
    fields, such as `rate="{task.fields[rate]}"`. Seconds until the `first` line elsewhere than on a terminal, then
    `repeat`."""
    return SpokenProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        *(TextColumn(text, markup=False) for text in columns.values()),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        first=first,
        repeat=repeat,
    )
