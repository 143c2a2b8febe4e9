"""Gaussian's cube: text, e/bohr^3, z fastest, lengths in bohr. Plain, `.gz`, `.bz2` or `.xz`.

Read and written here, and not by pymatgen or ASE: these write the sides of a voxel to six decimals, which costs 1e-5 of
the volume and with it of the electrons, and read a file that is cut off or goes on as if it were whole.
"""

import os
from pathlib import Path
from typing import IO

import numpy as np

from tomat.base.errors import TomatError
from tomat.density.checks import density_of
from tomat.density.elements import SYMBOLS
from tomat.density.geometry import BOHR_A
from tomat.density.grid import DensityGrid
from tomat.density.kinds import check_kind
from tomat.density.limits import (
    COMPRESSION_ERRORS,
    BoundedText,
    check_atom_count,
    check_grid_shape,
    open_text,
)
from tomat.density.number_block import LONGEST_LINE_BYTES, read_block
from tomat.density.rules import DEFAULT_RULES, ReadRules

Location = str | os.PathLike[str]
KIND = "cube"
SUFFIXES = (".cube", ".cub")
_VALUE_BYTES = 32
"""Most bytes of text for a value: Gaussian writes 13."""
_PER_LINE = 6


def read_cube(path: Location, material_id: str | None = None, rules: ReadRules = DEFAULT_RULES) -> DensityGrid:
    """Read the density of a cube whose voxels tile the cell.

    Args:
        material_id: name to give it; else the file name.

    Returns:
        The density in e/A^3; negative values are set to zero and counted in `clipped_voxels`.

    Raises:
        TomatError: no such file, a file that is no cube of one density, ends early or goes on, or is said to hold
            something else than the total density; whatever `density_of`
            refuses.
    """
    source = os.fspath(path)
    if not Path(path).is_file():
        raise TomatError(f"no cube at {source}; expected a file.")
    try:
        text = open_text(source)
        with text.stream:
            kind = check_kind(source, [text.line().decode("latin-1") for _ in range(2)], rules.accept)
            values, lattice, numbers, coords = _read(text)
    except COMPRESSION_ERRORS as error:
        raise TomatError(
            f"{source} is not a complete cube ({type(error).__name__}: {error}). It may be cut off or damaged: compare "
            "it with the original."
        ) from error
    return density_of(
        values,
        lattice,
        numbers,
        coords,
        source=source,
        material_id=material_id or Path(source).name,
        rules=rules,
        partial=kind is not None and kind.form == "not_total",
        cube=True,
    )


def _read(text: BoundedText) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """What follows the titles: rho x V float64 `[nx, ny, nz]`, lattice in A, atomic numbers, and fractional coordinates
    from the first voxel."""
    source = text.source
    head = _words(text, "the number of atoms and the origin", 4, 5)
    n_atoms, n_data = _whole(head[0], source), _whole(head[4], source) if len(head) > 4 else 1
    if n_atoms < 0 or n_data != 1:
        raise TomatError(f"{source} holds orbitals, or {n_data} values a voxel; expected one density.")
    check_atom_count(n_atoms, source)
    axes = [_words(text, "the voxels along an axis", 4, 4) for _ in range(3)]
    sides = [_whole(axis[0], source) for axis in axes]
    if len({side > 0 for side in sides}) != 1:
        raise TomatError(f"{source}: the sides of the grid are {sides}; expected three of one sign.")
    # A negative number of voxels: lengths in A (Gaussian's `cubegen`).
    unit_a = BOHR_A if sides[0] > 0 else 1.0
    nx, ny, nz = (abs(side) for side in sides)
    check_grid_shape((nx, ny, nz), source)
    lattice = np.array([axis[1:] for axis in axes]) * np.array([[nx], [ny], [nz]]) * unit_a
    volume_a3 = abs(float(np.linalg.det(lattice)))
    if not np.isfinite(lattice).all() or volume_a3 < 1e-6:
        raise TomatError(f"{source}: the lattice is flat or not finite; the file is damaged.")
    atoms = np.array([_words(text, "an atom", 5, 5) for _ in range(n_atoms)])
    numbers = np.array([_whole(atom[0], source) for atom in atoms.tolist()])
    if numbers.min() < 1 or numbers.max() > len(SYMBOLS):
        raise TomatError(f"{source}: atomic numbers {numbers.tolist()[:8]}; expected some of 1..{len(SYMBOLS)}.")
    coords = (atoms[:, 2:] - np.array(head[1:4])) * unit_a @ np.linalg.inv(lattice)
    n_values = nx * ny * nz
    text.limit_bytes = text.read_bytes + 2 * n_values * _VALUE_BYTES + 2**20
    values = read_block(text, n_values, f"grid {nx} x {ny} x {nz}", KIND).reshape(nx, ny, nz)
    while line := text.line(LONGEST_LINE_BYTES):
        if line.strip():
            raise TomatError(f"{source} goes on after the {n_values:,} values of its grid; the file is damaged.")
    return values * (volume_a3 / BOHR_A**3), lattice, numbers, coords


def _words(text: BoundedText, what: str, least: int, most: int) -> list[float]:
    """The numbers of the next line."""
    line = text.line()
    try:
        values = [float(word) for word in line.split()]
    except ValueError:
        values = []
    if not least <= len(values) <= most or not np.isfinite(values).all():
        raise TomatError(
            f"{text.source} is not a complete cube: found {line[:60].decode('latin-1').strip()!r} where {what} is "
            f"expected, {least} finite numbers."
        )
    return values


def _whole(value: float, source: str) -> int:
    if value != int(value):
        raise TomatError(f"{source}: found {value:g} where a whole number is expected; this is no cube.")
    return int(value)


def write_cube(grid: DensityGrid, file: IO[bytes]) -> None:
    """Write `grid.rho` in e/bohr^3, six values a line and each row along z from a line of its own, as Gaussian does."""
    n_atoms, (nx, ny, nz) = len(grid.atomic_numbers), grid.grid_shape
    lines = [f"{grid.material_id or grid.formula}, written by tomat", "electrons/bohr^3, lengths in bohr"]
    lines.append(f"{n_atoms:5d}" + 3 * f" {0:.12f}")
    for side, vector in zip((nx, ny, nz), grid.lattice / BOHR_A, strict=True):
        lines.append(f"{side:5d}" + "".join(f" {length / side:.12f}" for length in vector))
    for number, place in zip(grid.atomic_numbers.tolist(), grid.frac_coords @ grid.lattice / BOHR_A, strict=True):
        lines.append(f"{number:5d} {number:.6f}" + "".join(f" {length:.12f}" for length in place))
    file.write(("\n".join(lines) + "\n").encode())
    values = grid.rho.astype(np.float64) * BOHR_A**3
    for plane in values:
        rows = []
        for row in plane.tolist():
            words = [f" {value:.8E}" for value in row]
            rows += ["".join(words[start : start + _PER_LINE]) for start in range(0, nz, _PER_LINE)]
        file.write(("\n".join(rows) + "\n").encode())
