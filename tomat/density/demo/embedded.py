"""The embedded data set: real plane-wave densities of some tens of small cells, part of the package.

PBE with GTH norm-conserving pseudopotentials, computed with eminus by `tomat demo-data build`; not PAW densities. They
are stored on the smallest grid that holds their whole Fourier series and refined on reading, exactly, to a spacing of
at most 0.065 A, that of the Materials Project densities. Whole compounds are held out for validation.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tomat.base.errors import TomatError
from tomat.density.grid import DensityGrid
from tomat.density.zarr_store import read_zarr

DATA_DIR = Path(__file__).parent.parent / "demo_data"
Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")


@dataclass(frozen=True)
class DemoMaterial:
    """One embedded cell."""

    material_id: str
    compound: str
    """Formula, cation first."""
    structure_type: str
    split: Split
    """A compound is wholly in one split."""
    n_electrons: int
    """Valence electrons of the pseudopotentials, summed over the cell."""
    native_shape: tuple[int, int, int]
    """Grid on disk."""
    grid_shape: tuple[int, int, int]
    """Grid that `load_demo` returns."""
    spacing_a: tuple[float, float, float]
    """Voxel spacing of `grid_shape`, A."""
    e_cut_hartree: float
    k_mesh: tuple[int, int, int]


@cache
def demo_index() -> dict[str, Any]:
    """`index.json` of the data set: recipe, calculation, shapes and convergence of every cell, units in the keys."""
    path = DATA_DIR / "index.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TomatError(f"the embedded data set is damaged ({path}: {error}); install tomat again.") from error


def demo_materials(split: str | None = None) -> list[DemoMaterial]:
    """The embedded cells in the order of the index, of one split or of both.

    Raises:
        TomatError: no such split.
    """
    if split is not None and split not in SPLITS:
        raise TomatError(f"The embedded densities have no split {split!r}; expected one of {', '.join(SPLITS)}.")
    materials = [_material(cell) for cell in demo_index()["cells"]]
    return [material for material in materials if split in (None, material.split)]


@cache
def load_demo(material_id: str) -> DensityGrid:
    """One embedded density at its refined grid, e/A^3, read once in a process; its values cannot be written to.

    A run reads each three times (codec, check, tokens), at 17 ms of processor time; all 64 are 60 MB.

    The interpolation of a plane-wave density is nowhere negative; should rounding make it so, the value is set to zero
    and counted in `clipped_voxels` (0 in every cell shipped).

    Raises:
        TomatError: no cell of this name.
    """
    by_id = {material.material_id: material for material in demo_materials()}
    if material_id not in by_id:
        raise TomatError(
            f"no embedded density {material_id!r}; `tomat demo-data show` lists the {len(by_id)} there are."
        )
    native = read_zarr(DATA_DIR / f"{material_id}.zarr", material_id)
    grid = native.refined(by_id[material_id].grid_shape, clip_negative=True)
    grid.rho.setflags(write=False)
    return grid


def _material(cell: dict[str, Any]) -> DemoMaterial:
    recipe = cell["recipe"]
    nx, ny, nz = cell["native_shape"]
    fine_nx, fine_ny, fine_nz = cell["refined_shape"]
    a, b, c = cell["refined_spacing_a"]
    ka, kb, kc = recipe["k_mesh"]
    return DemoMaterial(
        material_id=cell["material_id"],
        compound=recipe["compound"],
        structure_type=recipe["structure_type"],
        split=recipe["split"],
        n_electrons=cell["calculation"]["valence_electrons"],
        native_shape=(nx, ny, nz),
        grid_shape=(fine_nx, fine_ny, fine_nz),
        spacing_a=(a, b, c),
        e_cut_hartree=recipe["e_cut_hartree"],
        k_mesh=(ka, kb, kc),
    )
