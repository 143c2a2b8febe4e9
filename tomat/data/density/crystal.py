"""`Crystal`: cell and atoms without a density, and the atoms (periodic images too) that a box of space can see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.elements import atomic_number
from tomat.data.density.geometry import LARGEST_LENGTH_A, checked_cell, reduced_basis
from tomat.data.density.grid import DensityGrid
from tomat.data.density.limits import check_atom_count

MOST_IMAGES = 10_000_000
"""Most images of atoms that are looked at for one box: 240 MB. A box of a reduced cell has some ten per atom."""


@dataclass(frozen=True, eq=False)
class Crystal:
    lattice: np.ndarray
    atomic_numbers: np.ndarray
    """int64 `[n_atoms]`, 1..118."""
    frac_coords: np.ndarray
    name: str = ""

    def __post_init__(self) -> None:
        where = f"structure {self.name!r}" if self.name else "structure"
        found = checked_cell(where, self.lattice, self.atomic_numbers, self.frac_coords)
        if not found[1].size:
            raise TomatError(f"{where} has no atoms; expected some.")
        for field, array in zip(("lattice", "atomic_numbers", "frac_coords"), found, strict=True):
            object.__setattr__(self, field, array)

    @classmethod
    def of(cls, grid: DensityGrid) -> Crystal:
        return cls(grid.lattice, grid.atomic_numbers, grid.frac_coords, grid.material_id)

    @property
    def volume_a3(self) -> float:
        return abs(float(np.linalg.det(self.lattice)))

    @cached_property
    def _reduced(self) -> tuple[np.ndarray, np.ndarray]:
        """A reduced basis of the lattice, rows in A, and the atoms in fractions of it. A reduced cell is kept."""
        basis = reduced_basis(self.lattice)
        whole = np.round(self.lattice @ np.linalg.inv(basis))
        return basis, self.frac_coords @ whole

    def near_box(self, origin: np.ndarray, edges: np.ndarray, radius_a: float) -> tuple[np.ndarray, np.ndarray]:
        """Atoms and periodic images within `radius_a` of a parallelepiped, nearest to its centre first: atomic numbers
        int64 `[n]`, and positions float64 `[n, 3]` in A relative to `origin`.

        The box has the points `origin + s0 edges[0] + s1 edges[1] + s2 edges[2]`, s in [0, 1], all in A. An atom is
        taken if it is within `radius_a` of the sphere around the box, so none near the box is missed.
        """
        centre = origin + edges.sum(axis=0) / 2
        corners = np.array(list(np.ndindex(2, 2, 2))) @ edges - edges.sum(axis=0) / 2
        reach_a = radius_a + float(np.linalg.norm(corners, axis=1).max())
        basis, fractions = self._reduced
        inverse = np.linalg.inv(basis)
        # Along axis i a fraction grows by at most |column i of the inverse| per angstrom.
        reach = reach_a * np.linalg.norm(inverse, axis=0)
        relative = fractions - centre @ inverse
        relative = relative - np.floor(relative)
        low, high = np.ceil(-reach - 1), np.floor(reach)
        if (n_images := float(np.prod(high - low + 1)) * len(relative)) > MOST_IMAGES:
            longest_a = np.linalg.norm(edges, axis=1).max()
            raise TomatError(
                f"structure {self.name!r}: a box with edges of up to {longest_a:.4g} A sees {n_images:.3g} atoms; "
                f"expected {MOST_IMAGES:,} at most. Ask for a finer grid, or write the lattice by its shortest vectors."
            )
        ranges = (np.arange(a, b + 1) for a, b in zip(low, high, strict=True))
        steps = np.stack(np.meshgrid(*ranges, indexing="ij"), -1)
        images = (relative[:, None] + steps.reshape(1, -1, 3)) @ basis
        distance = np.linalg.norm(images, axis=-1)
        atom, step = np.nonzero(distance < reach_a)
        order = np.argsort(distance[atom, step], kind="stable")
        positions = images[atom[order], step[order]] + edges.sum(axis=0) / 2
        return self.atomic_numbers[atom[order]], positions


SAME_VOLUME = 1e-3
"""Largest relative difference; some sources round the lattice's numbers to 8 digits, some to 6 decimals."""

SAME_PLACE_A = 0.01
"""Largest distance between two statements of a place in the cell, for the same reason."""


def structure_from_dict(structure: Mapping[str, Any], source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lattice `[3, 3]` in A, atomic numbers and fractional coordinates of a pymatgen `Structure.as_dict()`."""
    try:
        lattice = np.array(structure["lattice"]["matrix"], dtype=np.float64).reshape(3, 3)
        sites = structure["sites"]
        if sites:
            check_atom_count(len(sites), source)
        coords = np.array([site["abc"] for site in sites], dtype=np.float64).reshape(len(sites), 3)
        species = [site["species"] for site in sites]
        mixed = [site for site in species if len(site) != 1 or abs(site[0].get("occu", 1) - 1) > 1e-6]
        # Formatted inside this `try`, since an occupancy may be an integer too large for a float (OverflowError).
        held = ", ".join(f"{each.get('element')}:{each.get('occu', 1):g}" for each in (mixed or [[]])[0]) or "nothing"
        numbers = np.array([atomic_number(site[0]["element"]) for site in species if site], dtype=np.int64)
        stated_volume = float(structure["lattice"].get("volume", np.nan))
        cartesian = [site.get("xyz") for site in sites]
        stated = None if None in cartesian else np.array(cartesian, dtype=np.float64).reshape(len(sites), 3)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise TomatError(
            f"{source}: the structure is not a pymatgen structure in JSON ({type(error).__name__}: {error}); expected "
            "`lattice.matrix` and `sites` with `species` and `abc`."
        ) from error
    if not sites:
        raise TomatError(f"{source}: the structure has no atoms; expected some.")
    if mixed:
        said = f"{source}: site {species.index(mixed[0]) + 1} holds {held}; expected one element, fully occupied"
        raise TomatError(f"{said}. Order it first: pymatgen's OrderDisorderedStructureTransformation.")
    damage = ""
    # NaN is refused too: it fails every comparison.
    if not (np.abs(lattice) < LARGEST_LENGTH_A).all() or not (np.abs(coords) < LARGEST_LENGTH_A).all():
        damage = "the lattice or a coordinate is no plausible finite number"
    elif abs(stated_volume - (volume_a3 := abs(float(np.linalg.det(lattice))))) > SAME_VOLUME * volume_a3:
        damage = f"the lattice has a volume of {volume_a3:.6g} A^3 and states {stated_volume:.6g}"
    elif stated is not None and not (np.abs(coords @ lattice - stated) <= SAME_PLACE_A).all():
        damage = "`abc` and `xyz` of an atom are not the same place"
    if damage:
        raise TomatError(f"{source}: {damage}; the structure is damaged, fetch this material again.")
    return lattice, numbers, coords
