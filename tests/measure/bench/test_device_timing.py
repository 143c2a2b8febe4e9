"""Timing of programs: how many are dispatched in a row, and how many may be under way."""

import time

import jax.numpy as jnp
import pytest

from tomat.measure.bench.device_timing import FEWEST_RUNS, ROW_SECONDS, time_runs


def test_a_row_is_as_long_as_its_end_is_negligible():
    calls = 0

    def run() -> jnp.ndarray:
        nonlocal calls
        calls += 1
        time.sleep(0.004)
        return done

    done = jnp.zeros(1)
    times = time_runs(run, seconds=0.3)
    assert 0.004 <= times.seconds_min <= times.seconds_median <= times.seconds_max
    in_a_row = (calls - 12) // times.runs  # besides the first one and rows of 1 and 10
    assert in_a_row * times.seconds_max > 0.2 * ROW_SECONDS and times.runs >= FEWEST_RUNS


@pytest.mark.parametrize("in_flight", [1, 2, 5])
def test_no_more_results_wait_than_there_is_room_for(in_flight):
    alive: set[int] = set()
    most = made = 0

    class Result:
        def __init__(self) -> None:
            nonlocal most, made
            alive.add(id(self))
            most, made = max(most, len(alive)), made + 1

        def block_until_ready(self) -> "Result":
            return self

        def __del__(self) -> None:
            alive.discard(id(self))

    times = time_runs(Result, in_a_row=20, runs=2, in_flight=in_flight)
    assert most == in_flight and (made, times.runs) == (1 + 20 * 2, 2)
