"""Times a compiled program on the devices that are here: its first runs do not count, its dispatch is hidden."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

ROW_SECONDS = 0.05
"""Executions dispatched in a row take about this together, so that the one wait at its end weighs little."""
MOST_IN_A_ROW = 2000
FEWEST_RUNS = 3


@dataclass(frozen=True)
class RunTimes:
    """Seconds of one execution, over several rows of executions."""

    seconds_median: float
    seconds_min: float
    seconds_max: float
    runs: int
    """Rows that were timed."""


def time_runs(
    run: Callable[[], Any],
    *,
    seconds: float = 0.0,
    in_flight: int = 32,
    in_a_row: int | None = None,
    runs: int | None = None,
) -> RunTimes:
    """Time `run`, which dispatches one execution and returns its arrays.

    Args:
        run: Called once to warm up, and a few times more to see how long it takes.
        seconds: How long to go on, in all; at least `FEWEST_RUNS` rows are timed.
        in_flight: Executions that may be dispatched and not yet done: each holds its result in memory.
        in_a_row: Executions of a row, all dispatched before the last is waited for; None: as many as take
            `ROW_SECONDS`.
        runs: Rows; None: as many as `seconds` hold. Where several processes run one program together, `in_a_row` and
            `runs` must be given, or each would count its own.
    """
    jax.block_until_ready(run())
    if in_a_row is None:
        # A short program is over before its wait is: from a row of ten, not from one.
        for trial in (1, 10):
            taken = _row(run, trial, in_flight)
            if taken > ROW_SECONDS:
                break
        in_a_row = min(MOST_IN_A_ROW, max(1, math.ceil(ROW_SECONDS * trial / taken)))
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < (runs or FEWEST_RUNS) or (runs is None and time.perf_counter() - began < seconds):
        times.append(_row(run, in_a_row, in_flight) / in_a_row)
    return RunTimes(float(np.median(times)), min(times), max(times), len(times))


def _row(run: Callable[[], Any], executions: int, in_flight: int) -> float:
    waiting: deque[Any] = deque()
    began = time.perf_counter()
    for _ in range(executions):
        waiting.append(run())
        if len(waiting) >= in_flight:
            jax.block_until_ready(waiting.popleft())
    jax.block_until_ready(list(waiting))
    return time.perf_counter() - began
