"""Crystal structures as pymatgen writes them in JSON, read without importing pymatgen."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.elements import atomic_number
from tomat.data.density.geometry import LARGEST_LENGTH_A
from tomat.data.density.limits import check_atom_count

SAME_VOLUME = 1e-3
"""Relative; some sources round the lattice's numbers to 8 digits, some to 6 decimals."""

SAME_PLACE_A = 0.01
"""Likewise, of a place in the cell."""


def structure_from_dict(structure: Mapping[str, Any], source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lattice, atomic numbers and fractional coordinates of a pymatgen `Structure.as_dict()`: lattice float64 `[3, 3]`
    in A, atomic numbers int64 `[n]`, fractional coordinates float64 `[n, 3]`.
    """
    try:
        lattice = np.array(structure["lattice"]["matrix"], dtype=np.float64).reshape(3, 3)
        sites = structure["sites"]
        if sites:
            check_atom_count(len(sites), source)
        coords = np.array([site["abc"] for site in sites], dtype=np.float64).reshape(len(sites), 3)
        species = [site["species"] for site in sites]
        mixed = [
            index for index, site in enumerate(species) if len(site) != 1 or abs(site[0].get("occu", 1) - 1) > 1e-6
        ]
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
        raise TomatError(f"{source}: the structure has no atoms.")
    if mixed:
        raise TomatError(f"{source}: site {mixed[0]} holds {species[mixed[0]]}; expected one element, fully occupied.")
    # NaN is refused too: it is below nothing.
    if not (np.abs(lattice) < LARGEST_LENGTH_A).all() or not (np.abs(coords) < LARGEST_LENGTH_A).all():
        raise TomatError(
            f"{source}: the lattice or a coordinate is no plausible finite number; it is damaged, fetch this material "
            "again."
        )
    volume_a3 = abs(float(np.linalg.det(lattice)))
    if abs(stated_volume - volume_a3) > SAME_VOLUME * volume_a3:
        raise TomatError(
            f"{source}: the lattice has a volume of {volume_a3:.6g} A^3 and states {stated_volume:.6g}; one of them is "
            "damaged, fetch this material again."
        )
    if stated is not None and not (np.abs(coords @ lattice - stated) <= SAME_PLACE_A).all():
        raise TomatError(
            f"{source}: `abc` and `xyz` of an atom are not the same place; one of them is damaged, fetch this material "
            "again."
        )
    return lattice, numbers, coords
