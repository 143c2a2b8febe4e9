"""Builds the embedded data set: computes every cell of `embedded_set_recipes.py`, stores it, writes the index.

The index is the state of the build. It is rewritten atomically after every cell. A build that is started again computes
only cells that are missing or whose recipe changed.
"""

import argparse
import json
import math
import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from embedded_set_cells import CellRecipe
from embedded_set_dft import Calculation, calculate
from embedded_set_gth import require_eminus
from embedded_set_recipes import cell_recipes
from pwscf import ENDS_EARLY

from tomat.app.cli import main
from tomat.base.arguments import Parser, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.reporting import console, write_json, write_report, writing
from tomat.data.density.demo.embedded import read_stored
from tomat.data.density.demo.stored import ROUNDING, decoded
from tomat.data.density.grid import DensityGrid, fast_shape

INDEX_NAME = "index.json"
INDEX_FORMAT = 2
SPACING_A = 0.065
"""Largest voxel spacing after refinement. The median of the Materials Project densities is 0.064 A."""
ELECTRON_TOLERANCE = 1e-6
"""Relative tolerance. float32 storage of rho x V keeps the electron count to about 1e-8."""
CONVERGENCE_CUTOFF_FACTOR = 1.5
K_MESH_CHECKS: dict[str, tuple[int, int, int]] = {
    "Si-diamond-ideal": (8, 8, 8),
    "GaAs-zinc-blende-ideal": (8, 8, 8),
    "GaP-zinc-blende-ideal": (8, 8, 8),
    "MgO-rock-salt-ideal": (8, 8, 8),
    "GaN-zinc-blende-ideal": (8, 8, 8),
    "SrF2-fluorite-ideal": (6, 6, 6),
    "NaCl-rock-salt-ideal": (6, 6, 6),
    "LiF-rock-salt-ideal": (6, 6, 6),
    "CsCl-caesium-chloride-ideal": (4, 4, 4),
    "AlN-wurtzite-ideal": (9, 9, 6),
    "GaAs-wurtzite-ideal": (9, 9, 6),
    "MgTe-zinc-blende-ideal": (8, 8, 8),
    "MgSe-rock-salt-ideal": (8, 8, 8),
    "Na2Te-antifluorite-ideal": (8, 8, 8),
    "Na3Sb-bismuth-trifluoride-ideal": (8, 8, 8),
    "Na3As-sodium-arsenide-ideal": (8, 8, 5),
    "Mg3Sb2-calcium-dialuminide-disilicide-ideal": (8, 8, 6),
    "SnSe2-cadmium-iodide-ideal": (9, 9, 6),
    "SnTe-rock-salt-ideal": (8, 8, 8),
    "Mg2Ge-antifluorite-ideal": (8, 8, 8),
    "LiAlO2-alpha-sodium-ferrite-ideal": (6, 6, 6),
    "MgGeN2-alpha-sodium-ferrite-ideal": (8, 8, 8),
    "SrTiO3-perovskite-ideal": (6, 6, 6),
    "WO3-rhenium-trioxide-ideal": (8, 8, 8),
    "GeO2-rutile-ideal": (4, 4, 6),
}
"""Cell -> denser mesh with the same shift as the recipe's, to check the recipe's mesh against with pw.x."""
CUTOFF_CHECKS = (
    "Si-diamond-ideal",
    "C-diamond-ideal",
    "GaAs-zinc-blende-ideal",
    "BN-zinc-blende-ideal",
    "NaCl-rock-salt-ideal",
    "MgO-rock-salt-ideal",
    "LiF-rock-salt-ideal",
    "CsCl-caesium-chloride-ideal",
    "CaF2-fluorite-ideal",
    "AlN-wurtzite-ideal",
)
"""Cells that pw.x computes again at 1.5 times the cut-off."""


@dataclass(frozen=True)
class ConvergenceCheck:
    """One cell computed again with one setting raised."""

    setting: str
    recipe: CellRecipe
    reference: CellRecipe
    """The recipe with the raised setting."""

    def entry(self) -> dict[str, Any]:
        """The check's entry in the index, without the result."""
        return {
            "material_id": self.recipe.material_id,
            "setting": self.setting,
            "reference_e_cut_hartree": self.reference.e_cut_hartree,
            "reference_k_mesh": list(self.reference.k_mesh),
            "reference_k_shift_half_steps": list(self.reference.k_shift),
            "e_cut_hartree": self.recipe.e_cut_hartree,
            "k_mesh": list(self.recipe.k_mesh),
            "k_shift_half_steps": list(self.recipe.k_shift),
        }


def _key(entry: Mapping[str, Any]) -> str:
    """What identifies a check in the index."""
    names = ("material_id", "reference_e_cut_hartree", "reference_k_mesh", "setting", "e_cut_hartree", "k_mesh")
    return json.dumps([entry[name] for name in names])


def build_demo_data(
    out_dir: str | os.PathLike[str],
    *,
    recipes: Sequence[CellRecipe] | None = None,
    convergence: bool = True,
    processes: int = 2,
) -> dict[str, Any]:
    """Compute the part of the data set that is missing in `out_dir`.

    Args:
        out_dir: receives `<material_id>.zarr` and `index.json`.
        recipes: cells to compute; None for the whole set.
        convergence: also compute the cells of `K_MESH_CHECKS` and `CUTOFF_CHECKS` with denser settings.
        processes: number of parallel calculations, one core each.

    Returns:
        The index as written.

    Raises:
        TomatError: `out_dir` holds the index of another format, eminus is not installed, or no process can be started.
    """
    if processes < 1:
        raise TomatError(f"found processes={processes}, expected at least 1.")
    root = Path(out_dir)
    with writing(root):
        root.mkdir(parents=True, exist_ok=True)
    chosen = list(cell_recipes() if recipes is None else recipes)
    # What the index has of cells that are not asked for stays in it.
    known = [*{recipe.material_id: recipe for recipe in (*cell_recipes(), *chosen)}.values()]
    cells, discarded, checked = _state(root, known)
    todo = [recipe for recipe in chosen if recipe.material_id not in cells | discarded]
    checks = [
        check
        for check in (_checks(chosen) if convergence else [])
        if _key(check.entry()) not in checked and check.recipe.material_id not in discarded
    ]
    if todo or checks:
        require_eminus()

    def save() -> dict[str, Any]:
        index = _index(known, cells, discarded, checked)
        write_json(root / INDEX_NAME, index)
        return index

    # A spawned process starts without this one's threads and BLAS state. One BLAS thread each keeps them from fighting
    # for cores. NumPy reads the variable as it is imported, before a process could set it for itself.
    os.environ["OMP_NUM_THREADS"] = "1"
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
    with progress() as bar, pool:
        task = bar.add_task("densities", total=len(todo) + len(checks))
        try:
            cell_jobs = {pool.submit(calculate, recipe): recipe for recipe in todo}
            check_jobs = {pool.submit(calculate, check.reference): check for check in checks}
            for future in as_completed(cell_jobs):
                recipe, calculation = cell_jobs[future], future.result()
                reason = _reason_to_discard(recipe, calculation)
                if reason:
                    record = {"recipe": asdict(recipe), "calculation": calculation.record}
                    discarded[recipe.material_id] = {**record, "reason": reason}
                else:
                    cells[recipe.material_id] = _store(root, recipe, calculation)
                save()
                bar.advance(task)
            for future in as_completed(check_jobs):
                check, calculation = check_jobs[future], future.result()
                if check.recipe.material_id in cells and calculation.reason != ENDS_EARLY:
                    entry = cells[check.recipe.material_id]
                    checked[_key(check.entry())] = _compare(root, entry, check, calculation)
                    save()
                bar.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return save()


def refined_shape(grid: DensityGrid) -> tuple[int, int, int]:
    """The smallest shape, at least that of `grid`, with spacing at most `SPACING_A` and sides of factors 2, 3 and 5."""
    return fast_shape(grid.lattice, SPACING_A, grid.grid_shape)


def _reason_to_discard(recipe: CellRecipe, calculation: Calculation) -> str:
    count = calculation.record["electron_count"]
    if not calculation.reason and abs(count / sum(recipe.valence) - 1) > ELECTRON_TOLERANCE:
        return f"{count} electrons, {sum(recipe.valence)} expected"
    return calculation.reason


def write_coefficients(rho: np.ndarray, path: Path, rounding: float = ROUNDING) -> float:
    """Write `rho` `[nx, ny, nz]` in any unit, replacing an existing file. Returns the NMAE caused by rounding."""
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec

    spectrum = np.fft.rfftn(rho.astype(np.float64)) / rho.size
    # Each part of a coefficient is off by step / sqrt(12). Over n coefficients the squares add up to n step^2 / 6.
    mean = float(spectrum[0, 0, 0].real)
    kept = np.abs(spectrum) > 1e-2 * rounding * mean / math.sqrt(rho.size)
    step = rounding * mean * math.sqrt(6 / (2 * np.count_nonzero(kept)))
    parts = np.stack([spectrum.real, spectrum.imag])
    integers = np.rint(parts / step).astype(np.int32)
    array = zarr.create_array(
        path,
        data=integers,
        chunks=integers.shape,
        compressors=[BloscCodec(cname="zstd", clevel=9, shuffle="bitshuffle"), Crc32cCodec()],
        attributes={"step_over_mean": step / mean, "grid_shape": list(rho.shape)},
        zarr_format=3,
        overwrite=True,
    )
    return float(np.abs(decoded(array, mean) - rho).sum() / np.abs(rho).sum())


def _store(root: Path, recipe: CellRecipe, calculation: Calculation) -> dict[str, Any]:
    assert calculation.rho is not None
    place = root / f"{recipe.material_id}.zarr"
    if place.exists():
        shutil.rmtree(place)
    entry = {"material_id": recipe.material_id, "recipe": asdict(recipe), "calculation": calculation.record}
    # Where a crystal is nearly empty, rounding may give negative densities; such a cell gets finer steps. In a vacuum
    # no step is fine enough.
    for finer in (1, 4) if recipe.group == "crystals" else (1,):
        rounding = write_coefficients(calculation.rho, place, ROUNDING / finer)
        grid = read_stored(root, entry)
        shape = refined_shape(grid)
        fine = grid.refined(shape)
        if fine.rho.min() >= 0:
            break
    return {
        **entry,
        "native_shape": list(grid.grid_shape),
        "refined_shape": list(shape),
        "native_spacing_a": list(grid.spacing_a),
        "refined_spacing_a": list(fine.spacing_a),
        "volume_a3": grid.volume_a3,
        "rounding_nmae": rounding,
        "largest_rho_e_per_a3": float(fine.rho.max()),
        "smallest_refined_rho_e_per_a3": float(fine.rho.min()),
    }


def _checks(recipes: Sequence[CellRecipe]) -> Iterator[ConvergenceCheck]:
    by_id = {recipe.material_id: recipe for recipe in recipes}
    for material_id, mesh in K_MESH_CHECKS.items():
        if material_id in by_id:
            recipe = by_id[material_id]
            yield ConvergenceCheck("k_mesh", recipe, replace(recipe, k_mesh=mesh, engine="pw.x"))
    for material_id in CUTOFF_CHECKS:
        if material_id in by_id:
            recipe = by_id[material_id]
            e_cut = CONVERGENCE_CUTOFF_FACTOR * recipe.e_cut_hartree
            yield ConvergenceCheck("e_cut", recipe, replace(recipe, e_cut_hartree=e_cut, engine="pw.x"))


def _compare(root: Path, entry: dict[str, Any], check: ConvergenceCheck, calculation: Calculation) -> dict[str, Any]:
    """NMAE of the stored density against `calculation`, both refined to one grid; None if the latter has no density."""
    nmae_percent = None
    if not calculation.reason:
        stored = read_stored(root, entry)
        denser = replace(stored, rho=calculation.rho)
        shape = [max(sides) for sides in zip(refined_shape(stored), refined_shape(denser), strict=True)]
        one, other = stored.refined(shape).rho.astype(np.float64), denser.refined(shape).rho.astype(np.float64)
        nmae_percent = round(100 * float(np.abs(one - other).sum() / np.abs(other).sum()), 4)
    return {**check.entry(), "nmae_percent": nmae_percent, "seconds": calculation.record["seconds"]}


def _state(
    root: Path, recipes: Sequence[CellRecipe]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The results of an earlier build that are still valid: cells, discarded cells, convergence checks."""
    path = root / INDEX_NAME
    if not path.exists():
        return {}, {}, {}
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        found = index["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TomatError(f"{path} is not an index of this data set ({error}); build into another folder.") from error
    if found != INDEX_FORMAT:
        raise TomatError(f"{path} has format version {found}, expected {INDEX_FORMAT}; build into another folder.")
    wanted = {recipe.material_id: json.loads(json.dumps(asdict(recipe))) for recipe in recipes}
    cells, discarded = (
        {
            entry["recipe"]["material_id"]: entry
            for entry in index[key]
            if wanted.get(entry["recipe"]["material_id"]) == entry["recipe"] and entry.get("reason") != ENDS_EARLY
        }
        for key in ("cells", "discarded")
    )
    cells = {name: entry for name, entry in cells.items() if (root / f"{name}.zarr" / "zarr.json").exists()}
    asked = {_key(check.entry()) for check in _checks(recipes) if check.recipe.material_id in cells}
    checked = {_key(entry): entry for entry in index["convergence"] if _key(entry) in asked}
    return cells, discarded, checked


def _index(
    recipes: Sequence[CellRecipe],
    cells: dict[str, dict[str, Any]],
    discarded: dict[str, dict[str, Any]],
    checked: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    order = [recipe.material_id for recipe in recipes]
    return {
        "format_version": INDEX_FORMAT,
        "description": (
            "Valence electron densities of plane-wave DFT with PBE and GTH pseudopotentials (norm-conserving: not PAW "
            "densities), computed with the code of each record, eminus or pw.x, which agree within 0.01 % NMAE, at one "
            "cut-off for each element (profiling/embedded_set_cells.py). Stored as the Fourier coefficients over the "
            "mean, in whole steps, on the smallest grid that holds them all (tomat/data/density/demo/stored.py)."
        ),
        "largest_refined_spacing_a": SPACING_A,
        "cells": [cells[name] for name in order if name in cells],
        "discarded": [discarded[name] for name in order if name in discarded],
        "convergence": [checked[key] for key in sorted(checked)],
    }


def build_parser() -> Parser:
    """The flags of this script."""
    parser = Parser(
        prog="python profiling/embedded_set.py",
        description="Compute the embedded densities again with pw.x and eminus, and check that they converge. Hours of "
        "CPU time; started again it continues where it was stopped.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/demo_data"), metavar="DIR", help="folder to write (default: %(default)s)"
    )
    parser.add_argument(
        "--processes", type=positive_int, default=2, metavar="N", help="calculations at a time (default: 2)"
    )
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these cells, without the convergence checks")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the index also here")
    parser.set_defaults(run=run)
    parser.examples = (f"{parser.prog} --only NaCl-rock-salt-ideal --out demo_data",)
    return parser


def run(args: argparse.Namespace) -> int:
    """Build the set and print the number of cells."""
    recipes = None
    if args.only:
        known = {recipe.material_id: recipe for recipe in cell_recipes()}
        unknown = sorted(set(args.only) - set(known))
        if unknown:
            raise TomatError(f"no recipe for {', '.join(unknown)}; `tomat demo-data show` lists the cells.")
        recipes = [known[name] for name in args.only]
    index = build_demo_data(args.out, recipes=recipes, convergence=recipes is None, processes=args.processes)
    console.print(f"{args.out}: {len(index['cells'])} cells, {len(index['discarded'])} discarded as not converged")
    for entry in index["discarded"]:
        console.print(f"  {entry['recipe']['material_id']}: {entry['reason']}")
    write_report(args.json, index)
    return 0


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
