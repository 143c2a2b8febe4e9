"""The interval of paired ratios: right about equal settings, and about ones that differ, on a machine that drifts."""

import numpy as np
import pytest

from tomat.measure.lab.speedup import FASTER, SAME, SLOWER, ratio_of, ratio_of_starts, start_noise


def ratios(rng: np.random.Generator, faster: float, pairs: int) -> list[float]:
    """Of two settings on a machine whose speed wanders by far more than they differ."""
    machine = np.exp(np.cumsum(rng.normal(0, 0.3, pairs)))
    mine, theirs = (machine * np.exp(rng.normal(0, 0.02, pairs)) for _ in range(2))
    return list(faster * mine / theirs)


@pytest.mark.parametrize("pairs", [3, 8])
def test_equal_settings_are_within_noise_in_nineteen_of_twenty(pairs):
    rng = np.random.default_rng(0)
    found = [ratio_of(ratios(rng, 1.0, pairs)) for _ in range(1000)]
    share = np.mean([one.verdict == SAME for one in found])
    # Three standard errors of a share of 0.95 of 1,000.
    assert abs(share - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 1000)


def test_a_difference_beyond_the_noise_is_told():
    rng = np.random.default_rng(1)
    faster, slower = ratio_of(ratios(rng, 1.2, 8)), ratio_of(ratios(rng, 0.8, 8))
    assert (faster.verdict, slower.verdict) == (FASTER, SLOWER)
    assert faster.low < 1.2 < faster.high and slower.low < 0.8 < slower.high
    # Exchanging row and base inverts the interval.
    there, back = ratio_of([1.1, 1.3, 1.2]), ratio_of([1 / 1.1, 1 / 1.3, 1 / 1.2])
    assert (1 / back.high, 1 / back.mean, 1 / back.low) == pytest.approx((there.low, there.mean, there.high))


def sweep_of(rng: np.random.Generator, rows: int, starts: int, of_a_start: float = 0.03) -> list[list[list[float]]]:
    """Ratios of rows that are their base again, in processes that each have a speed of their own."""
    logarithms = rng.normal(0, of_a_start, (rows, starts, 1)) + rng.normal(0, 0.01, (rows, starts, 4))
    return np.exp(logarithms).tolist()


@pytest.mark.parametrize(("rows", "starts"), [(1, 2), (20, 2), (5, 4)])
def test_equal_settings_in_processes_that_differ_are_within_noise_in_nineteen_of_twenty(rows, starts):
    rng = np.random.default_rng(2)
    found, of_pairs = [], []
    for _ in range(1000):
        sweep = sweep_of(rng, rows, starts)
        found.append(ratio_of_starts(sweep[0], start_noise(sweep)).verdict == SAME)
        of_pairs.append(ratio_of(sweep[0][0]).verdict == SAME)
    assert np.mean(found) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 1000)
    assert np.mean(of_pairs) < 0.5  # what the windows of one start alone would say


def test_a_difference_beyond_what_processes_differ_by_is_told():
    rng = np.random.default_rng(3)
    held = []
    for _ in range(200):
        sweep = sweep_of(rng, 20, 2)
        faster = ratio_of_starts([[1.3 * ratio for ratio in start] for start in sweep[0]], start_noise(sweep))
        assert faster.verdict == FASTER and faster.pairs == 8
        held.append(faster.low < 1.3 < faster.high)
    assert np.mean(held) > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 200)


def test_rows_that_were_started_once_tell_no_noise_of_a_start():
    once = [[[1.1, 1.3, 1.2]], [[0.9, 1.0]], []]
    assert start_noise(once) is None
    assert ratio_of_starts(once[0], None) == ratio_of(once[0][0])
    assert ratio_of_starts([[1.5]], None) is ratio_of([1.5]) is None
