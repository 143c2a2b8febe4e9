"""The embedded data set: real plane-wave densities of small cells, part of the package.

PBE with GTH norm-conserving pseudopotentials, computed with eminus or pw.x by `profiling/embedded_set.py`; not PAW
densities. They are stored on the smallest grid that holds their whole Fourier series. Reading refines them exactly to
a spacing of at most 0.065 A, as in the Materials Project densities. Whole compounds are held out for validation.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.demo.stored import read_coefficients
from tomat.data.density.elements import atomic_number
from tomat.data.density.grid import DensityGrid

DATA_DIR = Path(__file__).parent.parent / "demo_data"
SPLITS = ("train", "validation")
CRYSTALS = "crystals"
GROUPS = {
    CRYSTALS: "small crystals, of which four compounds are held out: what the demo is judged by",
    "further-crystals": "small crystals of further compounds",
    "more-crystals": "small crystals of the same elements in many more pairs and triples",
    "ternary-crystals": "small crystals of three and four of these elements, and other structures of known pairs",
    "further-elements": "small crystals with Cu, Ag, Au, Hg, La, Bi, Nb, Ta or W",
    "covalent-crystals": "covalent small crystals: nitrides, ordered alloys, chains, layers, molecules",
    "metals": "metals without d or f electrons",
    "vacuum": "atoms and molecules in boxes, single layers, surfaces",
    "layered": "layered crystals",
    "large": "vacancies, antisites and rattled supercells of 15 or 16 atoms",
}
"""Groups of cells. A held-out compound is held out in every group."""


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


def demo_materials(
    split: str | None = None, groups: Collection[str] = (CRYSTALS,), left_out: Collection[str] = ()
) -> list[DemoMaterial]:
    """The embedded cells of one split or both and of some of `GROUPS`, in the order of the index, without the compounds
    in `left_out`.

    Raises:
        TomatError: No such split or group.
    """
    if split is not None and split not in SPLITS:
        raise TomatError(f"The embedded densities have no split {split!r}; expected one of {', '.join(SPLITS)}.")
    check_groups(groups)
    return [
        DemoMaterial(cell["material_id"], cell["calculation"]["valence_electrons"])
        for cell in demo_index()["cells"]
        if split in (None, cell["recipe"]["split"])
        and cell["recipe"]["group"] in groups
        and cell["recipe"]["compound"] not in left_out
    ]


def grid_shapes(kind: Literal["refined", "stored"]) -> dict[str, tuple[int, int, int]]:
    """The grid that each embedded density is stored on, or refined to, by name."""
    key = {"refined": "refined_shape", "stored": "native_shape"}[kind]
    return {cell["material_id"]: tuple(cell[key]) for cell in demo_index()["cells"]}


def check_groups(groups: Collection[str]) -> None:
    """Refuse names that are not in `GROUPS`, and an empty list."""
    unknown = [group for group in groups if group not in GROUPS]
    if unknown or not groups:
        found = f"no group {unknown[0]!r}" if unknown else "groups, but none was named"
        raise TomatError(f"The embedded densities have {found}; expected some of {', '.join(GROUPS)}.")


@cache
def _cells() -> dict[str, dict[str, Any]]:
    return {cell["material_id"]: cell for cell in demo_index()["cells"]}


def compounds_of(groups: Collection[str]) -> dict[str, list[str]]:
    """The training compounds of some groups in the order of the index, and the names of the cells of each."""
    found: dict[str, list[str]] = {}
    for each in demo_materials("train", groups):
        found.setdefault(_cells()[each.material_id]["recipe"]["compound"], []).append(each.material_id)
    return found


def check_compounds(compounds: Collection[str], groups: Collection[str]) -> None:
    """Refuse compounds that the training set of these groups lacks."""
    if unknown := [name for name in compounds if name not in compounds_of(groups)]:
        raise TomatError(
            f"no training compound {unknown[0]!r} in the groups {', '.join(groups)}; `tomat demo-data show` lists them."
        )


def groups_of(material_ids: Collection[str]) -> dict[str, str]:
    """The group in `GROUPS` of each embedded cell named."""
    return {name: _cells()[name]["recipe"]["group"] for name in material_ids}


@cache
def load_stored(material_id: str) -> DensityGrid:
    """One embedded density, e/Å³, on its stored grid, the smallest that holds its Fourier series. It is read once per
    process: all are 50 MB, and what is computed from one for its codec is still there for its tokens."""
    if material_id not in _cells():
        raise TomatError(f"no embedded density {material_id!r}; `tomat demo-data show` lists those there are.")
    return read_stored(DATA_DIR, _cells()[material_id])


def read_stored(folder: Path, cell: dict[str, Any]) -> DensityGrid:
    """The density of one entry of an index, from its file in `folder`."""
    recipe = cell["recipe"]
    lattice = np.array(recipe["lattice_a"])
    mean = sum(recipe["valence"]) / abs(float(np.linalg.det(lattice)))
    rho = read_coefficients(folder / f"{cell['material_id']}.zarr", mean)
    numbers = np.array([atomic_number(symbol) for symbol in recipe["symbols"]])
    return DensityGrid(rho, lattice, numbers, np.array(recipe["frac_coords"]), cell["material_id"])


@cache
def load_demo(material_id: str) -> DensityGrid:
    """One embedded density, e/Å³, on its refined grid. It is read once per process; its values are read-only.

    A run reads each three times (codec, check, tokens), at 17 ms of processor time; a hundred are 90 MB. Interpolated
    plane-wave densities are nowhere negative; `clipped_voxels` counts values that rounding makes negative.
    """
    stored = load_stored(material_id)
    return stored.refined(grid_shapes("refined")[material_id], clip_negative=True)
