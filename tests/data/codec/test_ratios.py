import dataclasses

import numpy as np
import pytest
from relative_codec import PROMOLECULE, bonded, histogram, relative_codec

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.codec.relative import cell_codec

GRIDS = [bonded(seed) for seed in range(3)]


def nmae(codec, decoder):
    error = sum(np.abs(cell.decode(cell.encode(grid.rho), decoder).astype(np.float64) - grid.rho).sum()
                for grid in GRIDS for cell in [cell_codec(codec, grid)])  # fmt: skip
    return error / sum(grid.rho.sum(dtype=np.float64) for grid in GRIDS)


def test_floors_are_the_error_of_the_density_and_far_below_those_of_bins_of_it():
    absolute, squared = (fit_codec(histogram(0, 1, 2), 32, objective) for objective in ("absolute", "squared"))
    assert absolute.fit["nmae_floor"] == squared.fit["nmae_floor"]
    for codec in (absolute, squared):
        for decoder, floor in codec.fit["nmae_floor"][codec.objective].items():
            assert nmae(codec, decoder) == pytest.approx(floor, rel=5e-3)
    assert nmae(absolute, "median") < nmae(squared, "median")
    plain = DensityHistogram()
    for grid in GRIDS:
        plain.add_grid(grid)
    of_density = fit_codec(plain, 32)
    assert type(of_density) is LloydMaxCodec
    assert nmae(absolute, "median") < 0.5 * of_density.fit["nmae_floor"]["absolute"]["median"]


def test_counts_are_those_of_all_voxels_and_no_bin_is_empty():
    codec = relative_codec()
    ids = np.concatenate([cell_codec(codec, grid).encode(grid.rho).ravel() for grid in GRIDS])
    counts = np.bincount(ids, minlength=codec.n_density_tokens)
    np.testing.assert_array_equal(counts, codec.fit["counts"])
    assert codec.fit["n_voxels"] == len(ids) and counts.min() > 0
    low, high = codec.fitted_range
    found = np.concatenate([cell_codec(codec, grid).values(grid.rho).ravel() for grid in GRIDS])
    assert high == found.max() and found.min() * (1 - 2e-4) <= low <= found.min()


def test_parts_add_up_and_survive_a_file():
    whole, parts = histogram(0, 1, 2), RatioHistogram(PROMOLECULE)
    for seeds in ((0,), (1, 2)):
        part = histogram(*seeds)
        parts.merge(RatioHistogram.from_bytes(part.to_bytes(), "part.npz", PROMOLECULE, 0.01, "Count again."))
    assert parts.material_ids == whole.material_ids and parts.n_voxels == whole.n_voxels
    assert fit_codec(parts, 24).sha256 == fit_codec(whole, 24).sha256
    with pytest.raises(TomatError, match="Material bonded-0 is counted"):
        parts.add_grid(bonded(0), "bonded-0")


def test_ratios_to_another_promolecule_are_refused():
    other, part = dataclasses.replace(PROMOLECULE, n_materials=7), histogram(0)
    with pytest.raises(TomatError, match="cannot be added"):
        RatioHistogram(other).merge(part)
    for promolecule, offset in ((other, 0.01), (PROMOLECULE, 0.02)):
        with pytest.raises(TomatError, match="part.npz counts ratios to .* Count again"):
            RatioHistogram.from_bytes(part.to_bytes(), "part.npz", promolecule, offset, "Count again.")
    with pytest.raises(TomatError, match="offset of a relative codec is nan"):
        RatioHistogram(PROMOLECULE, float("nan"))


def test_numbers_out_of_range_are_refused():
    for n_bins, message in ((1, "2 to 65,536"), (60_000, "ratios to the sum of atoms have .* at most")):
        with pytest.raises(TomatError, match=message):
            fit_codec(histogram(0), n_bins)
