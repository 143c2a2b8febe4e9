"""The embedded densities as shard sets."""

from pathlib import Path
from typing import Literal

from tomat.codec.histogram import DensityHistogram
from tomat.codec.lloyd_max import fit_lloyd_max
from tomat.density.demo.embedded import SPLITS, demo_materials, load_demo
from tomat.tokens.layouts import SequenceLayout
from tomat.tokens.writer import write_shards

SEED = 0
"""Seeds the anchors of the patches: the demo's data are the same in every run."""


def write_demo_shards(
    folder: Path,
    layout: SequenceLayout,
    n_density_tokens: int,
    objective: Literal["absolute", "squared"],
    patches_per_material: int,
) -> None:
    """Fit a codec to the embedded training densities and write a set for each split below `folder`, unless it is there.

    Args:
        folder: Gets `train` and `validation`.
        layout: The sequence layout.
        n_density_tokens: Bins of the codec.
        objective: What the codec minimises.
        patches_per_material: Patches drawn from each cell.
    """
    histogram = DensityHistogram()
    for material in demo_materials("train"):
        histogram.add(load_demo(material.material_id).rho)
    codec = fit_lloyd_max(histogram, n_bins=n_density_tokens, objective=objective)
    for split in SPLITS:
        write_shards(
            str(folder / split),
            [material.material_id for material in demo_materials(split)],
            load_demo,
            layout=layout,
            codec=codec,
            patches_per_material=patches_per_material,
            seed=SEED,
        )
