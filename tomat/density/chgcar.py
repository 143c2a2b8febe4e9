"""VASP's CHGCAR, through pymatgen: text, rho x V in electrons, x fastest. Plain, `.gz` or `.bz2`."""

import os
import tempfile
import warnings
from pathlib import Path

import numpy as np

from tomat.density.checks import check_electrons, check_rho_times_volume
from tomat.density.grid import DensityGrid
from tomat.errors import TomatError

Location = str | os.PathLike[str]


def read_chgcar(path: Location, material_id: str | None = None) -> DensityGrid:
    """Read the total density of a CHGCAR; a spin density in it is left alone.

    Args:
        material_id: name to give it; else the file name.

    Returns:
        The density in e/A^3; negative values are set to zero and counted in `clipped_voxels`.

    Raises:
        TomatError: no such file, a file that is no CHGCAR or ends early, values in another unit, a density that no set
            of atoms has.
    """
    from pymatgen.io.vasp import Chgcar

    source = os.fspath(path)
    if not Path(path).is_file():
        raise TomatError(f"no CHGCAR at {source}; expected a file.")
    try:
        with warnings.catch_warnings():
            # pymatgen warns about POSCAR details (selective dynamics, old formats) that do not touch the density.
            warnings.simplefilter("ignore")
            chgcar = Chgcar.from_file(source)
        values = np.asarray(chgcar.data["total"], dtype=np.float64)
        structure = chgcar.structure
        lattice, numbers, coords = structure.lattice.matrix, np.array(structure.atomic_numbers), structure.frac_coords
    except Exception as error:  # pymatgen's parser stumbles over damage in a dozen ways; each means the same here
        reason = (str(error).strip().splitlines() or [""])[0]
        raise TomatError(
            f"{source} is not a complete CHGCAR ({type(error).__name__}: {reason}); expected a POSCAR header, the grid "
            "and nx*ny*nz values. It may be cut off: compare its size with the original."
        ) from error
    check_rho_times_volume(values, lattice, numbers, source)
    return DensityGrid.from_rho_times_volume(
        values, lattice, numbers, coords, material_id=material_id or Path(source).name
    )


def write_chgcar(grid: DensityGrid, path: Location) -> None:
    """Write a CHGCAR that VASP, VESTA and pymatgen read; compressed when the name ends in `.gz` or `.bz2`.

    The format holds 11 digits of a value and 6 decimals of a coordinate. The file appears complete or not at all.
    """
    from pymatgen.io.vasp import Chgcar

    check_electrons(grid, os.fspath(path))
    target = Path(path)
    values = grid.rho.astype(np.float64) * grid.volume_a3
    # POSCAR lists atoms by element; a stable sort keeps the order within an element.
    structure = grid.structure.get_sorted_structure(key=lambda site: site.specie.Z)
    chgcar = Chgcar(structure, {"total": values})
    try:
        # The suffix, which decides on the compression, has to stay at the end of the temporary name.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
            temporary = Path(folder) / target.name
            chgcar.write_file(str(temporary))
            os.replace(temporary, target)
    except OSError as error:
        raise TomatError(f"cannot write {target}: {error}") from error
