import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tomat.base.errors import TomatError
from tomat.data.codec.base import SHIFT
from tomat.data.codec.files import load_codec
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import OBJECTIVES, LloydMaxCodec
from tomat.data.codec.ratios import fit_codec

RHO = np.random.default_rng(0).lognormal(-2, 1.8, 100_000).astype(np.float32)


@pytest.fixture(scope="module")
def histogram():
    histogram = DensityHistogram()
    histogram.add(RHO)
    histogram.add(np.zeros(1000, np.float32))
    return histogram


@pytest.fixture(scope="module")
def codec(histogram):
    return fit_codec(histogram, n_bins=256)


def nmae(codec, decoder):
    error = np.abs(codec.decode(codec.encode(RHO), decoder).astype(np.float64) - RHO)
    return error.sum() / RHO.sum(dtype=np.float64)


@st.composite
def codecs(draw):
    """Any tables that hang together, the edges anywhere, also many in one cell of the lookup."""
    close = st.integers(1_000_000_000, 1_000_004_000)
    bits = draw(st.lists(close | st.integers(0x00800000, 0x7F000000), min_size=1, max_size=40, unique=True))
    edges = np.sort(np.array(bits, dtype=np.uint32)).view(np.float32)
    values = np.concatenate([np.zeros(1, np.float32), edges])
    return LloydMaxCodec("e_per_A3", "absolute", edges, values, values, float(edges[-1]))


@settings(max_examples=60, deadline=None)
@given(codecs(), arrays(np.float32, 40, elements=st.floats(width=32, allow_nan=False)), st.integers(0, 1023))
def test_encode_is_searchsorted(codec, rho, nudge):
    near = (codec.edges.view(np.int32) + nudge - 512).view(np.float32)
    values = np.concatenate([rho, codec.edges, np.nextafter(codec.edges, np.float32(0)), near])
    np.testing.assert_array_equal(codec.encode(values), np.searchsorted(codec.edges, values, side="right"))


def test_fitted_codec_encodes_as_searchsorted_over_many_chunks(codec):
    values = np.concatenate([RHO, codec.edges, np.nextafter(codec.edges, np.float32(0)), [0, -1, 1e30]])
    values = values.astype(np.float32)
    ids = codec.encode(values)
    assert ids.dtype == np.uint16
    np.testing.assert_array_equal(ids, np.searchsorted(codec.edges, values, side="right"))
    # The shape and the memory order of the input do not matter.
    block = RHO[:24_000].reshape(20, 30, 40)
    np.testing.assert_array_equal(codec.encode(block.transpose(2, 0, 1)), codec.encode(block).transpose(2, 0, 1))


def test_zero_has_a_bin_of_its_own_and_counts_and_range_are_those_of_the_fit(codec):
    smallest = np.float32(np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(codec.encode(np.array([0.0, smallest], np.float32)), [0, 1])
    assert codec.medians[0] == codec.means[0] == 0
    assert codec.fit["counts"][0] == 1000
    low, high = codec.fitted_range
    assert high == RHO.max() and RHO.min() * (1 - 2e-4) <= low <= RHO.min()
    # Edges lie on those of fine bins, so that the lookup alone gives the bin, without a comparison for each voxel.
    assert not np.any(codec.edges.view(np.uint32) & ((1 << SHIFT) - 1))
    ids = codec.encode(np.concatenate([RHO, np.zeros(1000, np.float32)]))
    np.testing.assert_array_equal(np.bincount(ids, minlength=codec.n_density_tokens), codec.fit["counts"])
    assert codec.fit["n_voxels"] == len(RHO) + 1000


def test_tables_are_medians_and_means_of_the_bins_and_floors_the_error_of_the_round_trip(histogram):
    absolute, squared = (fit_codec(histogram, 64, objective) for objective in OBJECTIVES)
    for codec in (absolute, squared):
        ids = codec.encode(RHO)
        for k in range(1, 64):
            assert codec.means[k] == pytest.approx(RHO[ids == k].mean(dtype=np.float64), rel=1e-6)
            # Any value between the two middle voxels is a median.
            low, high = (np.quantile(RHO[ids == k], 0.5, method=side) for side in ("lower", "higher"))
            assert low * (1 - 2.0**-13) <= codec.medians[k] <= high * (1 + 2.0**-13)
        for decoder, floor in codec.fit["nmae_floor"][codec.objective].items():
            assert nmae(codec, decoder) == pytest.approx(floor, rel=2e-3)
    # Each is best at its own error.
    assert absolute.fit["nmae_floor"] == squared.fit["nmae_floor"]
    assert nmae(absolute, "median") < 0.95 * nmae(squared, "median")
    assert nmae(absolute, "median") < nmae(absolute, "mean")
    means = [codec.decode(codec.encode(RHO), "mean").astype(np.float64) for codec in (absolute, squared)]
    assert ((means[1] - RHO) ** 2).sum() < 0.95 * ((means[0] - RHO) ** 2).sum()


def test_few_distinct_values_are_kept_exactly():
    values = np.array([1e-3, 0.5, 0.7, 2.0, 300.0], np.float32)
    histogram = DensityHistogram()
    histogram.add(np.repeat(values, [5, 1, 9, 2, 1]))
    codec = fit_codec(histogram, 6)
    for decoder in ("median", "mean"):
        np.testing.assert_array_equal(codec.decode(codec.encode(values), decoder), values)
    with pytest.raises(TomatError, match="at most 6 bins"):
        fit_codec(histogram, 7)


def test_numbers_out_of_range_are_refused(histogram, codec):
    for n_bins in (1, 65_537):
        with pytest.raises(TomatError, match="2 to 65,536"):
            fit_codec(histogram, n_bins)
    for ids in ([256], [-1]):
        with pytest.raises(TomatError, match="0 to 255"):
            codec.decode(np.array(ids))
    with pytest.raises(TomatError, match="decoder 'mode'"):
        codec.decode(np.array([1]), "mode")


def test_hash_covers_all_that_decides_the_ids_and_densities(codec):
    other = [
        dataclasses.replace(codec, unit="rho_times_volume"),
        dataclasses.replace(codec, objective="squared"),
        dataclasses.replace(codec, means=codec.medians),
        dataclasses.replace(codec, medians=codec.means),
        dataclasses.replace(codec, edges=np.nextafter(codec.edges, np.float32(0))),
    ]
    assert len({codec.sha256, *(each.sha256 for each in other)}) == 6
    assert dataclasses.replace(codec, fit={}).sha256 == codec.sha256


def test_file_of_another_kind_version_or_unit_is_refused(codec, tmp_path):
    for change, message in (
        ({"kind": "huffman"}, "kind is 'huffman'"),
        ({"kind": ["huffman"]}, "kind is .'huffman'.,"),
        ({"format_version": 99}, "format version 99"),
        ({"unit": "bohr"}, "codec.json is a damaged codec: .*unit 'bohr'"),
        ({"means": codec.to_dict()["means"][::-1]}, "codec.json is a damaged codec: .*strictly increasing"),
    ):
        (tmp_path / "codec.json").write_text(json.dumps(codec.to_dict() | change))
        with pytest.raises(TomatError, match=message):
            load_codec(tmp_path / "codec.json")


def test_codec_of_before_there_was_a_checksum_is_read(codec, tmp_path):
    content = codec.to_dict()
    del content["fitted_min"]
    (tmp_path / "codec.json").write_text(json.dumps(content))
    found = load_codec(tmp_path / "codec.json")
    assert found.sha256 == codec.sha256 and found.fitted_range == (0.0, codec.fitted_max)
    (tmp_path / "codec.json").write_text(json.dumps(content | {"fitted_maw": 1.0}))
    with pytest.raises(TomatError, match="no checksum, and an unknown key 'fitted_maw'"):
        load_codec(tmp_path / "codec.json")


def test_densities_that_no_fit_saw_are_refused(codec):
    for low, high in ((0.1, np.nan), (0.1, np.inf), (np.nan, 1e9), (-0.1, 1e9), (1e10, 1e9), (0.0, 1e-3)):
        with pytest.raises(TomatError, match="says it saw densities from"):
            dataclasses.replace(codec, fitted_min=low, fitted_max=high)
