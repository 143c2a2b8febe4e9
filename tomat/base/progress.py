"""How far long work has come, and its stage: a bar or spinner on a terminal; lines in a pipe, a file or a job's log;
nothing with `--quiet`."""

import threading
import time
from typing import Any

from rich import progress as bars
from rich.console import Console
from rich.progress import Progress, ProgressColumn, TextColumn

from tomat.base.reporting import chosen, console, plain_console

FIRST_SECONDS = 1.0
"""Without a terminal, work that takes longer says what it is; shorter work says it only at its end."""

REPEAT_SECONDS = 30.0
"""Without a terminal, how often work says how far it has come; also how often a stage of a plan says it still runs."""


class SpokenProgress(Progress):
    """Rich's bar. Without a terminal it shows nothing before its end (rich 15.0), so lines are printed until then."""

    def __init__(self, *columns: ProgressColumn, console: Console, first: float, repeat: float, **look: Any) -> None:
        """`first` and `repeat` in seconds, as `FIRST_SECONDS` and `REPEAT_SECONDS`; `look` as Rich's bar takes it."""
        self._quiet = chosen.quiet
        super().__init__(*columns, console=console, **{**look, "disable": self._quiet or look.get("disable", False)})
        self._first, self._repeat = first, repeat
        self._ended = threading.Event()
        self._speaker = threading.Thread(target=self._speak, daemon=True)

    def start(self) -> None:
        super().start()
        if not self.console.is_terminal and not self._quiet:
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
                if task.finished or task.start_time is None or not task.visible:
                    continue
                done = f"{task.completed:,.0f}" + (f" of {task.total:,.0f}" if task.total is not None else "")
                left = "" if task.time_remaining is None else f", about {task.time_remaining:,.0f} s left"
                line = f"{task.description}: {done} after {task.elapsed or 0:,.0f} s{left}"
                self.console.print(line, highlight=False, soft_wrap=True)


def progress(**columns: str) -> SpokenProgress:
    """A progress bar with count, elapsed and remaining time; `columns` are further ones, name to text with the task's
    fields, such as `rate="{task.fields[rate]}"`."""
    return SpokenProgress(
        TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        *(TextColumn(text, markup=False) for text in columns.values()),
        bars.TimeElapsedColumn(),
        TextColumn("left"),
        bars.TimeRemainingColumn(),
        console=console,
        first=FIRST_SECONDS,
        repeat=REPEAT_SECONDS,
    )


DONE = "done"
"""The last stage that a compile reports."""

POLL_SECONDS = 0.5


class Stages(SpokenProgress):
    """On a terminal a spinner with the time, and a line for each stage that ends; elsewhere a line when a stage begins.

    Each line begins with the seconds since the first. Used as a context; several things may be under way at once.
    """

    def __init__(self, console: Console | None = None, repeat_seconds: float = REPEAT_SECONDS) -> None:
        shown = console or plain_console(stderr=True)
        columns = (bars.SpinnerColumn(), TextColumn("{task.description}", markup=False), bars.TimeElapsedColumn())
        # Elsewhere than on a terminal it shows nothing, and only keeps what is under way.
        look = {"transient": True, "disable": not shown.is_terminal}
        super().__init__(*columns, console=shown, first=0.0, repeat=repeat_seconds, **look)
        self._began = time.monotonic()
        self._saying = threading.RLock()
        self._under_way: dict[str, bars.Task] = {}

    def stop(self) -> None:
        for what in list(self._under_way):
            self.done(what)
        super().stop()

    def show(self, what: str, stage: str) -> None:
        """Say that `what` is now at `stage`, and how long its last stage took. At `done`, it has ended."""
        with self._saying:
            self.done(what)
            if stage != DONE:
                self.add_task(f"{what}: {stage}", stage=stage, said=time.monotonic())
                self._under_way[what] = self.tasks[-1]
            if stage == DONE or self.disable:
                self.say(f"{what}: {stage}")

    def done(self, what: str) -> None:
        """Say how long the last stage of `what` took."""
        with self._saying:
            task = self._under_way.pop(what, None)
            if task is not None:
                self.remove_task(task.id)
                if not self.disable:
                    self.say(f"{task.description} took {task.elapsed:.0f} s")

    def say(self, text: str) -> None:
        if self._quiet:
            return
        with self._saying:
            self.console.print(f"[{time.monotonic() - self._began:5.0f} s] {text}", highlight=False, soft_wrap=True)

    def _speak(self) -> None:
        while not self._ended.wait(min(POLL_SECONDS, self._repeat / 4)):
            with self._saying:
                now = time.monotonic()
                for what, task in self._under_way.items():
                    if now - task.fields["said"] >= self._repeat:
                        task.fields["said"] = now
                        self.say(f"{what}: still {task.fields['stage']}, {task.elapsed:.0f} s so far")
