"""Figures of a codec as a mapping, and its picture."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, Positive, typed
from tomat.base.reporting import replacing
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.lloyd_max import OBJECTIVES, LloydMaxCodec, Objective
from tomat.data.codec.relative import RelativeCodec


def codec_figures(codec: DensityCodec, source: str | Path) -> dict[str, Any]:
    """Figures of the codec in file `source`, JSON-ready, with units in the keys ("unit" is the codec's own). A
    Lloyd-Max codec also has its number of voxels, quantiles over voxels of the relative bin width, and the NMAE floors
    of both objectives. In a relative codec the range and the edges are ratios."""
    figures: dict[str, Any] = {
        "kind": codec.to_dict()["kind"],
        "sha256": codec.sha256,
        "unit": codec.unit,
        "n_density_tokens": codec.n_density_tokens,
        "tokens_per_voxel": codec.tokens_per_voxel,
    }
    if not isinstance(codec, LloydMaxCodec):
        return figures | {"smallest_density": codec.fitted_range[0], "largest_density": codec.fitted_range[1]}
    fit = fit_of(codec, source)
    counts = np.array(fit.counts, dtype=np.int64)
    width = relative_widths(codec)
    order = np.argsort(width)
    below = np.cumsum(counts[1:-1][order]) / max(int(counts[1:-1].sum()), 1)
    quantiles = {
        f"p{percent}": float(width[order][min(np.searchsorted(below, percent / 100), len(order) - 1)])
        for percent in (10, 50, 90, 99)
        if len(order)
    }
    if isinstance(codec, RelativeCodec):
        filled, first, what = counts, codec.edges[:1], "ratio"
        figures |= {"promolecule_sha256": codec.promolecule.sha256, "offset_e_per_A3": codec.offset_e_per_a3}
    else:
        filled, first, what = counts[1:], codec.edges[1:2], "density"
        figures |= {"zero_share": float(counts[0] / counts.sum())}
    return figures | {
        "objective": codec.objective,
        "n_voxels": fit.n_voxels,
        f"smallest_{what}": codec.fitted_min or None,
        f"largest_{what}": codec.fitted_max,
        "smallest_edge": float(first[0]) if len(first) else None,
        "last_edge": float(codec.edges[-1]),
        "relative_bin_width_by_voxel": quantiles,
        "voxels_per_bin_min": int(filled.min()),
        "voxels_per_bin_max": int(filled.max()),
        "fit_iterations": dict(fit.iterations),
        "nmae_floor_fraction": dict(fit.nmae_floor),
    }


class Floors(TypedDict):
    """NMAE with each reconstruction table, a fraction."""

    median: Amount
    mean: Amount


@dataclass(frozen=True)
class Fit:
    """How a codec was fitted, as `fit_codec` records it."""

    n_voxels: Positive
    counts: list[Count]
    iterations: Mapping[Objective, Count]
    nmae_floor: Mapping[Objective, Floors]

    def __post_init__(self) -> None:
        if not sum(self.counts) or len(self.nmae_floor) < len(OBJECTIVES):
            raise ValueError("expected voxels in its counts, and the floors of both objectives")


def fit_of(codec: LloydMaxCodec, source: str | Path) -> Fit:
    how = "Fit it again with `tomat codec fit`."
    if not codec.fit:
        raise TomatError(f"{source} does not say how its codec was fitted. {how}")
    fit = typed(dict(codec.fit), Fit, f"{source}: how the codec was fitted", how)
    if len(fit.counts) != (n := codec.n_density_tokens):
        raise TomatError(f"{source} counts the voxels of {len(fit.counts):,} bins; expected {n:,}, the codec's. {how}")
    return fit


def relative_widths(codec: LloydMaxCodec) -> np.ndarray:
    """float64 [n_bins - 2]: width over median of each bin between two edges, so without the first and the last bin."""
    edges = codec.edges.astype(np.float64)
    return np.diff(edges) / codec.medians[1:-1]


def draw_codec(codec: LloydMaxCodec, path: Path, source: str | Path) -> None:
    """Draw the shares of voxels and of bins per decade, and how wide the bins are. Errors name the file `source`."""
    if path.suffix not in (".svg", ".png"):
        raise TomatError(f"A picture is .svg or .png, not {path.name}.")
    import matplotlib
    from matplotlib.figure import Figure

    medians = codec.medians[2:-1].astype(np.float64)
    edges = np.log10(codec.edges[1:].astype(np.float64))
    fit = fit_of(codec, source)
    share = np.array(fit.counts, dtype=np.float64)[2:-1] / fit.n_voxels
    bounds = np.arange(np.floor(edges[0] * 10), np.ceil(edges[-1] * 10) + 1) / 10
    mass, _ = np.histogram(np.log10(medians), bounds, weights=share)
    bins, _ = np.histogram(np.log10(medians), bounds, weights=np.full(len(medians), 1 / codec.n_density_tokens))
    axis = "density, e/Å³" if codec.unit == "e_per_A3" else "density, density x cell volume"
    if isinstance(codec, RelativeCodec):
        axis = f"(density + {codec.offset_e_per_a3:g}) / (sum of atoms + {codec.offset_e_per_a3:g})"
    # A fixed salt and no date: the same codec draws the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "tomat", "svg.fonttype": "path"}):
        figure = Figure(figsize=(7, 5.5), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True)
        upper.stairs(mass * 10, 10**bounds, label="voxels", fill=True, color="#b8c4d6")
        upper.stairs(bins * 10, 10**bounds, label="bins", color="#a4262c")
        upper.set_ylabel("share per decade")
        upper.legend(frameon=False)
        floor = fit.nmae_floor[codec.objective]["median"]
        title = f"{codec.n_density_tokens:,} bins, {codec.objective} error; NMAE floor {100 * floor:.3g} %"
        upper.set_title(title, fontsize=10)
        lower.plot(medians, 100 * relative_widths(codec)[1:], linewidth=0.8, color="#a4262c")
        lower.set(xscale="log", yscale="log", xlabel=axis, ylabel="bin width, % of median")
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=120, metadata=metadata)
