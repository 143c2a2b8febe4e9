"""Voxels outside the codec are counted and said, and a material that they spoil is skipped."""

import numpy as np
import pytest

from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.data.codec.two_token import TwoTokenCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.writer import write_shards

SIDE = 12
LOW, HIGH = 0.05, 4.0
"""The densities that the codecs are made for, e/A^3."""
# A few voxels beyond the codec; a hundredth of all, ten times beyond; most of them far below.
NAMES = ("inside", "slightly", "above", "below")


def density(name: str) -> DensityGrid:
    rng = np.random.default_rng(0)
    rho = np.exp(rng.uniform(np.log(LOW), np.log(HIGH), (SIDE, SIDE, SIDE)))
    flat = rho.reshape(-1)
    if name == "slightly":
        flat[:2] = 1.1 * HIGH
    elif name == "above":
        flat[: flat.size // 100] = 10 * HIGH
    elif name == "below":
        flat[: flat.size * 9 // 10] = LOW / 4
    coords = np.array([[0.0, 0, 0], [0.5, 0.5, 0.5]])
    return DensityGrid(rho, np.diag([4.0, 4.0, 4.0]), np.array([14, 14]), coords, name)


def lloyd_max():
    histogram = DensityHistogram()
    histogram.add(np.geomspace(LOW, HIGH, 20_000, dtype=np.float32))
    return fit_lloyd_max(histogram, 1024)


CODECS = {
    "lloyd_max": (lloyd_max, SequenceLayout("small", "v3", 4, 160)),
    "two_token": (
        lambda: TwoTokenCodec("e_per_A3", float(np.log10(LOW)), float(np.log10(HIGH))),
        SequenceLayout("small-v2", "v2", 4, 260, 2),
    ),
}


@pytest.mark.parametrize("kind", CODECS)
def test_values_outside_the_codec_are_counted_and_refused_above_a_share(tmp_path, kind, figure):
    codec, layout = CODECS[kind][0](), CODECS[kind][1]
    manifest = write_shards(tmp_path, NAMES, density, layout=layout, codec=codec, patches_per_material=4, seed=0)
    reasons = {each.material_id: each.reason for each in manifest.skipped}
    counted = {each.material_id: each for each in getattr(manifest, "clipped", None) or ()}
    lost = {}
    for name in NAMES:
        rho = density(name).rho
        outside = (rho < LOW) | (rho > HIGH)
        lost[name] = float(np.abs(codec.decode(codec.encode(rho)) - rho)[outside].sum() / rho.sum())
        silent = "written without a word" if outside.any() else "written, there is nothing to say"
        said = "skipped" if name in reasons else "counted" if name in counted else silent
        figure(
            "A8",
            f"{kind}, material '{name}', {100 * np.mean(outside):.2g} % of its voxels and {100 * lost[name]:.2g} % of "
            "its electrons outside",
            said,
        )
    assert set(reasons) == {"above", "below"} and set(counted) == {"slightly"}
    assert (counted["slightly"].above_voxels, counted["slightly"].below_voxels) == (2, 0)
    assert counted["slightly"].electron_share == pytest.approx(lost["slightly"], rel=1e-4)
    assert f"{SIDE**3 // 100} above its largest" in reasons["above"]
    assert f"{SIDE**3 * 9 // 10:,} below its smallest" in reasons["below"]
    for name, reason in reasons.items():
        assert f"{100 * lost[name]:.3g} % of the electrons" in reason
