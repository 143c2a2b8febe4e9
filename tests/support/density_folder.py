"""A folder of seven small densities, in every format, with a duplicate and files that are no densities."""

import gzip
from pathlib import Path

import numpy as np
from ionic_density import gaussians

from tomat.data.density.grid import DensityGrid
from tomat.data.density.outputs import write_density

CELL = np.array([[3.2, 0.1, 0.0], [0.2, 3.3, 0.0], [0.0, 0.3, 3.4]])
COMPOSITIONS = {
    "NaF": [11, 9],
    "NaF-strained": [11, 9],
    "MgO": [12, 8],
    "Mg": [12, 12],
    "MgF2": [12, 9, 9],
    "NaCl": [11, 17],
    "MgCl2": [12, 17, 17],
}
VALENCES = {8: 6, 9: 7, 11: 1, 12: 2, 17: 7}
PLACES = np.array([[0.0, 0.0, 0.0], [0.5, 0.45, 0.5], [0.0, 0.5, 0.55]])


def small_grid(name: str) -> DensityGrid:
    numbers, lattice = COMPOSITIONS[name], CELL * (1.03 if "strained" in name else 1.0)
    return gaussians(lattice, numbers, PLACES[: len(numbers)], VALENCES, (10, 10, 10), name)


def write_folder(folder: Path) -> Path:
    files = ("a/NaF.CHGCAR", "b.d/NaF-strained.cube.gz", "MgO.zarr", "Mg.json.gz", "c/d/MgF2.vasp", "MgCl2.cube")
    for path, form in zip(files, ("chgcar", "cube", "zarr", "json", "chgcar", "cube"), strict=True):
        write_density(small_grid(Path(path).name.split(".")[0]), folder / path, form)
    # VASP 4: no line of elements, a POSCAR beside it.
    write_density(small_grid("NaCl"), folder / "NaCl" / "CHGCAR", "chgcar")
    lines = (folder / "NaCl" / "CHGCAR").read_text().splitlines(keepends=True)
    (folder / "NaCl" / "CHGCAR").write_text("".join(lines[:5] + lines[6:]))
    (folder / "NaCl" / "POSCAR").write_text("".join(lines[:10]))
    (folder / "a" / "INCAR").write_text("")
    whole = (folder / "a" / "NaF.CHGCAR").read_bytes()
    (folder / "copy.CHGCAR.gz").write_bytes(gzip.compress(whole))
    write_density(small_grid("NaF"), folder / "same.cube", "cube")
    (folder / "cut.CHGCAR").write_bytes(whole[:5000])
    return folder
