"""Speed and memory of re-tokenising, for `tomat bench tokenise`."""

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.storage import Store
from tomat.bench.retokenize_workers import LEAST_MATERIALS, measure_workers
from tomat.codec.base import DensityCodec
from tomat.codec.histogram import DensityHistogram
from tomat.codec.lloyd_max import LloydMaxCodec
from tomat.density.grid import DensityGrid
from tomat.density.zarr_store import write_zarr
from tomat.tokens.manifest import plan_rows
from tomat.tokens.pipeline.config import RetokenizeConfig
from tomat.tokens.pipeline.sources import find_materials
from tomat.tokens.pipeline.stages import SurveyUnit, fit_codec, survey_unit, write_unit, write_units
from tomat.tokens.writer import start_shards

SIDE = 100
LARGEST_GRID = (448, 448, 110)
"""The largest grid of the Materials Project set."""
PATCHES = 64

_LARGEST_RUN = """
import resource, sys
from tomat.tokens.pipeline.config import RetokenizeConfig
from tomat.tokens.pipeline.driver import retokenize
from tomat.tokens.pipeline.pool import PoolRunner
retokenize(RetokenizeConfig(input=sys.argv[1], output=sys.argv[2], bins=16384), PoolRunner(1))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def lattice_of_gaussians(shape: tuple[int, int, int], n_atoms: int, seed: int, name: str) -> DensityGrid:
    """A density like that of a crystal in what matters here: smooth, spanning several orders of magnitude, an electron
    count that is whole. `n_atoms` silicon atoms of four electrons, at a spacing of 0.065 A."""
    rng = np.random.default_rng(seed)
    lattice = np.diag(0.065 * np.array(shape))
    # On a mesh of at least 2.1 A, some sites of which stay empty: no two atoms are closer than a bond.
    mesh = np.floor(np.diag(lattice) / 2.1).astype(int)
    sites = np.indices(mesh.tolist()).reshape(3, -1).T / mesh
    coords = (rng.choice(sites, n_atoms, replace=False) + rng.uniform(0, 1, 3)) % 1
    # A product of periodic functions of one axis each; a sum over atoms of such is cheap for any grid.
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


def measure_speed(folder: Path, n_materials: int, rounds: int) -> dict[str, Any]:
    """Survey and write on grids of 100^3 with one worker and with two, and parts of the work alone.

    CPU seconds are those of one process with all its threads; wall time on a shared machine is longer.

    Args:
        folder: where to write.
        n_materials: grids to write, at least `LEAST_MATERIALS`.
        rounds: turns of one worker and of two.

    Raises:
        TomatError: for fewer materials.
    """
    if n_materials < LEAST_MATERIALS:
        raise TomatError(f"--materials is {n_materials}; expected at least {LEAST_MATERIALS} (0 leaves the speed out).")
    source = folder / "in"
    for k in range(n_materials):
        write_zarr(lattice_of_gaussians((SIDE, SIDE, SIDE), 12, k % 4, f"m{k:04d}"), source / f"m{k:04d}.zarr")
    config = RetokenizeConfig(input=str(source), output=str(folder / "one"))
    store, materials = Store(config.output, config.storage_tries), find_materials(config)
    # As in a large set, one histogram for many materials.
    unit = SurveyUnit(0, materials)
    survey_wall, survey_cpu = _timed(lambda: survey_unit(config, unit))
    codec = fit_codec(config, store, [unit])
    plan = plan_rows(
        [(material.material_id, (SIDE,) * 3) for material in materials],
        layout=config.sequence_layout,
        codec=codec,
        patches_per_material=PATCHES,
        seed=0,
    )
    start_shards(store, plan, codec)
    chunks = write_units(plan, materials, range(plan.n_chunks))
    # A worker reads the plan and the codec once; what it does for hours comes after.
    write_unit(config, codec.sha256, chunks[0])
    write_wall, write_cpu = _timed(lambda: [write_unit(config, codec.sha256, unit) for unit in chunks])
    grid = materials[0].read(1)
    histogram = DensityHistogram()
    histogram_wall, histogram_cpu = _timed(lambda: [histogram.add(grid.rho) for _ in range(20)])
    read_wall, read_cpu = _timed(lambda: [material.read(1) for material in materials])
    plain_wall, plain_cpu = _timed(lambda: _plain_encode(grid, codec, plan.anchors(plan.materials[0])))
    voxels, patches = n_materials * SIDE**3, n_materials * PATCHES
    return {
        "grid_voxels": SIDE**3,
        "materials": n_materials,
        "patches_per_material": PATCHES,
        "write_patches_per_second": patches / write_wall,
        "write_patches_per_cpu_second": patches / write_cpu,
        "survey_voxels_per_second": voxels / survey_wall,
        "survey_voxels_per_cpu_second": voxels / survey_cpu,
        "histogram_voxels_per_second": 20 * SIDE**3 / histogram_wall,
        "histogram_voxels_per_cpu_second": 20 * SIDE**3 / histogram_cpu,
        "read_materials_per_cpu_second": n_materials / read_cpu,
        "read_materials_per_second": n_materials / read_wall,
        "numpy_searchsorted_patches_per_cpu_second": PATCHES / plain_cpu,
        "numpy_searchsorted_patches_per_second": PATCHES / plain_wall,
        "write_over_numpy_searchsorted_cpu_ratio": (patches / write_cpu) / (PATCHES / plain_cpu),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    } | measure_workers(config, codec.sha256, chunks, rounds)


def _plain_encode(grid: DensityGrid, codec: DensityCodec, anchors: np.ndarray) -> None:
    """The patches of one grid by `np.searchsorted`, no reading, no atoms, no writing: what a plain tokeniser takes."""
    assert isinstance(codec, LloydMaxCodec)
    for anchor in anchors:
        np.searchsorted(codec.edges, grid.patch(anchor, (19, 19, 19)), side="right")


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure_largest(folder: Path) -> dict[str, Any]:
    """Peak memory of a process that surveys, fits and writes one material on the largest grid."""
    source = folder / "largest_in"
    write_zarr(lattice_of_gaussians(LARGEST_GRID, 88, 0, "largest"), source / "largest.zarr")
    done = subprocess.run(
        [sys.executable, "-c", _LARGEST_RUN, str(source), str(folder / "largest_out")],
        check=True,
        capture_output=True,
        text=True,
    )
    return {"largest_grid_voxels": int(np.prod(LARGEST_GRID)), "largest_peak_rss_bytes": int(done.stdout.split()[-1])}
