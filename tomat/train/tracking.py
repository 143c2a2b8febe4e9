"""What a run says about itself while it trains: `metrics.jsonl`, one JSON object a step, where the time between steps
goes, and the progress display."""

import atexit
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.monitoring
from levanter.tracker.tracker import NoopTracker, Tracker, TrackerConfig
from levanter.tracker.wandb import WandbConfig, _teardown_wandb_service_bounded
from rich.progress import Progress

from tomat.base.layout import METRICS_FILE
from tomat.base.progress import progress
from tomat.base.reporting import chosen, console, tell, to_jsonable, writing

LINE_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class JsonLinesTracker(NoopTracker):
    """Gathers what is logged for a step and writes it as one line once it is committed, or the next step comes."""

    name = "jsonl"

    def __init__(self, path: Path):
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.failure: OSError | None = None
        """Why a line could not be written. Levanter's composite tracker (0.2.227) logs what a tracker raises and goes
        on, which would leave a hole in the log. So the error is kept here, for the guards to raise."""
        self._step: int | None = None
        self._pending: dict[str, Any] = {}

    def log(self, metrics: Mapping[str, Any], *, step: int | None, commit: bool | None = None) -> None:
        """Add `metrics` to the line of `step`, and write it if they are its last (`commit`); metrics without a step are
        left to the other trackers."""
        if step is None:
            return
        step = int(step)
        if self._step is not None and step != self._step:
            self.finish()
        self._step = step
        self._pending.update(jax.device_get(dict(metrics)))
        if commit:
            self.finish()

    def finish(self) -> None:
        if self._step is not None and self._pending:
            line = json.dumps(to_jsonable({"step": self._step, **self._pending}), sort_keys=True, allow_nan=False)
            try:
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            except OSError as error:
                # The file's buffer raises without the file's name.
                self.failure = OSError(error.errno, error.strerror, str(self.path))
        self._pending = {}
        self._step = None


@TrackerConfig.register_subclass("tomat_jsonl")
@dataclass
class JsonLinesTrackerConfig(TrackerConfig):
    path: str = METRICS_FILE

    def init(self, run_id: str | None) -> Tracker:
        return JsonLinesTracker(Path(self.path)) if jax.process_index() == 0 else NoopTracker()


def end_wandb(settings: WandbConfig | None) -> None:
    """End the process that W&B sends from, waiting `service_teardown_timeout` at most; on the first process alone.

    Levanter 0.2.227 does this as the interpreter ends, by a thread, which Python 3.12 then no longer starts: a run that
    had succeeded ended with a RuntimeError, and W&B's own end, which waits for ever, was left in charge.
    """
    if settings is not None and jax.process_index() == 0:
        atexit.unregister(_teardown_wandb_service_bounded)
        _teardown_wandb_service_bounded(settings.service_teardown_timeout)


PHASES = ("compile_seconds", "eval_seconds", "checkpoint_seconds", "profiler_seconds")
BACKEND_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
"""What jax 0.11.1 reports after each compilation, with the name of the function."""
_COMPILE_EVENTS = ("/jax/core/compile/jaxpr_to_mlir_module_duration", BACKEND_COMPILE_EVENT)
"""Tracing is left out: it nests, and its event would count inner functions twice."""


@contextmanager
def listening_to_durations(listen: Callable[..., None]) -> Iterator[None]:
    """Call `listen` with each event that JAX reports, its seconds and its details, while the context is open."""
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class PhaseClock:
    """Seconds per step for each phase, and for the whole step from one `row` to the next.

    `wall_seconds` of a row is the time since the row before; summed over rows, the phases and `step_seconds` are parts
    of it, and what is left is whatever else the host did while no step was in flight. `compile_seconds` lies inside
    whichever phase compiled, mostly the first step. A step is saved after its row is written, so its
    `checkpoint_seconds` are in the next.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._last_row = time.monotonic()

    def timed(self, phase: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """`hook`, called with `info` and `force`, with its duration counted under `phase`."""

        def run(info: Any, force: bool = False) -> None:
            started = time.monotonic()
            try:
                hook(info, force=force)
            finally:
                self._seconds[phase] += time.monotonic() - started

        return run

    def listening_to_compiles(self) -> AbstractContextManager[None]:
        """Count what JAX reports as lowering and compiling while the context is open."""

        def listen(event: str, duration_secs: float, **_: str | int) -> None:
            if event in _COMPILE_EVENTS:
                self._seconds["compile_seconds"] += duration_secs

        return listening_to_durations(listen)

    def row(self, step_seconds: float) -> dict[str, float]:
        """What to log for the step that just ended, and start counting for the next."""
        now = time.monotonic()
        row = {"step_seconds": step_seconds, "wall_seconds": now - self._last_row, **self._seconds}
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._last_row = now
        return row


class TrainingProgress:
    """A bar with loss, tokens/s, MFU and time left on a terminal; a line every `LINE_SECONDS` elsewhere. MFU shows as
    `-` where the chip's peak is not known. The time left follows from the steps after the first, which includes the
    compilation; before the second step none is shown."""

    def __init__(self, total_steps: int, first_step: int):
        self._total, self._first = total_steps, first_step
        self._begun: tuple[int, float] | None = None
        """The number of steps done after this process's first step, and when that was."""
        self._last_line = 0.0
        self._bar: Progress | None = None
        if console.is_terminal and not chosen.quiet and jax.process_index() == 0:
            figures = "loss {task.fields[loss]}  {task.fields[rate]} tokens/s  MFU {task.fields[mfu]}"
            self._bar = progress(figures=figures)
            self._bar.add_task("train", total=total_steps, completed=first_step, loss="-", rate="-", mfu="-")
            self._bar.start()

    def update(self, next_step: int, loss: float, tokens_per_second: float, mfu: float | None) -> None:
        if jax.process_index() != 0:
            return
        fields: dict[str, Any] = {
            "loss": f"{loss:.4f}",
            "rate": f"{tokens_per_second:,.0f}",
            "mfu": "-" if mfu is None else f"{100 * mfu:.1f} %",
        }
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=next_step, **fields)
            return
        now = time.monotonic()
        left_seconds = self.left_seconds(next_step, now)
        if next_step in (self._first + 1, self._total) or now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            left = "" if left_seconds is None else f"  left {left_seconds:.0f} s"
            tell(
                f"step {next_step}/{self._total}  loss {fields['loss']}  {fields['rate']} tokens/s  "
                f"MFU {fields['mfu']}{left}"
            )

    def left_seconds(self, next_step: int, now: float) -> float | None:
        """Seconds left at `now`, when `next_step` steps are done; None before the second step of this process."""
        if self._begun is None:
            self._begun = next_step, now
        step, at = self._begun
        return (now - at) / (next_step - step) * (self._total - next_step) if next_step > step else None

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
