import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtri

from tomat.codec.histogram import DensityHistogram
from tomat.codec.quantiser import FineBins, lloyd, spread, starting_cuts


def fine_of(rho):
    histogram = DensityHistogram()
    histogram.add(rho)
    return FineBins.of(histogram)


@pytest.fixture(scope="module")
def smooth():
    """Log-normal densities without sampling noise or lonely voxels: 400,000 quantiles from 0.1 % to 99.9 %."""
    quantiles = ndtri(np.linspace(0.001, 0.999, 400_000))
    return fine_of(np.exp(-2 + 1.8 * quantiles).astype(np.float32))


@given(st.lists(st.integers(0, 40), min_size=0, max_size=30), st.integers(0, 20))
def test_spread_makes_cuts_that_leave_no_interval_empty(inner, extra):
    cuts = np.array([0, *sorted(inner), 40])
    n_fine = max(len(cuts) - 1, 40) + extra
    cuts[-1] = n_fine
    moved = spread(cuts, n_fine)
    assert moved[0] == 0 and moved[-1] == n_fine and np.all(np.diff(moved) >= 1)
    if np.all(np.diff(cuts) >= 1):
        np.testing.assert_array_equal(moved, cuts)


def test_errors_are_those_of_the_voxels():
    rho = np.random.default_rng(1).lognormal(0, 1, 20_000).astype(np.float32)
    fine = fine_of(rho)
    cuts = starting_cuts(fine, 12, 1 / 2)
    ids = np.searchsorted(fine.lower[cuts[1:-1]], rho, side="right")
    for values in (fine.medians(cuts), fine.means(cuts)):
        absolute = np.abs(rho - values[ids]).sum(dtype=np.float64)
        assert fine.absolute_error(cuts, values) == pytest.approx(absolute, rel=1e-5)
        squared = ((rho - values[ids]) ** 2).sum(dtype=np.float64)
        assert fine.squared_error(cuts, values) == pytest.approx(squared, rel=1e-4)
    for k in range(12):
        assert fine.means(cuts)[k] == pytest.approx(rho[ids == k].mean(dtype=np.float64), rel=1e-6)
        low, high = (np.quantile(rho[ids == k], 0.5, method=side) for side in ("lower", "higher"))
        assert low * (1 - 2.0**-13) <= fine.medians(cuts)[k] <= high * (1 + 2.0**-13)


def test_uniform_density_is_cut_evenly():
    rho = np.linspace(1, 2, 200_000, dtype=np.float32)
    for absolute in (True, False):
        fine = fine_of(rho)
        cuts, _ = lloyd(fine, 20, absolute)
        # The best 20 intervals of a uniform density are equal, and lose a quarter of a width on average.
        np.testing.assert_allclose(np.diff(fine.lower[cuts[:-1]]), 1 / 20, atol=3 * 2.0**-13)
        error = fine.absolute_error(cuts, fine.medians(cuts)) / len(rho)
        assert error == pytest.approx(1 / 80, rel=1e-3)


@pytest.mark.parametrize("n", [8, 50])
def test_lloyd_is_a_local_optimum(smooth, n):
    """No single cut moved by a twentieth of an interval lowers the error: what Lloyd's steps converge to."""
    for absolute in (True, False):
        cuts, _ = lloyd(smooth, n, absolute)

        def error(cuts, absolute=absolute):
            return (
                smooth.absolute_error(cuts, smooth.medians(cuts))
                if absolute
                else smooth.squared_error(cuts, smooth.means(cuts))
            )

        best = error(cuts)
        for k in (1, n // 4, n // 2, 3 * n // 4):
            for direction in (-1, 1):
                moved = cuts.copy()
                moved[k] += direction * max(1, min(cuts[k] - cuts[k - 1], cuts[k + 1] - cuts[k]) // 20)
                assert error(moved) > best * (1 - 1e-5)


def test_lloyd_improves_on_its_start_and_on_evenly_filled_bins(smooth):
    n = 200
    start = starting_cuts(smooth, n, 1 / 2)
    cuts, _ = lloyd(smooth, n, True)
    quantiles = np.searchsorted(smooth.running_counts, np.linspace(0, smooth.running_counts[-1], n + 1))
    quantiles[-1] = len(smooth.bins)
    fitted, started, even = (smooth.absolute_error(c, smooth.medians(c)) for c in (cuts, start, quantiles))
    assert fitted < started < 0.6 * even


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(2.0**-20, 2.0**20, width=32), min_size=1, max_size=60), st.data())
def test_any_number_of_intervals_up_to_the_distinct_values(values, data):
    fine = fine_of(np.array(values, dtype=np.float32))
    n = data.draw(st.integers(1, len(fine.bins)))
    for absolute in (True, False):
        cuts, _ = lloyd(fine, n, absolute)
        assert len(cuts) == n + 1 and np.all(np.diff(cuts) >= 1)
        edges = fine.edges(cuts, fine.medians(cuts))
        # Cutting at the edges puts each fine bin where the cuts put it.
        ids = np.searchsorted(edges, fine.lower, side="right")
        np.testing.assert_array_equal(ids, np.repeat(np.arange(n), np.diff(cuts)))


@pytest.mark.parametrize("absolute", [True, False])
def test_lloyd_agrees_with_lloyd_on_the_voxels(absolute):
    """The same alternation on the sorted voxels themselves, without histogram, from evenly filled bins."""
    rho = np.sort(np.exp(-2 + 1.8 * ndtri(np.linspace(0.001, 0.999, 100_000))).astype(np.float32))
    values = np.quantile(rho, [0.125, 0.375, 0.625, 0.875])
    for _ in range(100):
        bounds = np.concatenate([[0], np.searchsorted(rho, (values[1:] + values[:-1]) / 2), [len(rho)]])
        parts = [rho[start:stop].astype(np.float64) for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
        values = np.array([np.median(part) if absolute else part.mean() for part in parts])
    distance = np.concatenate([np.abs(part - value) for part, value in zip(parts, values, strict=True)])
    expected = distance.sum() if absolute else (distance**2).sum()
    fine = fine_of(rho)
    cuts, _ = lloyd(fine, 4, absolute)
    fitted = fine.absolute_error(cuts, fine.medians(cuts)) if absolute else fine.squared_error(cuts, fine.means(cuts))
    assert fitted == pytest.approx(expected, rel=2e-4)
