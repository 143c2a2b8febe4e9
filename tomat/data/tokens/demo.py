"""The embedded densities as shard sets."""

from functools import cache
from pathlib import Path
from typing import Literal

from tomat.base.reporting import console
from tomat.base.storage import Store
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.density.demo.embedded import SPLITS, demo_materials, load_demo
from tomat.data.density.promolecule import Promolecule, PromoleculeFit
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.writer import read_plan, stored_promolecule

SEED = 0
"""Seeds the anchors of the patches: the demo's data are the same in every run."""


def write_demo_shards(
    folder: Path,
    layout: SequenceLayout,
    n_density_tokens: int,
    objective: Literal["absolute", "squared"],
    patches_per_material: int,
    relative: bool = False,
) -> None:
    """Fit codec, `relative` to the promolecule or not, and promolecule to the embedded training densities; write a set
    for each split, unless it is there."""
    names = {split: [material.material_id for material in demo_materials(split)] for split in SPLITS}
    plans = {split: read_plan(Store(folder / split)) for split in SPLITS}
    asked = (True, layout, n_density_tokens, patches_per_material, SEED)
    held = {
        split: [material.material_id for material in plan.materials]
        for split, plan in plans.items()
        if plan and (plan.complete, plan.layout, plan.n_density_tokens, plan.patches_per_material, plan.seed) == asked
    }
    if len(held) == len(SPLITS):
        # An earlier version of the embedded densities had fewer: a run goes on with the rows that it began with.
        for split in SPLITS:
            if held[split] != names[split]:
                console.print(
                    f"note: {folder / split} holds {len(held[split])} materials of an earlier version of the embedded "
                    f"densities, which are {len(names[split])} now; the run goes on with those that it began with.",
                    soft_wrap=True,
                )
        return
    codec = fit_demo_codec(n_density_tokens, objective, relative)
    settings = {"layout": layout, "patches_per_material": patches_per_material, "seed": SEED}
    for split, plan in plans.items():
        place = folder / split
        # A set that is there keeps its own, or goes on without, if it is from before there were such.
        promolecule = fit_demo_promolecule() if plan is None else stored_promolecule(Store(place), plan)
        write_shards(place, names[split], load_demo, codec=codec, promolecule=promolecule, **settings)


@cache
def fit_demo_codec(
    n_density_tokens: int, objective: Literal["absolute", "squared"], relative: bool = False
) -> LloydMaxCodec:
    """The codec of the embedded training densities; once in a process."""
    histogram = RatioHistogram(fit_demo_promolecule()) if relative else DensityHistogram()
    for material in demo_materials("train"):
        histogram.add_grid(load_demo(material.material_id))
    return fit_codec(histogram, n_density_tokens, objective)


@cache
def fit_demo_promolecule() -> Promolecule:
    """The promolecule of the embedded training densities; 2 s of processor time, once in a process."""
    fit = PromoleculeFit()
    for material in demo_materials("train"):
        fit.add(load_demo(material.material_id))
    return fit.solve()
