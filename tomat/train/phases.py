"""Where a run's wall-clock goes between the device steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax.monitoring

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
