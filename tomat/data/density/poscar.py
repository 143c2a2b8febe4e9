"""The structure at the head of VASP's density files, read strictly. pymatgen's reader of the same text takes hydrogen,
helium, ... where no element is named, drops species without a count, and ignores what is left over."""

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density import limits
from tomat.data.density.elements import SYMBOLS, atomic_number
from tomat.data.density.rules import ReadRules

MOST_GROUPS = limits.MOST_ATOMS
"""Most counts in a header: atoms that are not sorted by element may be groups of one. VASP writes 20 per line, pymatgen
all in one."""

_GROUPS_BYTES = 16 * MOST_GROUPS
"""Most bytes of a line of species or counts."""

NEIGHBOURS = ("POSCAR", "CONTCAR", "POTCAR")
"""Files of the same calculation that name its elements."""

OF_A_CALCULATION = ("CHGCAR", "CHG", "AECCAR0", "AECCAR1", "AECCAR2", "PARCHG")
"""Names that VASP gives: what lies beside is of the same calculation. `mp-1.CHGCAR`, `mp-1.vasp` are in collections."""

LARGEST_VOLUME_CHANGE = 0.2
"""Largest relative change of volume from a density's cell to a POSCAR or CONTCAR beside it; relaxations stay below."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Header:
    lattice: np.ndarray
    counts: tuple[int, ...]
    species: tuple[str, ...] | None
    """Element of each group; None where the text names none (VASP 4)."""
    elements: tuple[str, ...] | None
    """Element of each atom, from the species line or the ends of the coordinate lines; None where neither names any."""
    frac_coords: np.ndarray
    title: str = ""

    @property
    def volume_a3(self) -> float:
        return abs(float(np.linalg.det(self.lattice)))

    def names(self, species: Sequence[str]) -> bool:
        """Whether the header names these elements, one per group."""
        return species in (self.species, tuple(dict.fromkeys(self.elements or ())))


def read_header(text: limits.BoundedText) -> Header:
    """Read title, scale, lattice, species, counts and coordinates, and the empty line after them."""
    source = text.source
    title = _line(text, "the title")
    scale = _numbers(text, "the scale")
    lattice = np.array([_numbers(text, "a lattice vector", 3) for _ in range(3)])
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
    if selective := mode[:1] in (b"s", b"S"):  # selective dynamics
        mode = _line(text, "Direct or Cartesian").strip()
    if mode[:1] not in (b"d", b"D", b"c", b"C", b"k", b"K"):
        raise TomatError(f"{source}: found {_shown(mode)} after the counts; expected Direct or Cartesian.")
    coords, at_ends = _coordinates(text, sum(counts), selective)
    if mode[:1] not in b"dD":
        coords = coords * factor @ np.linalg.inv(lattice)
    elements = at_ends
    if species is not None:
        elements = tuple(np.repeat(species, counts).tolist())
        if at_ends not in (None, elements):
            raise TomatError(
                f"{source}: the species line names {_words(species)}, but the ends of the coordinate lines differ from "
                f"it: {_words(dict.fromkeys(at_ends))}; one of them is wrong."
            )
    return Header(lattice, counts, species, elements, coords, title.decode("latin-1"))


def species_of(header: Header, path: Path, rules: ReadRules) -> np.ndarray:
    """The elements of a header, from itself, from `--species`, or from the files of its calculation beside it: atomic
    numbers int64 `[n]`. A header that names its elements is read as it is, with a warning if the flag differs."""
    species, elements = rules.species, header.elements
    groups = f"{len(header.counts)} group(s) of {_words(header.counts)} atom(s)"
    if elements is not None:
        if species and not header.names(species):
            _log.warning(
                "%s names its elements, %s; --species %s is for files that name none, and is ignored.",
                path, _words(dict.fromkeys(elements)), _words(species),
            )  # fmt: skip
        return np.array([atomic_number(symbol) for symbol in elements], dtype=np.int64)
    if species and len(species) != len(header.counts):
        raise TomatError(f"{path} has {groups}, but --species names {_words(species)}; expected one a group.")
    found, misfits = _beside(header, path)
    beside = ", ".join(f"{name} beside it has {_words(named)}" for name, named in found.items())
    # Where the files beside it differ among themselves, the flag decides between them.
    if species and found and species not in found.values():
        raise TomatError(
            f"{path} names no elements (VASP 4), --species {_words(species)}, but {beside}. Correct the flag, or move "
            "what does not belong there."
        )
    if not species and len(set(found.values())) > 1:
        raise TomatError(f"{path} names no elements (VASP 4), and {beside}. Name them with --species.")
    if not species and not found:
        folder = "beside it" if _is_of_its_folder(path) else "beside it, in a folder of their own and this as CHGCAR"
        unfit = f" What lies beside it does not fit: {'; '.join(misfits)}." if misfits else ""
        raise TomatError(
            f"{path} names no elements: it has no species line (VASP 4), only {groups}.{unfit} Name them with "
            f"--species, such as --species Na, or put the POSCAR, CONTCAR or POTCAR of the calculation {folder}."
        )
    if not species:
        name, species = next(iter(found.items()))
        _log.warning("%s names no elements; taken from the %s beside it: %s.", path, name, _words(species))
    return np.repeat([atomic_number(symbol) for symbol in species], header.counts).astype(np.int64)


def check_species_used(paths: Iterable[str], rules: ReadRules) -> None:
    """Refuse `--species` if every file names its elements and no file names those of the flag. If a file cannot be
    read, the flag is taken to be for it: its reader says what is wrong."""
    first = ""
    for path in paths if rules.species else ():
        try:
            text = limits.open_text(path)
            with text.stream:
                header = read_header(text)
        except (TomatError, *limits.COMPRESSION_ERRORS):
            return
        if header.elements is None or header.names(rules.species):
            return
        first = first or f"{path} names {_words(dict.fromkeys(header.elements))}"
    if first:
        raise TomatError(
            f"{first}, --species {_words(rules.species)}; the flag is for files that name none, and every file names "
            "its elements. Leave it out."
        )


def _is_of_its_folder(path: Path) -> bool:
    """Whether a file has a name that VASP gives, so that its folder is a calculation's and not a collection."""
    return limits.unpacked(path.name) in OF_A_CALCULATION


def _beside(header: Header, path: Path) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """The species that the files of the calculation name, by file; and why other files do not fit."""
    found: dict[str, tuple[str, ...]] = {}
    misfits = []
    names = [f"{name}{packed}" for name in NEIGHBOURS for packed in ("", ".gz")] if _is_of_its_folder(path) else []
    for beside in filter(Path.is_file, map(path.with_name, names)):
        other = None
        try:
            if beside.name.startswith("POTCAR"):
                symbols = re.findall(
                    r"^\s*VRHFIN\s*=\s*([A-Z][a-z]?)", limits.structure_text(str(beside)), re.MULTILINE
                )
                species = tuple(symbols) if symbols and set(symbols) <= set(SYMBOLS) else None
            else:
                text = limits.open_text(str(beside))
                with text.stream:
                    other = read_header(text)
                species = other.species
        except TomatError as error:
            misfits.append(str(error).rstrip("."))
            continue
        except limits.COMPRESSION_ERRORS as error:
            misfits.append(f"cannot read {beside}: {error}".rstrip("."))
            continue
        if species is None:
            misfits.append(f"{beside.name} names no element either")
        elif len(species) != len(header.counts) or (other is not None and other.counts != header.counts):
            misfits.append(f"{beside.name} has {_words(species)} {_words(other.counts if other else ())}".rstrip())
        elif other is not None and abs(other.volume_a3 / header.volume_a3 - 1) > LARGEST_VOLUME_CHANGE:
            volumes = f"{other.volume_a3:.4g} A^3, this one {header.volume_a3:.4g} A^3"
            misfits.append(f"{beside.name} has a cell of {volumes}")
        else:
            found[beside.name] = species
    return found, misfits


def _groups(text: limits.BoundedText) -> tuple[tuple[str, ...] | None, tuple[int, ...], bytes]:
    """Species and counts, each over one line or more, and the line after them."""
    source = text.source
    symbols: list[str] = []
    counts: list[int] = []
    line = _line(text, "species or counts", _GROUPS_BYTES).strip()
    while line[:1].isalpha():
        for word in line.split():
            # `Mg` of `Mg`, `Mg_pv` and `Mg_pv/f474ac0d`.
            symbols.append(re.split(r"[/_.]", word.decode("latin-1"), maxsplit=1)[0])
            if symbols[-1] not in SYMBOLS:
                raise TomatError(f"{source}: the species line names {_shown(word)}, which is no element.")
        if len(symbols) > MOST_GROUPS:
            raise TomatError(f"{source}: found more than {MOST_GROUPS:,} species; the file is damaged.")
        line = _line(text, "counts", _GROUPS_BYTES).strip()
    while line[:1].isdigit():
        for word in line.split():
            if not word.isdigit() or len(word) > 9 or len(counts) >= MOST_GROUPS:
                raise TomatError(f"{source}: found {_shown(line)} where the counts of atoms are expected.")
            counts.append(int(word))
        line = _line(text, "Direct or Cartesian", _GROUPS_BYTES).strip()
    if not counts:
        raise TomatError(f"{source}: found {_shown(line)} where species or the counts of atoms are expected.")
    if min(counts) < 1:
        raise TomatError(f"{source}: the counts of atoms are {_words(counts)}; expected at least one in each group.")
    limits.check_atom_count(sum(counts), source)
    if symbols and len(symbols) != len(counts):
        raise TomatError(
            f"{source}: the species line names {_words(symbols)}, but there are {len(counts)} count(s): "
            f"{_words(counts)}; expected one a species."
        )
    return (tuple(symbols) if symbols else None), tuple(counts), line


def _coordinates(text: limits.BoundedText, n_atoms: int, selective: bool) -> tuple[np.ndarray, tuple[str, ...] | None]:
    """The coordinates, and the elements at the ends of their lines, if every line has one."""
    source = text.source
    coords, symbols = [], []
    for atom in range(1, n_atoms + 1):
        line = _line(text, f"the coordinates of atom {atom} of {n_atoms}")
        words = line.split()
        values = limits.finite_numbers(b" ".join(words[:3]))
        if values is None or len(values) != 3:
            raise TomatError(
                f"{source}: found {_shown(line.strip())} where coordinates of atom {atom} of {n_atoms} are expected, "
                "three finite numbers. The counts may be wrong."
            )
        coords.append(values)
        rest = [word.decode("latin-1") for word in words[3:]]
        # As Fortran reads them: T, t, .TRUE., .F.
        logicals = len(rest) >= 3 and all(re.match(r"\.?[TF]", word, re.IGNORECASE) for word in rest[:3])
        if selective and not logicals:
            raise TomatError(f"{source}: atom {atom} has no T or F for each axis, as selective dynamics needs.")
        if logicals:  # VASP passes over them where no line says selective dynamics: they are no fluorine
            rest = rest[3:]
        if rest and rest[0] in SYMBOLS:
            symbols.append(rest[0])
    following = text.line()
    # A CONTCAR of molecular dynamics with a variable cell goes on at once with the velocities of the lattice.
    if following.strip() and not following.lower().startswith(b"lattice velocities"):
        raise TomatError(
            f"{source}: found {_shown(following.strip())} after the last atom of {n_atoms}; expected an empty line."
        )
    return np.array(coords, dtype=np.float64), (tuple(symbols) if len(symbols) == n_atoms else None)


def _line(text: limits.BoundedText, what: str, longest: int = 4096) -> bytes:
    line = text.line(longest)
    if not line:
        raise TomatError(f"{text.source} is not a complete structure header: it ends before {what}.")
    return line


def _numbers(text: limits.BoundedText, what: str, count: int | None = None) -> list[float]:
    line = _line(text, what)
    values = limits.finite_numbers(line)
    if not values or (count is not None and len(values) != count):
        raise TomatError(
            f"{text.source} is not a complete structure header: found {_shown(line.strip())} where {what} is expected, "
            f"{count or 'one'} finite number(s)."
        )
    return values


def _words(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("latin-1") + ("..." if len(line) > 60 else ""))
