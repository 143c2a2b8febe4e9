"""Times a compiled program on this machine's devices. The first runs do not count, and the dispatch time is hidden."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

ROW_SECONDS = 0.05
"""Executions dispatched in a row take about this long together, so that the single wait at the end matters little."""
MOST_IN_A_ROW = 2000
FEWEST_RUNS = 3


@dataclass(frozen=True)
class RunTimes:
    """Seconds of one execution, over several rows of executions."""

    seconds_median: float
    seconds_min: float
    seconds_max: float
    runs: int
    """Number of rows of executions that were timed."""


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
        run: Called once to warm up, and a few more times to find out how long it takes.
        seconds: Total time to go on; at least `FEWEST_RUNS` rows are timed.
        in_flight: Most executions that are dispatched and not done yet; each holds its result in memory.
        in_a_row: Number of executions in a row, all dispatched before the last is waited for; None: as many as take
            `ROW_SECONDS`.
        runs: Number of rows; None: as many as fit into `seconds`. If several processes run one program together,
            `in_a_row` and `runs` must be given, or each process would choose its own numbers.
    """
    jax.block_until_ready(run())
    if in_a_row is None:
        # A short program ends before the wait does, so it is estimated from ten executions and not from one.
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
