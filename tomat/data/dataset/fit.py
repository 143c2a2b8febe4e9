"""Codec and promolecule of the training densities of a folder: both in one pass over them, which can be stopped."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.reporting import console, write_bytes, write_text
from tomat.data.codec.files import load_codec, write_codec
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.inputs import SAVE_EVERY_SECONDS
from tomat.data.codec.lloyd_max import LloydMaxCodec, Objective, fit_lloyd_max
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, PromoleculeFit

HISTOGRAM_FILE, SUMS_FILE = "histogram.npz", "promolecule.sums"
CODEC_FILE, PROMOLECULE_FILE = "codec.json", "promolecule.json"
FEWEST_BINS = 32
_REMEDY = "Remove it and run the same command again."


def fit_codec_and_promolecule(
    names: Sequence[str],
    load: Callable[[str], DensityGrid],
    folder: Path,
    *,
    most_bins: int,
    objective: Objective,
    floor: float,
    valences: Callable[[], Mapping[int, float]],
) -> tuple[LloydMaxCodec, Promolecule]:
    """Fit both, or read those that were fitted before."""
    if not names:
        raise TomatError("there is no density to learn from; lower data.validation_share.")
    codec_file, promolecule_file = folder / CODEC_FILE, folder / PROMOLECULE_FILE
    if codec_file.exists() and promolecule_file.exists():
        codec = load_codec(codec_file)
        assert isinstance(codec, LloydMaxCodec)
        return codec, Promolecule.load(promolecule_file)
    known = valences()
    kept_histogram, kept_sums = folder / HISTOGRAM_FILE, folder / SUMS_FILE
    histogram = DensityHistogram.load(kept_histogram) if kept_histogram.exists() else DensityHistogram()
    sums = PromoleculeFit()
    if kept_sums.exists():
        sums = PromoleculeFit.from_bytes(kept_sums.read_bytes(), str(kept_sums), _REMEDY)
    saved = time.monotonic()
    with progress() as bar:
        for name in bar.track(names, description="Fitting codec and atoms"):
            grid = load(name)
            if name not in histogram.material_ids:
                histogram.add(grid.rho, name)
            if name not in sums.material_ids:
                sums.add(grid, material_id=name)
            if time.monotonic() - saved > SAVE_EVERY_SECONDS:
                histogram.save(kept_histogram)
                write_bytes(kept_sums, sums.to_bytes())
                saved = time.monotonic()
        promolecule = replace(sums.solve(), valences=known)
    codec = choose_codec(histogram, most_bins, objective, floor)
    write_text(promolecule_file, promolecule.to_text())
    write_codec(codec, codec_file)
    for kept in (kept_histogram, kept_sums):
        kept.unlink(missing_ok=True)
    return codec, promolecule


def choose_codec(histogram: DensityHistogram, most_bins: int, objective: Objective, floor: float) -> LloydMaxCodec:
    """The codec with the fewest bins, a power of two, whose NMAE floor on the densities is below `floor`.

    What no model can go below should be small beside what models reach, and every bin is one more answer to learn from
    the same patches. The floor of Lloyd-Max bins halves with twice as many. `floor`: NMAE, a fraction.
    """
    bins = min(FEWEST_BINS, most_bins)
    while True:
        codec = fit_lloyd_max(histogram, bins, objective)
        found = codec.fit["nmae_floor"][objective]["median"]
        if found < floor or bins >= most_bins:
            break
        bins = min(2 * bins, most_bins)
    what = f"{bins:,} bins, whose rounding alone costs an NMAE of {100 * found:.2g} %"
    if found >= floor:
        what += f"; {100 * floor:g} % was asked for, and data.n_density_tokens allows no more"
    console.print(f"codec: {what}")
    return codec
