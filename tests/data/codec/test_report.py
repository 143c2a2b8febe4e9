import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.data.codec.report import codec_figures, draw_codec, relative_widths


@pytest.fixture(scope="module")
def codec():
    histogram = DensityHistogram()
    histogram.add(np.random.default_rng(0).lognormal(-1, 1, 50_000).astype(np.float32))
    histogram.add(np.zeros(50_000, np.float32))
    return fit_lloyd_max(histogram, 100, "squared")


def test_figures(codec):
    figures = codec_figures(codec)
    assert figures["zero_share"] == 0.5 and figures["n_voxels"] == 100_000
    assert figures["n_density_tokens"] == 100 and figures["objective"] == "squared"
    assert figures["nmae_floor_fraction"] == codec.fit["nmae_floor"]
    widths = figures["relative_bin_width_by_voxel"]
    assert 0 < widths["p10"] <= widths["p50"] <= widths["p90"] <= widths["p99"]
    # The median voxel's bin, counted voxel by voxel.
    ids = codec.encode(np.random.default_rng(0).lognormal(-1, 1, 50_000).astype(np.float32))
    ids = ids[(ids > 0) & (ids < 99)]
    assert widths["p50"] == pytest.approx(np.median(relative_widths(codec)[ids - 1]), rel=1e-6)


def test_picture_is_the_same_twice_and_of_two_formats(codec, tmp_path):
    for suffix in (".svg", ".png"):
        for name in ("a", "b"):
            draw_codec(codec, tmp_path / f"{name}{suffix}")
        first, second = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("a", "b"))
        assert first == second and len(first) > 10_000
    with pytest.raises(TomatError, match=r"\.svg or \.png, not a\.gif"):
        draw_codec(codec, tmp_path / "a.gif")
    assert len(list(tmp_path.iterdir())) == 4
