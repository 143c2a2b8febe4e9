from io import BytesIO

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import FIRST_NORMAL_BIN, N_FINE_BINS, DensityHistogram, fine_bin_edges

densities = arrays(np.float32, st.integers(0, 200), elements=st.floats(0, 2.0**40, width=32))


def content(histogram):
    filled = np.flatnonzero(histogram.counts)
    return histogram.n_zero, filled.tolist(), histogram.counts[filled].tolist()


@settings(max_examples=20, deadline=None)
@given(densities)
def test_every_voxel_is_in_the_bin_of_its_value(rho):
    histogram = DensityHistogram()
    histogram.add(rho)
    normal = rho[rho >= np.float32(2.0**-126)]
    edges = fine_bin_edges(np.arange(N_FINE_BINS))
    bins = np.searchsorted(edges, normal, side="right") - 1
    expected, counts = np.unique(bins, return_counts=True)
    assert content(histogram) == (len(rho) - len(normal), expected.tolist(), counts.tolist())
    sums = [normal[bins == k].sum(dtype=np.float64) for k in expected]
    np.testing.assert_allclose(histogram.sums[expected], sums, rtol=1e-12)
    assert histogram.n_voxels == len(rho)
    assert histogram.max_density == (rho.max() if len(rho) else 0)


@settings(max_examples=10, deadline=None)
@given(densities, densities)
def test_histograms_add(first, second):
    together, one, two = DensityHistogram(), DensityHistogram(), DensityHistogram()
    together.add(np.concatenate([first, second]))
    one.add(first)
    two.add(second)
    one.merge(two)
    assert content(one) == content(together)
    np.testing.assert_allclose(one.sums, together.sums, rtol=1e-12)
    assert one.max_density == together.max_density


def test_bins_are_at_most_two_to_minus_thirteen_wide():
    edges = fine_bin_edges(np.arange(FIRST_NORMAL_BIN, N_FINE_BINS)).astype(np.float64)
    relative = np.diff(edges) / edges[:-1]
    assert relative.max() == 2.0**-13 and relative.min() > 2.0**-14.001


def test_zeros_are_counted_apart_and_what_is_no_density_not_at_all():
    histogram = DensityHistogram()
    for value in (-1e-6, np.nan, np.inf):
        with pytest.raises(TomatError, match="finite values of at least 0"):
            histogram.add(np.array([1.0, value], dtype=np.float32))
    assert histogram.n_voxels == 0
    histogram.add(np.array([0.0, -0.0, 1e-40, 2.0**-126, 1.0], dtype=np.float32))
    assert histogram.n_zero == 3 and int(histogram.counts.sum()) == 2


def test_other_units_other_files_and_materials_that_are_counted_are_refused():
    with pytest.raises(TomatError, match="rho_times_volume"):
        DensityHistogram().merge(DensityHistogram(unit="rho_times_volume"))
    with pytest.raises(TomatError, match="has the unit 'bohr'"):
        DensityHistogram(unit="bohr")
    with pytest.raises(TomatError, match="text is not a histogram, or damaged .* Count again."):
        DensityHistogram.from_bytes(b"no histogram", "text", "Count again.")
    first, second = DensityHistogram(), DensityHistogram()
    for histogram in (first, second):
        histogram.add(np.ones(3, np.float32), material_id="mp-1")
    with pytest.raises(TomatError, match="mp-1 is counted already"):
        first.add(np.ones(3, np.float32), material_id="mp-1")
    with pytest.raises(TomatError, match="mp-1 is counted in both"):
        first.merge(second)
    assert first.n_voxels == 3


def test_counts_that_no_densities_make_are_refused():
    histogram = DensityHistogram()
    histogram.add(np.random.default_rng(0).gamma(0.3, 2.0, 1000).astype(np.float32), material_id="mp-1")
    with np.load(BytesIO(histogram.to_bytes())) as parts:
        whole = dict(parts)
    for change in (
        {"bins": whole["bins"][::-1]},
        {"bins": whole["bins"].astype(float)},
        {"counts": whole["counts"] * 2},
        {"counts": whole["counts"][:-1]},
        {"sums": whole["sums"] * np.nan},
        {"sums": -whole["sums"]},
        {"n_zero": -1},
        {"max_density": np.nan},
        {"unit": "bohr"},
    ):
        file = BytesIO()
        np.savez_compressed(file, **(whole | change))
        with pytest.raises(TomatError, match="histogram.npz"):
            DensityHistogram.from_bytes(file.getvalue(), "histogram.npz", "")
