"""Crystal structures as pymatgen writes them in JSON, read without importing pymatgen."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tomat.density.elements import atomic_number
from tomat.errors import TomatError


def structure_from_dict(structure: Mapping[str, Any], source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lattice, atomic numbers and fractional coordinates of a pymatgen `Structure.as_dict()`.

    Args:
        source: named in errors.

    Returns:
        lattice float64 `[3, 3]` in A, atomic numbers int64 `[n]`, fractional coordinates float64 `[n, 3]`.

    Raises:
        TomatError: a part is missing, or a site holds no or more than one element.
    """
    try:
        lattice = np.array(structure["lattice"]["matrix"], dtype=np.float64).reshape(3, 3)
        sites = structure["sites"]
        coords = np.array([site["abc"] for site in sites], dtype=np.float64).reshape(len(sites), 3)
        species = [site["species"] for site in sites]
        mixed = [
            index for index, site in enumerate(species) if len(site) != 1 or abs(site[0].get("occu", 1) - 1) > 1e-6
        ]
        numbers = np.array([atomic_number(site[0]["element"]) for site in species if site], dtype=np.int64)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TomatError(
            f"{source}: the structure is not a pymatgen structure in JSON ({type(error).__name__}: {error}); expected "
            "`lattice.matrix` and `sites` with `species` and `abc`."
        ) from error
    if not sites:
        raise TomatError(f"{source}: the structure has no atoms.")
    if mixed:
        raise TomatError(f"{source}: site {mixed[0]} holds {species[mixed[0]]}; expected one element, fully occupied.")
    return lattice, numbers, coords
