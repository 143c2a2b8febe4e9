"""VASP's CHGCAR: text, rho x V in electrons, x fastest. Plain, `.gz`, `.bz2` or `.xz`."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density import limits
from tomat.data.density.checks import density_of
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.poscar import read_header, species_of
from tomat.data.density.rules import DEFAULT_RULES, ReadRules, check_kind

Location = str | os.PathLike[str]

_VALUE_BYTES = 32
"""Most bytes of text for a value: VASP writes 18, `%.18e` takes 26."""

_BYTES_PER_ATOM = 100_000
"""Most bytes of text for the augmentation occupancies of an atom in one block: 32 projectors, 32^2 values."""

_AUGMENTATION = b"augmentation occupancies"
_IMAGINARY = b" (imaginary part)"
"""Follows `_AUGMENTATION` where magnetisation is not collinear, as with spin-orbit coupling."""
KIND = "CHGCAR"


def read_chgcar(path: Location, material_id: str | None = None, rules: ReadRules = DEFAULT_RULES) -> DensityGrid:
    """The density, in e/Å³, of a CHGCAR. Spin densities and augmentation occupancies are checked, but not returned."""
    source = os.fspath(path)
    with limits.opened(source, KIND) as text:
        header = read_header(text)
        partial = check_kind(source, [header.title], rules.accept)
        numbers = species_of(header, Path(path), rules)
        values, _ = _read_values(text, len(numbers))
    name = material_id or Path(source).name
    atoms = header.lattice, numbers, header.frac_coords
    return density_of(values, *atoms, source=source, material_id=name, rules=rules, partial=partial)


@dataclass(frozen=True)
class Parts:
    """What a file of a density holds beside the total density."""

    spin_densities: int = 0
    """0, 1 (collinear) or 3 (non-collinear)."""
    augmentation: bool = False
    """Occupancies inside the PAW spheres."""
    ghost_atoms: int = 0
    """Basis functions without a nucleus, Z = 0 in a cube; not among the atoms that are read."""


def read_parts(path: Location) -> Parts:
    """What a CHGCAR holds beside the total density; it is read to its end."""
    with limits.opened(os.fspath(path), KIND) as text:
        return _read_values(text, sum(read_header(text).counts))[1]


@dataclass(frozen=True, eq=False)
class Augmentation:
    """Augmentation occupancies of a CHGCAR (the inside of the PAW spheres), line by line, and their atoms."""

    crystal: Crystal
    lines: tuple[str, ...]
    """Each with its line end: `augmentation occupancies   1  33` and the values, atom after atom. As in the file,
    except for what pymatgen cannot read: numbers without a space between them, and exponents with D or without E."""

    def apart_a(self, lattice: np.ndarray, frac_coords: np.ndarray) -> float:
        """How far, in A, an atom or the end of an axis lies from where these atoms in another cell have it, at most."""
        apart = self.crystal.frac_coords - frac_coords
        moved = (apart - np.round(apart)) @ lattice, self.crystal.lattice - lattice
        return float(np.linalg.norm(np.concatenate(moved), axis=1).max())


def read_grid_shape(path: Location) -> tuple[int, int, int]:
    """The sides of the grid of a CHGCAR. Reads none of its values."""
    with limits.opened(os.fspath(path), KIND) as text:
        read_header(text)
        return _shape(text)


def read_augmentation(path: Location, rules: ReadRules = DEFAULT_RULES) -> Augmentation:
    source = os.fspath(path)
    with limits.opened(source, KIND) as text:
        header = read_header(text)
        crystal = Crystal(header.lattice, species_of(header, Path(path), rules), header.frac_coords, source)
        shape = _shape(text)
        limits.read_block(text, int(np.prod(shape)), f"grid {_sides(shape)}", KIND)
        lines: list[str] = []
        parts: list[tuple[int, bool]] = []
        atom = 0
        while (line := text.line(limits.LONGEST_LINE_BYTES)).strip().startswith(_AUGMENTATION):
            atom, imaginary, count = _occupancies(line.strip(), atom, source)
            parts.append((atom, imaginary))
            if max(atom, count) > 999:
                # First in columns without a space, as VASP writes and reads them (2I4), then apart, since pymatgen
                # reads the end of the line.
                columns = f"{atom:4d}" if atom < 10_000 else "****"
                line = _AUGMENTATION + _IMAGINARY * imaginary + f"{columns}{count:4d} {atom} {count}\n".encode()
            lines.append(line.decode("latin-1"))
            found = 0
            while found < count:
                if not (line := text.line(limits.LONGEST_LINE_BYTES)):
                    raise TomatError(f"{source} ends within the augmentation occupancies of atom {atom}.")
                spelt, values = limits.parsed(line, source, "augmentation occupancies", KIND)
                found += values.size
                lines.append(spelt.decode("latin-1"))
    n_atoms = len(crystal.atomic_numbers)
    kinds = sorted({False} | {imaginary for _, imaginary in parts})
    if parts != list(itertools.product(range(1, n_atoms + 1), kinds)):
        imaginary = ", some without an imaginary part" if len(kinds) > 1 else ""
        raise TomatError(
            f"{source} has augmentation occupancies of {len(dict(parts))} of {n_atoms} atoms{imaginary}; expected all."
        )
    return Augmentation(crystal, tuple(lines))


def _read_values(text: limits.BoundedText, n_atoms: int) -> tuple[np.ndarray, Parts]:
    """The total density, rho x V, `[nx, ny, nz]`, and what else the file holds. The rest is read to the end, to notice
    left-over values, a spin density that is cut off, and a damaged end of the compression."""
    source = text.source
    shape = _shape(text)
    n_values = int(np.prod(shape))
    text.limit_bytes = text.read_bytes + 4 * (n_values * _VALUE_BYTES + n_atoms * _BYTES_PER_ATOM) + 2**20
    total = limits.read_block(text, n_values, f"grid {_sides(shape)}", KIND)
    blocks, loose, per_line, atom, augmentation = 1, 0, 1, 0, False
    while line := _next_line(text, limits.LONGEST_LINE_BYTES):
        grid = _grid_line(line)
        if grid is not None:
            if grid != shape or loose not in (0, n_atoms) or blocks == 4:
                raise TomatError(
                    f"{source}: after {blocks} block(s) on the grid {_sides(shape)} and {loose} further values there "
                    f"is a grid {_sides(grid)}; expected up to three spin densities on the same grid."
                )
            limits.read_block(text, n_values, f"spin density on the grid {_sides(shape)}", KIND)
            blocks, loose, atom = blocks + 1, 0, 0
        elif line.startswith(_AUGMENTATION):
            atom, _, count = _occupancies(line, atom, source)
            limits.read_block(text, count, "augmentation occupancies", KIND)
            augmentation = True
        else:  # the magnetic moments of the atoms stand before a spin density
            _, moments = limits.parsed(line, source, "magnetic moments", KIND)
            per_line = max(per_line, moments.size)
            loose += (
                limits.without_padding(moments, n_atoms - loose, per_line).size if loose < n_atoms else moments.size
            )
            if loose > n_atoms:
                break
    if loose:
        raise TomatError(
            f"{source}: values are left over after {n_values:,} of the grid {_sides(shape)}; one of the two is damaged."
        )
    if blocks == 3:
        raise TomatError(f"{source} is not a complete CHGCAR: it ends after two of three magnetisation densities.")
    return np.ascontiguousarray(total.reshape(shape, order="F")), Parts(blocks - 1, augmentation)


def _occupancies(line: bytes, before: int, source: str) -> tuple[int, bool, int]:
    """The atom, whether its imaginary part follows, and how many values follow, from the line before them. VASP writes
    each number in four columns (2I4): 1000 and 1234 become one word, and atom 10,000 becomes `****`."""
    imaginary = line.startswith(_AUGMENTATION + _IMAGINARY)
    words = line.removeprefix(_AUGMENTATION).removeprefix(_IMAGINARY).split()
    if len(words) == 1:
        words = [words[0][:-4], words[0][-4:]]
    elif len(words) > 2:  # as `read_augmentation` gives it, once in columns and once apart
        columns = b"".join(words[:-2])
        words = words[-2:]
        if columns not in (b"".join(words), b"****" + words[1]):
            words = []
    if len(words) == 2 and words[0] == b"****":
        words[0] = str(before if imaginary else before + 1).encode()
    if len(words) != 2 or not all(word.isdigit() and len(word) <= 6 for word in words):
        found = line[:60].decode("latin-1")
        raise TomatError(f"{source}: found {found!r}; expected an atom and the number of augmentation occupancies.")
    return int(words[0]), imaginary, int(words[1])


def _shape(text: limits.BoundedText) -> tuple[int, int, int]:
    """The sides of the grid, from the line that follows the header."""
    shape = _grid_line(_next_line(text, 4096))
    if shape is None:
        raise TomatError(f"{text.source} is not a complete CHGCAR: no line with the three sides of the grid.")
    limits.check_grid_shape(shape, text.source)
    return shape


def _next_line(text: limits.BoundedText, longest: int) -> bytes:
    """The next line that is not empty, stripped; empty at the end."""
    while line := text.line(longest):
        if stripped := line.strip():
            return stripped
    return b""


def _grid_line(line: bytes) -> tuple[int, int, int] | None:
    """The sides in a line of three whole numbers; None for another line."""
    words = line.split()
    if len(words) != 3 or not all(word.isdigit() and len(word) < 10 for word in words):
        return None
    nx, ny, nz = (int(word) for word in words)
    return nx, ny, nz


def _sides(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(str, shape))
