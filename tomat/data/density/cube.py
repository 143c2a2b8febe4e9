"""Gaussian's cube: text, e/bohr^3, z fastest, lengths in bohr. Plain, `.gz`, `.bz2` or `.xz`. pymatgen and ASE are not
used: they write a voxel's sides to six decimals, which costs 1e-5 of the electrons, and they read truncated files."""

import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density import limits
from tomat.data.density.checks import density_of
from tomat.data.density.chgcar import Location, Parts
from tomat.data.density.elements import SYMBOLS
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid
from tomat.data.density.rules import DEFAULT_RULES, ReadRules, check_kind

KIND = "cube"
SUFFIXES = (".cube", ".cub")
_VALUE_BYTES = 32
"""Most bytes of text for a value: Gaussian writes 13."""
_PER_LINE = 6
_MOST_ON_A_LINE = 2_000
"""Most words on the line of data sets: how many there are, and a name (a number) of each."""

_log = logging.getLogger(__name__)


def read_cube(path: Location, material_id: str | None = None, rules: ReadRules = DEFAULT_RULES) -> DensityGrid:
    """The density, in e/Å³, of a cube whose voxels tile the cell. Ghost atoms (Z = 0) are left out, with a warning."""
    source = os.fspath(path)
    with limits.opened(source, KIND) as text:
        header = _read_header(text)
        partial = check_kind(source, header.titles, rules.accept)
        values = _read_values(text, header)
    if header.ghosts:
        _log.warning("%s has %d ghost atom(s) (Z = 0), which are left out.", source, header.ghosts)
    values *= abs(float(np.linalg.det(header.lattice))) / BOHR_A**3
    name = material_id or Path(source).name
    nuclei = header.numbers > 0
    atoms = header.lattice, header.numbers[nuclei], header.coords[nuclei]
    return density_of(values, *atoms, source=source, material_id=name, rules=rules, partial=partial, cube=True)


def read_cube_parts(path: Location) -> Parts:
    """What a cube holds beside the total density. Reads none of its values."""
    with limits.opened(os.fspath(path), KIND) as text:
        return Parts(ghost_atoms=_read_header(text).ghosts)


@dataclass(frozen=True)
class _Header:
    titles: list[str]
    shape: tuple[int, int, int]
    lattice: np.ndarray
    numbers: np.ndarray
    """int64 `[n]`, 0 for a ghost atom: basis functions without a nucleus."""
    coords: np.ndarray
    """float64 `[n, 3]`, fractional, from the first voxel."""

    @property
    def ghosts(self) -> int:
        return int(np.count_nonzero(self.numbers == 0))


def _read_header(text: limits.BoundedText) -> _Header:
    """Read up to the values. After a negative number of atoms (Gaussian's `cubegen`) a line names the data sets."""
    source = text.source
    titles = [text.line().decode("latin-1") for _ in range(2)]
    head = _words(text, "the number of atoms and the origin", 4, 5)
    n_atoms, n_data = _whole(head[0], source), _whole(head[4], source) if len(head) > 4 else 1
    if n_data != 1:
        raise TomatError(f"{source} holds {n_data} values a voxel; expected one density.")
    limits.check_atom_count(abs(n_atoms), source)
    axes = [_words(text, "the voxels along an axis", 4) for _ in range(3)]
    sides = [_whole(axis[0], source) for axis in axes]
    if len({side > 0 for side in sides}) != 1:
        raise TomatError(f"{source}: the sides of the grid are {sides}; expected three of one sign.")
    # A negative number of voxels: lengths in A (Gaussian's `cubegen`).
    unit_a = BOHR_A if sides[0] > 0 else 1.0
    nx, ny, nz = (abs(side) for side in sides)
    limits.check_grid_shape((nx, ny, nz), source)
    lattice = np.array([axis[1:] for axis in axes]) * np.array([[nx], [ny], [nz]]) * unit_a
    if not np.isfinite(lattice).all() or abs(float(np.linalg.det(lattice))) < 1e-6:
        raise TomatError(f"{source}: the lattice is flat or not finite; the file is damaged.")
    atoms = np.array([_words(text, "an atom", 5) for _ in range(abs(n_atoms))])
    numbers = np.array([_whole(atom[0], source) for atom in atoms.tolist()])
    if numbers.min() < 0 or not 1 <= numbers.max() <= len(SYMBOLS):
        raise TomatError(
            f"{source}: atomic numbers {numbers.tolist()[:8]}; expected 1..{len(SYMBOLS)}, or 0 of ghosts."
        )
    if n_atoms < 0:
        sets = _words(text, "the number of data sets and a name of each", 1, _MOST_ON_A_LINE)
        if len(sets) != 2 or sets[0] != 1:
            shown = " ".join(f"{each:g}" for each in sets[:4])
            raise TomatError(
                f"{source} holds orbitals, or several data sets: {shown!r} follows its atoms; expected `1` and the "
                "name of one density. Write each data set to a file of its own."
            )
    coords = (atoms[:, 2:] - np.array(head[1:4])) * unit_a @ np.linalg.inv(lattice)
    return _Header(titles, (nx, ny, nz), lattice, numbers, coords)


def _read_values(text: limits.BoundedText, header: _Header) -> np.ndarray:
    """The values in e/bohr^3, float64 `[nx, ny, nz]`; nothing may follow them."""
    source, n_values = text.source, math.prod(header.shape)
    text.limit_bytes = text.read_bytes + 2 * n_values * _VALUE_BYTES + 2**20
    values = limits.read_block(text, n_values, f"grid {' x '.join(map(str, header.shape))}", KIND)
    while line := text.line(limits.LONGEST_LINE_BYTES):
        if line.strip():
            raise TomatError(f"{source} goes on after the {n_values:,} values of its grid; the file is damaged.")
    return values.reshape(header.shape)


def _words(text: limits.BoundedText, what: str, least: int, most: int = 0) -> list[float]:
    """The numbers of the next line, `least` of them or up to `most`."""
    line = text.line()
    values = limits.finite_numbers(line)
    if values is None or not least <= len(values) <= max(least, most):
        raise TomatError(
            f"{text.source} is not a complete cube: found {line[:60].decode('latin-1').strip()!r} where {what} is "
            f"expected, {least} finite numbers."
        )
    return values


def _whole(value: float, source: str) -> int:
    if value != int(value):
        raise TomatError(f"{source}: found {value:g} where a whole number is expected; this is no cube.")
    return int(value)


def write_cube(grid: DensityGrid, file: IO[bytes], title: str = "") -> None:
    """Write `grid.rho` in e/bohr^3, six values per line. Each row along z starts a new line, as in Gaussian's cubes."""
    n_atoms, (nx, ny, nz) = len(grid.atomic_numbers), grid.grid_shape
    lines = [title or f"{grid.material_id or grid.formula}, written by tomat", "electrons/bohr^3, lengths in bohr"]
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
