"""A folder of seven small densities, in every format, with a duplicate and files that are no densities."""

import gzip
from pathlib import Path

import numpy as np

from tomat.data.density.grid import DensityGrid
from tomat.data.density.outputs import write_density

CELL = np.array([[3.2, 0.1, 0.0], [0.2, 3.3, 0.0], [0.0, 0.3, 3.4]])
COMPOSITIONS = {
    "NaF": ([11, 9], 8),
    "NaF-strained": ([11, 9], 8),
    "MgO": ([12, 8], 8),
    "Mg": ([12, 12], 4),
    "MgF2": ([12, 9, 9], 16),
    "NaCl": ([11, 17], 8),
    "MgCl2": ([12, 17, 17], 16),
}
PLACES = np.array([[0.0, 0.0, 0.0], [0.5, 0.45, 0.5], [0.0, 0.5, 0.55]])


def small_grid(name: str) -> DensityGrid:
    """Gaussians at the atoms, with the electrons of the composition."""
    numbers, electrons = COMPOSITIONS[name]
    lattice = CELL * (1.03 if "strained" in name else 1.0)
    coords, n = PLACES[: len(numbers)], 10
    points = np.stack(np.meshgrid(*(np.arange(n) / n,) * 3, indexing="ij"), -1)
    rho = np.full((n, n, n), 0.05)
    for number, place in zip(numbers, coords, strict=True):
        away = points - place
        distance = np.linalg.norm((away - np.round(away)) @ lattice, axis=-1)
        rho += 0.1 * number * np.exp(-((distance / 0.9) ** 2))
    rho *= electrons / (rho.mean() * abs(np.linalg.det(lattice)))
    return DensityGrid(rho, lattice, np.array(numbers), coords, name)


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
