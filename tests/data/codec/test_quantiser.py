import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.quantiser import FineBins, optimal_cuts


def fine_of(rho):
    histogram = DensityHistogram()
    histogram.add(rho)
    return FineBins(histogram)


def error_of(fine, cuts, absolute):
    return fine.errors(cuts[:-1], cuts[1:], absolute).sum()


def least_error(fine, n, absolute):
    """Bellman's recursion over all cuts, without anything that makes it fast."""
    m = len(fine.bins)
    start, stop = np.triu_indices(m + 1, 1)
    table = np.full((m + 1, m + 1), np.inf)
    table[start, stop] = fine.errors(start, stop, absolute)
    best = table[0]
    for _ in range(n - 1):
        best = np.min(best[:, None] + table, axis=0)
    return best[m]


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("vacuum", [True, False])
def test_small_data_get_the_optimum(vacuum, absolute):
    """Lloyd's iteration from its usual start left up to 27 times the squared and 2 times the absolute error."""
    rng = np.random.default_rng(3)
    plateaus = [rng.normal(0.1, 1e-4, 400), rng.normal(0.2, 0.02, 300), rng.lognormal(3, 0.1, 20)]
    rho = np.concatenate([rng.normal(1, 0.01, 300), rng.lognormal(-9, 1, 500)] if vacuum else plateaus)
    fine = fine_of(rho.clip(1e-12).astype(np.float32))
    for n in (2, 7, 100):
        cuts, _ = optimal_cuts(fine, n, absolute)
        assert error_of(fine, cuts, absolute) <= least_error(fine, n, absolute) * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(2.0**-20, 2.0**20, width=32), st.integers(1, 50)), min_size=1, max_size=40),
    st.booleans(),
    st.data(),
)
def test_any_counts_get_the_optimum(values, absolute, data):
    fine = fine_of(np.repeat(*zip(*[(np.float32(rho), count) for rho, count in values], strict=True)))
    n = data.draw(st.integers(1, len(fine.bins)))
    cuts, _ = optimal_cuts(fine, n, absolute)
    assert len(cuts) == n + 1 and np.all(np.diff(cuts) >= 1)
    # Cutting at the edges puts each fine bin where the cuts put it.
    ids = np.searchsorted(fine.edges(cuts, fine.medians(cuts)), fine.lower, side="right")
    np.testing.assert_array_equal(ids, np.repeat(np.arange(n), np.diff(cuts)))
    # Rounding of the running sums is what the best of cuts without error may differ by.
    assert error_of(fine, cuts, absolute) <= least_error(fine, n, absolute) * (1 + 1e-9) + 1e-12 * fine.sums.sum()


def test_errors_are_those_of_the_voxels():
    rho = np.random.default_rng(1).lognormal(0, 1, 20_000).astype(np.float32)
    fine = fine_of(rho)
    cuts = np.arange(13) * len(fine.bins) // 12
    ids = np.searchsorted(fine.lower[cuts[1:-1]], rho, side="right")
    for values in (fine.medians(cuts), fine.means(cuts)):
        absolute = np.abs(rho - values[ids]).sum(dtype=np.float64)
        assert fine.absolute_error(cuts, values) == pytest.approx(absolute, rel=1e-5)
    for absolute, values in ((True, fine.medians(cuts)), (False, fine.means(cuts))):
        power = 1 if absolute else 2
        errors = [(np.abs(rho[ids == k] - values[k]) ** power).sum(dtype=np.float64) for k in range(12)]
        np.testing.assert_allclose(fine.errors(cuts[:-1], cuts[1:], absolute), errors, rtol=1e-4)
