"""The interval of paired ratios: right about equal settings, and about ones that differ, on a machine that drifts."""

import numpy as np
import pytest

from tomat.lab.compare import FASTER, SAME, SLOWER, ratio_of


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


def test_exchanging_row_and_base_inverts_the_interval():
    there = ratio_of([1.1, 1.3, 1.2])
    back = ratio_of([1 / 1.1, 1 / 1.3, 1 / 1.2])
    assert (1 / back.high, 1 / back.mean, 1 / back.low) == pytest.approx((there.low, there.mean, there.high))


def test_one_pair_says_nothing():
    assert ratio_of([1.5]) is None
