"""VASP's CHGCAR: text, rho x V in electrons, x fastest. Plain, `.gz`, `.bz2` or `.xz`."""

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.density.checks import density_of
from tomat.density.crystal import Crystal
from tomat.density.grid import DensityGrid
from tomat.density.limits import COMPRESSION_ERRORS, BoundedText, check_grid_shape, open_text
from tomat.density.poscar import read_header, species_of
from tomat.density.rules import DEFAULT_RULES, ReadRules

Location = str | os.PathLike[str]

NOT_TOTAL = {
    "AECCAR0": "the density of the cores",
    "AECCAR1": "the superposition of free atoms",
    "PARCHG": "the density of some bands",
}
"""VASP's files of the same format, by name, that hold another density than the total one."""

NO_DENSITY = {"ELFCAR": "a localisation function", "LOCPOT": "a potential"}
"""VASP's files of the same format, by name, that hold no density in any unit."""

_VALUE_BYTES = 32
"""Most bytes of text for a value: VASP writes 18, `%.18e` takes 26."""

_BYTES_PER_ATOM = 100_000
"""Most bytes of text for the augmentation occupancies of an atom in one block: 32 projectors, 32^2 values."""

_LINES_AT_ONCE = 1 << 16
_LONGEST_LINE_BYTES = 1 << 26
_AUGMENTATION = b"augmentation occupancies"


def read_chgcar(path: Location, material_id: str | None = None, rules: ReadRules = DEFAULT_RULES) -> DensityGrid:
    """Read the total density of a CHGCAR; spin densities and augmentation occupancies in it are checked and left alone.

    Args:
        material_id: name to give it; else the file name.
        rules: elements of a file that names none, and refusals that are lifted.

    Returns:
        The density in e/A^3; negative values are set to zero and counted in `clipped_voxels`.

    Raises:
        TomatError: no such file, a file that is no CHGCAR, ends early, holds more or fewer values than its grid, or
            names no elements; the name of a file that is no total density; whatever `density_of` refuses.
    """
    source = os.fspath(path)
    if not Path(path).is_file():
        raise TomatError(f"no CHGCAR at {source}; expected a file.")
    if (name := _name_among(NO_DENSITY, source)) is not None:
        raise TomatError(f"{source}: {name} holds {NO_DENSITY[name]}, no density; expected a CHGCAR.")
    name = _name_among(NOT_TOTAL, source)
    if name is not None and "not_total" not in rules.accept:
        raise TomatError(
            f"{source}: {name} holds {NOT_TOTAL[name]}, no total density; expected a CHGCAR. `--accept not_total` "
            "reads it nevertheless."
        )
    with _opened(source) as text:
        header = read_header(text)
        numbers = species_of(header, Path(path), rules)
        values = _read_values(text, len(numbers))
    return density_of(
        values,
        header.lattice,
        numbers,
        header.frac_coords,
        source=source,
        material_id=material_id or Path(source).name,
        rules=rules,
        partial=name is not None,
    )


@dataclass(frozen=True, eq=False)
class Augmentation:
    """What a CHGCAR holds of the inside of the PAW spheres, line by line, and the atoms it belongs to."""

    crystal: Crystal
    lines: tuple[str, ...]
    """Each with its end: `augmentation occupancies   1  33` and the values, atom after atom."""


def read_grid_shape(path: Location) -> tuple[int, int, int]:
    """The sides of the grid of a CHGCAR; of its values none is read.

    Raises:
        TomatError: no such file, or no complete header.
    """
    source = os.fspath(path)
    with _opened(source) as text:
        read_header(text)
        return _shape(text)


def read_augmentation(path: Location, rules: ReadRules = DEFAULT_RULES) -> Augmentation:
    """The augmentation occupancies of the total density of a CHGCAR.

    Raises:
        TomatError: no such file, no complete CHGCAR, or other than one block of occupancies for each of its atoms.
    """
    source = os.fspath(path)
    with _opened(source) as text:
        header = read_header(text)
        crystal = Crystal(header.lattice, species_of(header, Path(path), rules), header.frac_coords, source)
        shape = _shape(text)
        _block(text, int(np.prod(shape)), f"grid {_sides(shape)}")
        lines: list[str] = []
        atoms: list[int] = []
        while (line := text.line(_LONGEST_LINE_BYTES)).strip().startswith(_AUGMENTATION):
            words = line.split()
            if not (len(words) == 4 and words[2].isdigit() and words[3].isdigit() and len(words[3]) <= 6):
                raise TomatError(f"{source}: found {line[:60]!r}; expected `augmentation occupancies ATOM COUNT`.")
            atoms.append(int(words[2]))
            lines.append(line.decode("latin-1"))
            found = 0
            while found < int(words[3]):
                if not (line := text.line(_LONGEST_LINE_BYTES)):
                    raise TomatError(f"{source} ends in the augmentation occupancies of atom {atoms[-1]}.")
                found += _parsed(line, source, "augmentation occupancies").size
                lines.append(line.decode("latin-1"))
        if atoms != list(range(1, len(crystal.atomic_numbers) + 1)):
            raise TomatError(
                f"{source} has augmentation occupancies of {len(atoms)} of its {len(crystal.atomic_numbers)} atoms; "
                "expected those of each, in order. Give the CHGCAR of a PAW calculation without spin-orbit coupling."
            )
    return Augmentation(crystal, tuple(lines))


@contextlib.contextmanager
def _opened(source: str) -> Iterator[BoundedText]:
    """The text of a file that has the form of a CHGCAR."""
    if not Path(source).is_file():
        raise TomatError(f"no CHGCAR at {source}; expected a file.")
    try:
        text = open_text(source)
        with text.stream:
            yield text
    except COMPRESSION_ERRORS as error:
        raise TomatError(
            f"{source} is not a complete CHGCAR ({type(error).__name__}: {error}). It may be cut off or damaged: "
            "compare it with the original."
        ) from error


def is_partial(location: str) -> bool:
    """Whether a file is called as one that holds a part of the electrons, which only `--accept not_total` reads."""
    return _name_among(NOT_TOTAL, location) is not None


def _name_among(names: Iterable[str], location: str) -> str | None:
    """The first of VASP's names that the file's name holds."""
    return next((name for name in names if name in location.rsplit("/", 1)[-1].upper()), None)


def _read_values(text: BoundedText, n_atoms: int) -> np.ndarray:
    """The total density, rho x V, `[nx, ny, nz]`. What is behind it is walked through to the end, so that values left
    over, a spin density cut off and a damaged end of the compression are seen."""
    source = text.source
    shape = _shape(text)
    n_values = int(np.prod(shape))
    text.limit_bytes = text.read_bytes + 4 * (n_values * _VALUE_BYTES + n_atoms * _BYTES_PER_ATOM) + 2**20
    total = _block(text, n_values, f"grid {_sides(shape)}")
    blocks, loose = 1, 0
    while line := _next_line(text, _LONGEST_LINE_BYTES):
        grid = _grid_line(line)
        if grid is not None:
            if grid != shape or loose not in (0, n_atoms) or blocks == 4:
                raise TomatError(
                    f"{source}: after {blocks} block(s) on the grid {_sides(shape)} and {loose} further values there "
                    f"is a grid {_sides(grid)}; expected up to three spin densities on the same grid."
                )
            _block(text, n_values, f"spin density on the grid {_sides(shape)}")
            blocks, loose = blocks + 1, 0
        elif line.startswith(_AUGMENTATION):
            words = line.split()
            if not (words[-1].isdigit() and len(words[-1]) <= 6):
                raise TomatError(f"{source}: found {line[:60]!r}; expected the number of augmentation occupancies.")
            _block(text, int(words[-1]), "augmentation occupancies")
        else:  # the magnetic moments of the atoms stand before a spin density
            loose += _parsed(line, source, "magnetic moments").size
            if loose > n_atoms:
                break
    if loose:
        raise TomatError(
            f"{source}: values are left over after the {n_values:,} of the grid {_sides(shape)}; the grid line or the "
            "values are damaged."
        )
    if blocks == 3:
        raise TomatError(f"{source} is not a complete CHGCAR: it ends after two of three magnetisation densities.")
    return np.ascontiguousarray(total.reshape(shape, order="F"))


def _shape(text: BoundedText) -> tuple[int, int, int]:
    """The sides of the grid, from the line that follows the header."""
    shape = _grid_line(_next_line(text, 4096))
    if shape is None:
        raise TomatError(f"{text.source} is not a complete CHGCAR: no line with the three sides of the grid.")
    check_grid_shape(shape, text.source)
    return shape


def _next_line(text: BoundedText, longest: int) -> bytes:
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


def _block(text: BoundedText, n_values: int, what: str) -> np.ndarray:
    """`n_values` numbers over as many lines as they take; a block ends with its line."""
    parts: list[np.ndarray] = []
    found, per_line = 0, 1
    while found < n_values:
        # As many lines as are certain to belong to the block, from the values of its first line.
        certain = min((n_values - found) // per_line, _LINES_AT_ONCE) if found else 1
        lines = text.lines(max(certain, 1), _LONGEST_LINE_BYTES)
        if not lines:
            raise TomatError(
                f"{text.source} is not a complete CHGCAR: {found:,} of {n_values:,} values of the {what}. It may be "
                "cut off: compare its size with the original."
            )
        part = _parsed(lines, text.source, what)
        if not found:
            per_line = max(part.size, 1)
        parts.append(part)
        found += part.size
    if found != n_values:
        raise TomatError(f"{text.source}: {found:,} values where the {what} has {n_values:,}; the file is damaged.")
    return np.concatenate(parts) if parts else np.empty(0)


def _parsed(lines: bytes, source: str, what: str) -> np.ndarray:
    """The numbers in a piece of text, of which every word must be one."""
    values = _numbers(lines)
    if values is None:
        # Fortran leaves the E out where an exponent has three digits: 0.12345678901-100.
        values = _numbers(re.sub(rb"(\d)([+-]\d{3})\b", rb"\1E\2", lines))
    if values is None:
        word = next((word for word in lines.split() if _numbers(word) is None), b"")
        raise TomatError(
            f"{source} is not a complete CHGCAR: found {word[:40].decode('latin-1')!r} among the values of the {what}."
        )
    return values


def _numbers(text: bytes) -> np.ndarray | None:
    """All numbers of a text; None if a word of it is none."""
    from pymatgen.optimization.fast_parser import parse_n_doubles

    space = np.frombuffer(b" " + text, dtype=np.uint8) <= 32
    n_words = int(np.count_nonzero(space[:-1] & ~space[1:]))
    values = np.empty(n_words + 1)
    # The parser stops at what is no number, and takes 1.2.3 or 1-100 as two.
    return values[:n_words] if parse_n_doubles(BytesIO(text), values, n_words + 1) == n_words else None


def _sides(shape: tuple[int, int, int]) -> str:
    return " x ".join(map(str, shape))
