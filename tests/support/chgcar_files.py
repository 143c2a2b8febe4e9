"""CHGCARs for tests, written by pymatgen and as VASP writes them."""

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


def as_vasp_writes(
    grid: DensityGrid,
    *,
    spin_blocks: int = 0,
    augmentation: bool = True,
    complex_occupancies: bool = False,
    newline: str = "\n",
    per_line: int = 5,
    fill: str = "",
) -> str:
    """A CHGCAR as VASP 5 and 6 write it: 5 values a line, augmentation occupancies, moments before a spin density.

    `fill` is put into each place that a last line leaves. `complex_occupancies` as with spin-orbit coupling, with as
    many atoms and values as grow together in VASP's columns.
    """

    def numbers(values):
        words = [f" {value:.11E}" for value in values]
        words += [fill] * (-len(words) % per_line)
        return newline.join("".join(words[at : at + per_line]) for at in range(0, len(words), per_line)) + newline

    lattice = newline.join("  " + " ".join(f"{x:.6f}" for x in row) for row in grid.lattice)
    coords = newline.join(" " + " ".join(f"{x:.6f}" for x in row) for row in grid.frac_coords)
    text = newline.join(["LiF", "   1.0", lattice, "   Li_sv/abc F", "  1  1", "Direct", coords, " ", ""])
    rng = np.random.default_rng(0)
    parts, count = (("", " (imaginary part)"), 1013) if complex_occupancies else (("",), 13)
    for block in range(1 + spin_blocks):
        if block:
            text += numbers(rng.normal(size=2))
        values = grid.rho_times_volume().ravel(order="F") if not block else rng.normal(size=grid.rho.size)
        text += "   ".join(["", *map(str, grid.grid_shape)]) + newline + numbers(values)
        for atom in (1, 2) if augmentation else ():
            for part in parts:
                head = f"augmentation occupancies{part}{atom:4d}{count:4d}{newline}"
                text += head + numbers(rng.normal(size=count))
    return text
