"""CHGCARs for tests, written by pymatgen."""

from pathlib import Path

import numpy as np
from pymatgen.io.vasp import Chgcar

from tomat.data.density.grid import DensityGrid


def write_chgcar(grid: DensityGrid, path: Path) -> None:
    """Write a density as a CHGCAR, compressed when the name ends in `.gz` or `.bz2`.

    The format holds 11 digits of a value and 6 decimals of a coordinate.
    """
    values = grid.rho.astype(np.float64) * grid.volume_a3
    # POSCAR lists atoms by element; a stable sort keeps the order within an element.
    structure = grid.structure.get_sorted_structure(key=lambda site: site.specie.Z)
    Chgcar(structure, {"total": values}).write_file(str(path))
