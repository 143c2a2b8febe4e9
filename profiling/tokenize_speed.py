"""Measures patches and voxels a second of one worker of re-tokenizing, and its memory.

Every figure and its reference are measured in the same run. On a machine that others use too, the ratios are still
valid, and the absolute figures are a lower bound.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from own_process import in_own_process

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, count, report_file
from tomat.base.errors import TomatError
from tomat.base.memory import peak_memory_bytes
from tomat.base.report.terminal import show
from tomat.base.reporting import write_report, writing
from tomat.base.storage import Store
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import LloydMaxCodec
from tomat.data.density.grid import DensityGrid
from tomat.data.density.zarr_store import write_zarr
from tomat.data.tokens.manifest import ShardManifest
from tomat.data.tokens.pipeline.config import RetokenizeConfig, ShardJob
from tomat.data.tokens.pipeline.driver import retokenize
from tomat.data.tokens.pipeline.runners import PoolRunner
from tomat.data.tokens.pipeline.sources import find_materials
from tomat.data.tokens.pipeline.stages import (
    SurveyUnit,
    WriteUnit,
    plan_set,
    stored_findings,
    survey_unit,
    unit_survey,
    unit_writer,
    write_units,
)
from tomat.data.tokens.writer import start_shards

SIDE = 100
LARGEST_GRID = (448, 448, 110)
"""The largest grid of the Materials Project set."""
PATCHES = 64
SCATTERED = "scattered-8192"
"""Layout that is written besides the patches of `v3-p19`, with as many rows for each material."""

FIRST_GENERATION_PATCHES_PER_SECOND = 27.0
"""Rate of the first generation's tokenizer on one core of such a machine, P = 19, M = 64."""
TRAINING_MATERIALS = 77_498
TRAINING_MEDIAN_VOXELS = 1.26e6
"""Materials Project training set; the grids of this benchmark have 1.00e6 voxels."""
CORE_HOUR_USD = 0.0335
"""An assumption, to be replaced by your own price: about $0.134 an hour for the four vCPUs of an e2-standard-4
(list: cloud.google.com/compute/vm-instance-pricing). Only the projected cost depends on it."""


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        prog="python profiling/tokenize_speed.py",
        description="Patches and voxels a second of re-tokenizing by one worker, the parts of its work alone, and its "
        "memory. Two workers against one: `profiling/retokenize_workers.py`; kills: `profiling/retokenize_kills.py`.",
    )
    add_flag(parser, "--materials", 24, "grids of 100^3", type=count)
    parser.add_argument("--largest", action="store_true", help="also the memory of a worker on 448 x 448 x 110")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --materials 4",)
    return parser


def run(args: argparse.Namespace) -> int:
    if not (args.materials or args.largest):
        raise TomatError("--materials is 0 and --largest is not given, which measures nothing; give one of them.")
    with scratch(args.folder) as folder:
        figures: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0)), "load_average_1min": os.getloadavg()[0]}
        if args.materials:
            figures |= measure_speed(folder, args.materials)
        if args.largest:
            source = folder / "largest_in"
            write_zarr(lattice_of_gaussians(LARGEST_GRID, 88, 0, "largest"), source / "largest.zarr")
            config = RetokenizeConfig(input=str(source), output=str(folder / "largest_out"))
            work = partial(_retokenize_alone, config)
            peak = in_own_process(work, "the worker on the largest grid", "leave out --largest")
            figures |= {"largest_grid_voxels": prod(LARGEST_GRID), "largest_peak_rss_bytes": peak}
    show_figures(figures)
    write_report(args.json, figures)
    return 0


@contextmanager
def scratch(folder: Path | None) -> Iterator[Path]:
    """A temporary folder in this one, which is made where it is missing; None: in the system's."""
    if folder is not None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        yield Path(name)


def show_figures(figures: Mapping[str, Any]) -> None:
    for key, value in figures.items():
        show(f"{key:42s} {value:,.4g}" if isinstance(value, float) else f"{key:42s} {value}")


def lattice_of_gaussians(shape: tuple[int, int, int], n_atoms: int, seed: int, name: str) -> DensityGrid:
    """A density that resembles a crystal's: smooth, over several orders of magnitude, with a whole number of electrons.
    It has `n_atoms` silicon atoms of four electrons, at a spacing of 0.065 A."""
    rng = np.random.default_rng(seed)
    lattice = np.diag(0.065 * np.array(shape))
    # Atoms are on a mesh of at least 2.1 A with some empty sites, so no two atoms are closer than a bond.
    mesh = np.floor(np.diag(lattice) / 2.1).astype(int)
    sites = np.indices(mesh.tolist()).reshape(3, -1).T / mesh
    coords = (rng.choice(sites, n_atoms, replace=False) + rng.uniform(0, 1, 3)) % 1
    # An atom is a product of periodic functions of one axis each, so the sum over atoms is cheap for any grid.
    rho = np.full(shape, 1e-4, dtype=np.float32)
    for atom in coords:
        x, y, z = (
            np.exp((np.cos(2 * np.pi * (np.arange(n) / n - at)) - 1) * 6).astype(np.float32)
            for n, at in zip(shape, atom, strict=True)
        )
        rho += np.einsum("i,j,k->ijk", x, y, z)
    volume_a3 = float(np.linalg.det(lattice))
    rho *= np.float32(4 * n_atoms / (rho.mean(dtype=np.float64) * volume_a3))
    return DensityGrid(rho, lattice, np.full(n_atoms, 14), coords, material_id=name)


def write_grids(folder: Path, n_materials: int) -> tuple[RetokenizeConfig, SurveyUnit]:
    """Write grids of 100^3 into `folder`. Returns the configuration of the set, and one survey unit with all grids.

    As in a large set, there is one histogram for many materials.
    """
    source = folder / "in"
    for k in range(n_materials):
        write_zarr(lattice_of_gaussians((SIDE, SIDE, SIDE), 12, k % 4, f"m{k:04d}"), source / f"m{k:04d}.zarr")
    config = RetokenizeConfig(input=str(source), output=str(folder / "one"))
    return config, SurveyUnit(0, tuple(find_materials(config)))


def start_set(
    job: ShardJob, surveyed: SurveyUnit
) -> tuple[tuple[ShardManifest, DensityCodec], list[WriteUnit], Callable[[WriteUnit], int]]:
    """Plan and begin the set of the surveyed materials. Returns (plan, codec), the write units, and their writer."""
    store = Store(job.output, job.storage_tries)
    planned = plan_set(job, [stored_findings(job, store, surveyed, unit_survey(store, surveyed))])
    plan, codec, _, _ = planned
    start_shards(store, *planned)
    units = write_units(plan, surveyed.materials, range(plan.n_chunks))
    return (plan, codec), units, unit_writer(store, job.storage_tries)


def measure_speed(folder: Path, n_materials: int) -> dict[str, Any]:
    """Time the survey and write stages on grids of 100^3 with one worker, and parts of the work alone, and project the
    CPU time to the whole training set.

    CPU seconds are those of one process with all its threads. Wall time on a shared machine is longer.
    """
    config, unit = write_grids(folder, n_materials)
    job, materials = ShardJob.of(config), unit.materials
    voxels, patches = n_materials * SIDE**3, n_materials * PATCHES
    figures = rates("survey_voxels", voxels, lambda: survey_unit(job, unit))
    (plan, codec), chunks, write_chunk = start_set(job, unit)
    # A worker reads the plan and the codec only once, so the first chunk is not timed.
    write_chunk(chunks[0])
    figures |= rates("write_patches", patches, lambda: [write_chunk(unit) for unit in chunks])
    # With the codec of the patches, so that it is not fitted again.
    given = {"codec": f"{config.output}/codec.json", "layout": SCATTERED, "output": str(folder / "scattered")}
    scattered = ShardJob.of(replace(config, **given))
    survey_unit(scattered, unit)
    (of_scattered, _), more, write_more = start_set(scattered, unit)
    write_more(more[0])
    rows = of_scattered.rows * of_scattered.context
    figures |= rates("write_scattered_voxels", rows, lambda: [write_more(unit) for unit in more])
    grid = materials[0].read(1)
    histogram = DensityHistogram()
    figures |= rates("histogram_voxels", 20 * SIDE**3, lambda: [histogram.add(grid.rho) for _ in range(20)])
    figures |= rates("read_materials", n_materials, lambda: [material.read(1) for material in materials])
    anchors = plan.anchors(plan.materials[0])
    assert isinstance(codec, LloydMaxCodec)
    edges = codec.edges

    def plain_encode() -> None:
        """Encode the patches without reading, atoms and writing, as a plain tokenizer does."""
        for anchor in anchors:
            np.searchsorted(edges, grid.patch(anchor, (19, 19, 19)), side="right")

    figures |= rates("numpy_searchsorted_patches", PATCHES, plain_encode)
    of_patches = plan.layout.n_voxels * figures["write_patches_per_cpu_second"]
    figures["write_patch_voxels_per_cpu_second"] = of_patches
    figures["scattered_over_patch_voxels_ratio"] = figures["write_scattered_voxels_per_cpu_second"] / of_patches
    write, plain = (figures[f"{what}_patches_per_cpu_second"] for what in ("write", "numpy_searchsorted"))
    training_voxels = TRAINING_MATERIALS * TRAINING_MEDIAN_VOXELS
    seconds = training_voxels * PATCHES / SIDE**3 / write
    seconds += training_voxels / figures["survey_voxels_per_cpu_second"]
    return {
        "grid_voxels": SIDE**3,
        "materials": n_materials,
        "patches_per_material": PATCHES,
        **figures,
        "write_over_numpy_searchsorted_cpu_ratio": write / plain,
        "peak_rss_bytes": peak_memory_bytes(),
        "against_first_generation_ratio": write / FIRST_GENERATION_PATCHES_PER_SECOND,
        "training_set_core_hours": seconds / 3600,
        "training_set_cost_usd": seconds / 3600 * CORE_HOUR_USD,
    }


def rates(what: str, number: int, work: Callable[[], object]) -> dict[str, float]:
    """Rates of a call that processes `number` of `what`: per second of wall time and per second of CPU time."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {f"{what}_per_second": number / wall, f"{what}_per_cpu_second": number / cpu}


def _retokenize_alone(config: RetokenizeConfig) -> int:
    """Write a set in this process alone. Returns its peak memory in bytes."""
    retokenize(config, PoolRunner(1))
    return peak_memory_bytes()


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
