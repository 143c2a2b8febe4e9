"""Comparison of loss curves, on curves made for it. About a second."""

import numpy as np
import pytest

from tomat.measure.lab.curves import compare_curves, window_noise

TOLERANCE = 1e-5
"""Of the first step."""


def seeds_of_a_run(seeds: int = 3, steps: int = 200) -> np.ndarray:
    """Falling curves with the noise of small batches and an offset for each seed."""
    rng = np.random.default_rng(0)
    fall = 1.0 + 4.0 * np.exp(-np.arange(steps) / 60)
    return fall * (1 + 0.02 * rng.standard_normal((seeds, 1)) + 0.05 * rng.standard_normal((seeds, steps)))


def test_rounding_that_grows_is_within_the_noise():
    base = seeds_of_a_run()
    rounding = 1e-7 * np.exp(np.arange(200) / 20)  # 2e-3 at the end
    found = compare_curves(base, base * (1 + rounding), 20, TOLERANCE)
    assert found.same_curve and 0 < found.largest_window_difference_over_noise < 0.2
    assert found.first_step_relative_difference == pytest.approx(1e-7, rel=1e-6)
    assert found.first_window_relative_difference == pytest.approx(rounding[19], rel=1e-6)
    assert found.largest_relative_difference == pytest.approx(rounding[-1], rel=1e-6)


def test_an_offset_of_every_seed_or_another_seed_is_not_the_same():
    base = seeds_of_a_run()
    assert compare_curves(base, base * 1.2, 20, TOLERANCE).largest_window_difference_over_noise > 1
    late = base.copy()
    late[:, 180:] *= 1.2
    found = compare_curves(base, late, 20, TOLERANCE)
    assert not found.same_curve
    assert np.flatnonzero(found.window_relative_differences).tolist() == [9]
    assert found.first_step_relative_difference == 0
    # Without noise only equal curves are the same.
    base = np.full((2, 10), 3.0)
    assert compare_curves(base, base, 5, TOLERANCE).same_curve
    assert compare_curves(base, base + 1e-9, 5, TOLERANCE).largest_window_difference_over_noise == np.inf
    # Another seed in place of the same one is within the noise, and is seen at the first step.
    base = seeds_of_a_run()
    found = compare_curves(base, base[[1, 2, 0]], 20, TOLERANCE)
    assert found.largest_window_difference_over_noise < 1 and not found.same_curve
    assert found.first_step_relative_difference > 1e-3


def test_noise_is_the_deviation_over_seeds_with_the_neighbours():
    spread = np.array([0.0, 1.0, 2.0, 3.0])  # of two seeds, in windows of one step: deviation spread / sqrt(2)
    base = 5.0 + np.stack([spread / 2, -spread / 2])
    squares = spread**2 / 2
    expected = [squares[:2].mean(), squares[:3].mean(), squares[1:].mean(), squares[2:].mean()]
    np.testing.assert_allclose(window_noise(base, 1), np.sqrt(expected))
    np.testing.assert_allclose(window_noise(base, 4), [1.5 / np.sqrt(2)])  # one window has no neighbours


@pytest.mark.parametrize("spoil", [np.nan, 0.0, -1.0, np.inf])
def test_what_cannot_be_compared_has_no_comparison(spoil: float):
    base = seeds_of_a_run()
    spoilt = base.copy()
    spoilt[1, 7] = spoil
    assert compare_curves(base, spoilt, 20, TOLERANCE) is None
    assert compare_curves(base[:1], base[:1], 20, TOLERANCE) is None
    assert compare_curves(base, base[:, :50], 20, TOLERANCE) is None  # a row that trained for fewer steps
