"""The structure at the head of VASP's density files, read strictly: nothing that it does not say is made up.

pymatgen's reader of the same text takes hydrogen, helium, ... where no element is named, drops species without a count,
and ignores what is left over; that is why the densities have one of their own.
"""

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.elements import SYMBOLS, atomic_number
from tomat.data.density.limits import (
    COMPRESSION_ERRORS,
    BoundedText,
    check_atom_count,
    finite_numbers,
    open_text,
    structure_text,
)
from tomat.data.density.rules import ReadRules

MOST_GROUPS = 400
"""Counts in a header. VASP writes 20 a line, and a line of them for atoms that are not sorted by element."""

NEIGHBOURS = ("POSCAR", "CONTCAR", "POTCAR")
"""Files of the same calculation that name its elements."""

OF_A_CALCULATION = ("CHGCAR", "CHG", "AECCAR0", "AECCAR1", "AECCAR2", "PARCHG")
"""Names that VASP gives: what lies beside such a file is of the same calculation. `mp-1.CHGCAR` and `mp-1.vasp` lie in
collections, beside files of others."""

LARGEST_VOLUME_CHANGE = 0.2
"""Of the cell, between the density and a POSCAR or CONTCAR of its calculation: relaxations stay below it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    """A structure as a POSCAR has it."""

    lattice: np.ndarray
    counts: tuple[int, ...]
    species: tuple[str, ...] | None
    """Element of each group; None where the text names none (VASP 4)."""
    frac_coords: np.ndarray
    site_symbols: tuple[str, ...] | None = None
    """Elements at the ends of the coordinate lines."""
    title: str = ""

    @property
    def volume_a3(self) -> float:
        return abs(float(np.linalg.det(self.lattice)))

    @property
    def elements(self) -> list[str] | None:
        """Of each atom, from the species line or the ends of the coordinate lines; None where neither names any."""
        if self.species is not None:
            return _repeated(self.species, self.counts)
        return None if self.site_symbols is None else list(self.site_symbols)

    def atomic_numbers(self, species: tuple[str, ...]) -> np.ndarray:
        """int64 `[n]`, with an element for each group."""
        return np.repeat([atomic_number(symbol) for symbol in species], self.counts).astype(np.int64)


def read_header(text: BoundedText) -> Header:
    """Read title, scale, lattice, species, counts and coordinates, and the empty line after them."""
    source = text.source
    title = _line(text, "the title")
    scale = _numbers(_line(text, "the scale"), "the scale", source)
    lattice = np.array([_numbers(_line(text, "the lattice"), "a lattice vector", source, 3) for _ in range(3)])
    volume_a3 = abs(float(np.linalg.det(lattice)))
    if len(scale) == 1 and scale[0] < 0 and volume_a3 > 0:  # the volume of the cell
        factor = np.full(3, (-scale[0] / volume_a3) ** (1 / 3))
    else:
        factor = np.array(scale * 3 if len(scale) == 1 else scale)
    if factor.shape != (3,) or not (factor > 0).all():
        raise TomatError(f"{source}: the scale is {scale}; expected a factor, a negative volume or three factors.")
    lattice = lattice * factor
    if not np.isfinite(lattice).all() or abs(float(np.linalg.det(lattice))) < 1e-6:
        raise TomatError(f"{source}: the lattice is flat or not finite; the file is damaged.")
    species, counts, mode = _groups(text)
    if mode[:1] in (b"s", b"S"):  # selective dynamics
        mode = _line(text, "Direct or Cartesian").strip()
        selective = True
    else:
        selective = False
    if mode[:1] not in (b"d", b"D", b"c", b"C", b"k", b"K"):
        raise TomatError(
            f"{source}: found {_shown(mode)} after the counts {_words(counts)}; expected Direct or Cartesian."
        )
    coords, symbols = _coordinates(text, sum(counts), selective)
    if mode[:1] not in b"dD":
        coords = coords * factor @ np.linalg.inv(lattice)
    if species is not None and symbols is not None and list(symbols) != _repeated(species, counts):
        raise TomatError(
            f"{source}: the species line names {_words(species)}, but the ends of the coordinate lines differ from it: "
            f"{_words(dict.fromkeys(symbols))}; one of them is wrong."
        )
    return Header(lattice, counts, species, coords, symbols if species is None else None, title.decode("latin-1"))


def species_of(header: Header, path: Path, rules: ReadRules) -> np.ndarray:
    """The elements of a header, from itself, from `--species`, or from the files of its calculation beside it: atomic
    numbers int64 `[n]`.

    A header that names its elements is read as it is, and what the flag says else is said to be left aside.
    """
    groups = f"{len(header.counts)} group(s) of {_words(header.counts)} atom(s)"
    if (named := header.elements) is not None:
        if rules.species and tuple(dict.fromkeys(named)) != rules.species and header.species != rules.species:
            _log.warning(
                "%s names its elements, %s; --species %s is for files that name none, and is left aside.",
                path,
                _words(dict.fromkeys(named)),
                _words(rules.species),
            )
        return np.array([atomic_number(symbol) for symbol in named], dtype=np.int64)
    if rules.species and len(rules.species) != len(header.counts):
        raise TomatError(f"{path} has {groups}, but --species names {_words(rules.species)}; expected one a group.")
    found, misfits = _beside(header, path)
    if rules.species:
        # Where the files beside it differ among themselves, the flag decides between them.
        if found and rules.species not in found.values():
            raise TomatError(
                f"{path} names no elements (VASP 4), --species {_words(rules.species)}, but "
                + ", ".join(f"the {name} beside it {_words(species)}" for name, species in found.items())
                + ". Correct the flag, or move what does not belong there."
            )
        return header.atomic_numbers(rules.species)
    if len(set(found.values())) > 1:
        raise TomatError(
            f"{path} names no elements (VASP 4), and the files beside it differ: "
            + ", ".join(f"{name} has {_words(species)}" for name, species in found.items())
            + ". Name them with --species."
        )
    if not found:
        beside = f" What lies beside it does not fit: {'; '.join(misfits)}." if misfits else ""
        folder = (
            "beside it" if _is_of_its_folder(path) else "beside it, both in a folder of their own and this as CHGCAR"
        )
        raise TomatError(
            f"{path} names no elements: it has no species line (VASP 4), only {groups}.{beside} Name them with "
            f"--species, such as --species Na, or put the POSCAR, CONTCAR or POTCAR of the calculation {folder}."
        )
    name, species = next(iter(found.items()))
    _log.warning("%s names no elements; taken from the %s beside it: %s.", path, name, _words(species))
    return header.atomic_numbers(species)


def check_species_used(paths: Iterable[str], rules: ReadRules) -> None:
    """Refuse `--species` where every file names its elements, and none those of the flag.

    A file that cannot be read is passed over, and the flag taken to be for it: its reader says what is wrong.
    """
    first = ""
    for path in paths if rules.species else ():
        try:
            text = open_text(path)
            with text.stream:
                header = read_header(text)
        except (TomatError, *COMPRESSION_ERRORS):
            return
        if header.elements is None or rules.species in (header.species, tuple(dict.fromkeys(header.elements))):
            return
        first = first or f"{path} names {_words(dict.fromkeys(header.elements))}"
    if first:
        raise TomatError(
            f"{first}, --species {_words(rules.species)}; the flag is for files that name none, and every file names "
            "its elements. Leave it out."
        )


def _is_of_its_folder(path: Path) -> bool:
    """Whether a file is called as VASP calls it, so that the folder is its calculation's and not a collection."""
    return re.sub(r"\.(gz|bz2|xz)$", "", path.name) in OF_A_CALCULATION


def _beside(header: Header, path: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The species that the files of the calculation name, by file; and of those that do not fit, why."""
    found: dict[str, tuple[str, ...]] = {}
    misfits = []
    volume_a3 = header.volume_a3
    for name in NEIGHBOURS if _is_of_its_folder(path) else ():
        for beside in (path.with_name(name), path.with_name(f"{name}.gz")):
            if not beside.is_file():
                continue
            try:
                species, other = _named_by(beside)
            except TomatError as error:
                misfits.append(str(error).rstrip("."))
                continue
            if species is None:
                misfits.append(f"{beside.name} names no element either")
            elif len(species) != len(header.counts) or (other is not None and other.counts != header.counts):
                misfits.append(f"{beside.name} has {_words(species)} {_words(other.counts if other else ())}".rstrip())
            elif other is not None and abs(other.volume_a3 / volume_a3 - 1) > LARGEST_VOLUME_CHANGE:
                misfits.append(f"{beside.name} has a cell of {other.volume_a3:.4g} A^3, this one {volume_a3:.4g} A^3")
            else:
                found[beside.name] = species
    return found, misfits


def _named_by(path: Path) -> tuple[tuple[str, ...] | None, Header | None]:
    """Species and header of a POSCAR or CONTCAR; the species of a POTCAR."""
    source = os.fspath(path)
    try:
        if path.name.startswith("POTCAR"):
            symbols = re.findall(r"^\s*VRHFIN\s*=\s*([A-Z][a-z]?)", structure_text(source), re.MULTILINE)
            return (tuple(symbols) if symbols and set(symbols) <= set(SYMBOLS) else None), None
        text = open_text(source)
        with text.stream:
            header = read_header(text)
            return header.species, header
    except COMPRESSION_ERRORS as error:
        raise TomatError(f"cannot read {source}: {error}") from error


def _groups(text: BoundedText) -> tuple[tuple[str, ...] | None, tuple[int, ...], bytes]:
    """Species and counts, each over one line or more, and the line after them."""
    source = text.source
    symbols: list[str] = []
    counts: list[int] = []
    line = _line(text, "species or counts").strip()
    while line[:1].isalpha():
        symbols += [_symbol(word, source) for word in line.split()]
        if len(symbols) > MOST_GROUPS:
            raise TomatError(f"{source}: found more than {MOST_GROUPS} species; the file is damaged.")
        line = _line(text, "counts").strip()
    while line[:1].isdigit():
        for word in line.split():
            if not word.isdigit() or len(word) > 9 or len(counts) >= MOST_GROUPS:
                raise TomatError(f"{source}: found {_shown(line)} where the counts of atoms are expected.")
            counts.append(int(word))
        line = _line(text, "Direct or Cartesian").strip()
    if not counts:
        raise TomatError(f"{source}: found {_shown(line)} where species or the counts of atoms are expected.")
    if min(counts) < 1:
        raise TomatError(f"{source}: the counts of atoms are {_words(counts)}; expected at least one in each group.")
    check_atom_count(sum(counts), source)
    if symbols and len(symbols) != len(counts):
        raise TomatError(
            f"{source}: the species line names {_words(symbols)}, but there are {len(counts)} count(s): "
            f"{_words(counts)}; expected one a species."
        )
    return (tuple(symbols) if symbols else None), tuple(counts), line


def _symbol(word: bytes, source: str) -> str:
    """`Mg` of `Mg`, `Mg_pv` and `Mg_pv/f474ac0d`."""
    symbol = re.split(r"[/_.]", word.decode("latin-1"), maxsplit=1)[0]
    if symbol not in SYMBOLS:
        raise TomatError(f"{source}: the species line names {_shown(word)}, which is no element.")
    return symbol


def _coordinates(text: BoundedText, n_atoms: int, selective: bool) -> tuple[np.ndarray, tuple[str, ...] | None]:
    source = text.source
    coords, symbols = [], []
    for atom in range(n_atoms):
        line = _line(text, f"the coordinates of atom {atom + 1} of {n_atoms}")
        words = line.split()
        if len(words) < 3:
            raise TomatError(
                f"{source}: the counts say {n_atoms} atoms, but there are {atom} coordinates; expected as many."
            )
        coords.append(_numbers(b" ".join(words[:3]), f"the coordinates of atom {atom + 1}", source, 3))
        rest = [word.decode("latin-1") for word in words[3:]]
        if selective:
            if len(rest) < 3 or not set(rest[:3]) <= {"T", "F"}:
                raise TomatError(f"{source}: atom {atom + 1} has no T or F for each axis, as selective dynamics needs.")
            rest = rest[3:]
        if rest and rest[0] in SYMBOLS:
            symbols.append(rest[0])
    following = text.line()
    # A CONTCAR of molecular dynamics in a cell that changes goes on with the velocities of the lattice at once.
    if following.strip() and not following.lower().startswith(b"lattice velocities"):
        raise TomatError(
            f"{source}: found {_shown(following.strip())} after the coordinates of {n_atoms} atoms; expected an empty "
            "line. The counts do not match the coordinates."
        )
    return np.array(coords, dtype=np.float64), (tuple(symbols) if len(symbols) == n_atoms else None)


def _line(text: BoundedText, what: str) -> bytes:
    line = text.line()
    if not line:
        raise TomatError(f"{text.source} is not a complete structure header: it ends before {what}.")
    return line


def _numbers(line: bytes, what: str, source: str, count: int | None = None) -> list[float]:
    values = finite_numbers(line)
    if not values or (count is not None and len(values) != count):
        raise TomatError(
            f"{source} is not a complete structure header: found {_shown(line.strip())} where {what} is expected, "
            f"{count or 'one'} finite number(s)."
        )
    return values


def _repeated(species: Sequence[str], counts: Sequence[int]) -> list[str]:
    return [symbol for symbol, count in zip(species, counts, strict=True) for _ in range(count)]


def _words(values: Iterable[object]) -> str:
    return " ".join(str(value) for value in values)


def _shown(line: bytes) -> str:
    text = line[:60].decode("latin-1")
    return repr(text + ("..." if len(line) > 60 else ""))
