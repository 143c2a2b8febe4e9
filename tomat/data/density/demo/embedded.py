"""The embedded data set: real plane-wave densities of some tens of small cells, part of the package.

PBE with GTH norm-conserving pseudopotentials, computed with eminus by `profiling/embedded_set.py`; not PAW densities.
They are stored on the smallest grid that holds their whole Fourier series and refined on reading, exactly, to a spacing
of at most 0.065 A, that of the Materials Project densities. Whole compounds are held out for validation.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tomat.base.errors import TomatError
from tomat.data.density.grid import DensityGrid
from tomat.data.density.zarr_store import read_zarr

DATA_DIR = Path(__file__).parent.parent / "demo_data"
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class DemoMaterial:
    """One embedded cell."""

    material_id: str
    n_electrons: int
    """Valence electrons of the pseudopotentials, summed over the cell."""


@cache
def demo_index() -> dict[str, Any]:
    """`index.json` of the data set: recipe, calculation, shapes and convergence of every cell, units in the keys."""
    path = DATA_DIR / "index.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TomatError(f"the embedded data set is damaged ({path}: {error}); install tomat again.") from error


def demo_materials(split: str | None = None) -> list[DemoMaterial]:
    """The embedded cells in the order of the index, of one split or of both."""
    if split is not None and split not in SPLITS:
        raise TomatError(f"The embedded densities have no split {split!r}; expected one of {', '.join(SPLITS)}.")
    return [
        DemoMaterial(cell["material_id"], cell["calculation"]["valence_electrons"])
        for cell in demo_index()["cells"]
        if split in (None, cell["recipe"]["split"])
    ]


def grid_shapes(kind: Literal["refined", "stored"]) -> dict[str, tuple[int, int, int]]:
    """Of every embedded density, by its name: the grid that it is stored on, or refined to."""
    key = {"refined": "refined_shape", "stored": "native_shape"}[kind]
    return {cell["material_id"]: tuple(cell[key]) for cell in demo_index()["cells"]}


def load_stored(material_id: str) -> DensityGrid:
    """One embedded density on the grid it is stored on, the smallest that holds its Fourier series, e/Å³."""
    if material_id not in {cell["material_id"] for cell in demo_index()["cells"]}:
        raise TomatError(f"no embedded density {material_id!r}; `tomat demo-data show` lists those there are.")
    return read_zarr(DATA_DIR / f"{material_id}.zarr", material_id)


@cache
def load_demo(material_id: str) -> DensityGrid:
    """One embedded density at its refined grid, e/Å³, read once in a process; its values cannot be written to.

    A run reads each three times (codec, check, tokens), at 17 ms of processor time; all 103 are 90 MB. Interpolated
    plane-wave densities are nowhere negative; should rounding make one so, `clipped_voxels` says it (0 of all shipped).
    """
    stored = load_stored(material_id)
    return stored.refined(grid_shapes("refined")[material_id], clip_negative=True)
