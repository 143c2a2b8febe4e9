"""The embedded densities as shard sets."""

from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Literal

from tomat.base.errors import TomatError
from tomat.base.reporting import tell
from tomat.base.storage import Store
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.density.demo.embedded import CRYSTALS, SPLITS, demo_materials, grid_shapes, load_demo, load_stored
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, PromoleculeFit
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.manifest import ShardManifest
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.writer import read_plan, stored_codec, stored_promolecule

EmbeddedGrid = Literal["refined", "stored"]
EMBEDDED_GRIDS: tuple[EmbeddedGrid, ...] = ("refined", "stored")


@cache
def _stored(material_id: str) -> DensityGrid:
    """One density on its stored grid. Values that rounding left below zero are set to zero, as on refined grids."""
    stored = load_stored(material_id)
    return stored if stored.rho.min() >= 0 else stored.refined(stored.grid_shape, clip_negative=True)


LOADERS: Mapping[EmbeddedGrid, Callable[[str], DensityGrid]] = {"refined": load_demo, "stored": _stored}
SEED = 0
"""Seed of the patches' anchors: the demo's data are the same in every run."""


def write_demo_shards(
    folder: Path,
    layout: SequenceLayout,
    n_density_tokens: int,
    objective: Literal["absolute", "squared"],
    patches_per_material: int,
    relative: bool = False,
    grid: EmbeddedGrid = "refined",
    groups: Collection[str] = (CRYSTALS,),
    left_out: Collection[str] = (),
    promolecule: Promolecule | None = None,
) -> None:
    """Write a shard set of the embedded training densities of some groups, without the compounds left out, and one of
    the ten held-out cells, unless they are there. The codec, `relative` to the promolecule or not, and the promolecule,
    if none is given, are fitted to the training densities."""
    train, held_out = SPLITS
    chosen = {train: demo_materials(train, groups, left_out), held_out: demo_materials(held_out)}
    names = {split: [material.material_id for material in materials] for split, materials in chosen.items()}
    plans = {split: read_plan(Store(folder / split)) for split in SPLITS}
    for split, plan in plans.items():
        if plan is not None:
            _check_made_as_asked(folder / split, plan, grid, set(names[split]), objective)
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
                tell(
                    f"note: {folder / split} holds {len(held[split])} embedded densities, from an earlier version or "
                    f"without some compounds, but {len(names[split])} are asked for now; the run goes on with those "
                    "that it began with.",
                    soft_wrap=True,
                )
        return
    groups, left_out = tuple(groups), tuple(left_out)
    if promolecule is None:
        promolecule = fit_demo_promolecule(groups, left_out)
    of_codec = promolecule if relative else None
    codec = fit_demo_codec(n_density_tokens, objective, of_codec, grid, groups, left_out)
    settings = {"layout": layout, "patches_per_material": patches_per_material, "seed": SEED}
    for split, plan in plans.items():
        place = folder / split
        # An existing set keeps its own promolecule, or stays without one if it was made before there were any.
        its = promolecule if plan is None else stored_promolecule(Store(place), plan)
        write_shards(place, names[split], LOADERS[grid], codec=codec, promolecule=its, **settings)


def _check_made_as_asked(
    place: Path, plan: ShardManifest, grid: EmbeddedGrid, asked: Collection[str], objective: str
) -> None:
    """Refuse a set on the other grids, with compounds that are not asked for, or with bins for another error."""
    held = {each.material_id: each.grid_shape for each in plan.materials}
    of_grid = {kind: grid_shapes(kind) for kind in EMBEDDED_GRIDS}
    for name, shape in held.items():
        held_on = [kind for kind in EMBEDDED_GRIDS if of_grid[kind].get(name) == shape]
        if held_on and grid not in held_on:
            said = f"{place} holds the embedded densities on their {held_on[0]} grids"
            raise TomatError(f"{said}, and data.embedded_grid is {grid}; set it to that, or use another run_name.")
    again = "Use another run_name, or remove that folder to have it made again."
    if more := sorted(held.keys() & of_grid[grid].keys() - asked):
        said = f"{place} has {more[0]}, which data.groups and data.left_out do not ask for"
        raise TomatError(f"{said}. {again}")
    made_for = getattr(stored_codec(Store(place), plan), "objective", objective)
    if made_for != objective:
        said = f"{place} has bins for the {made_for} error, and data.codec_objective is {objective}"
        raise TomatError(f"{said}. {again}")


@cache
def fit_demo_codec(
    n_density_tokens: int,
    objective: Literal["absolute", "squared"],
    promolecule: Promolecule | None,
    grid: EmbeddedGrid,
    groups: tuple[str, ...],
    left_out: tuple[str, ...] = (),
) -> LloydMaxCodec:
    """The codec of the embedded training densities, relative to a promolecule if there is one; once in a process."""
    histogram = DensityHistogram() if promolecule is None else RatioHistogram(promolecule)
    for material in demo_materials("train", groups, left_out):
        histogram.add_grid(LOADERS[grid](material.material_id))
    return fit_codec(histogram, n_density_tokens, objective)


@cache
def fit_demo_promolecule(groups: tuple[str, ...], left_out: tuple[str, ...] = ()) -> Promolecule:
    """The promolecule of the embedded training densities. It is fitted on refined grids, whatever the grid of the rows,
    so that it is the same. Takes some 20 s of processor time for all groups, once per process."""
    fit = PromoleculeFit()
    for material in demo_materials("train", groups, left_out):
        fit.add(load_demo(material.material_id))
    return fit.solve()
