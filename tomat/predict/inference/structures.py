"""Structures to predict, by name: files and folders of files, each read strictly into a `Crystal`.

VASP's files and JSON are read by the readers of `density`, which invent nothing. (Where a POSCAR names no elements,
pymatgen would put hydrogen, helium, ...) pymatgen reads the rest. Only the header of a CHGCAR is read, not the density.
"""

import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line, naming
from tomat.data.density.crystal import Crystal, structure_from_dict
from tomat.data.density.elements import atomic_number, reduced_formula, symbol_of
from tomat.data.density.geometry import check_cell
from tomat.data.density.grid import DensityGrid
from tomat.data.density.limits import (
    COMPRESSION_ERRORS,
    MOST_ATOMS,
    check_atom_count,
    finite_numbers,
    open_structure,
    open_text,
    structure_text,
    unpacked,
)
from tomat.data.density.rules import DEFAULT_RULES, ReadRules

VASP_NAMES = ("POSCAR", "CONTCAR", "CHGCAR")
"""A file in a folder is taken if its name holds one of them."""
OTHER_VASP_NAMES = ("AECCAR", "CHG", "PARCHG", "LOCPOT", "ELFCAR")
"""Taken only if the file itself is given: in a folder they lie beside one of the above."""
EXPECTED = (
    "POSCAR*, CONTCAR*, CHGCAR*, *.vasp, *.poscar, *.cif, *.mcif, *.json, *.xyz with a lattice, *.cssr, *.xsf, *.res"
)

_OTHER_LINES = 1_000
"""Most lines of a file with one structure that hold no atom: titles, vectors, comments."""

MOST_IMAGES = 2 * MOST_ATOMS
"""Most sites times symmetry operations. pymatgen compares each image with all before it, 0.25 us a pair: 10,000 sites
without symmetry take 20 s, and this many images 50 s."""

MOST_OPERATIONS = 192
"""Most operations of a space group (Fm-3m and others). Assumed where a CIF names a group and lists no operations."""

MOST_QUOTED = 100_000_000
"""Limit of a line's quotes times its length, summed over all lines. pymatgen searches the end of each quote: 1 s."""

_LOOP = re.compile(
    r"^[ \t]*loop_(?P<names>(?:\s+(?:_\S+|\#[^\n]*))+)(?P<rows>.*?)(?=^[ \t]*(?:_|loop_|data_)|\Z)",
    re.MULTILINE | re.IGNORECASE | re.DOTALL,
)
_READ = re.compile(r"^_(?:atom|cell|space_group|symmetry|parent|magnetic)", re.MULTILINE | re.IGNORECASE)
"""Matches the names from which pymatgen reads a structure. Other loops hold reflections, bonds and authors."""
_GROUP = re.compile(
    r"^[ \t]*_(?:symmetry_space_group|symmetry|space_group)_(?:IT_number|Int_Tables_number|name_\S+)[ \t]+(.+?)[ \t]*$",
    re.MULTILINE | re.IGNORECASE,
)

_BY_SYMMETRY = re.compile(r"^LATT\s+(?!-1\b)\S+|\bSPGR\s*=\s*(?!1\b)\d+[^\n]*", re.MULTILINE)
"""Says in a SHELX or CSSR file that operations, which pymatgen does not apply, make further atoms: all but LATT -1, P
without a centre, and SPGR 1, P1."""

_STATED = {
    "xsf": re.compile(r"^\s*PRIMCOORD[^\n]*\n\s*(\d+)", re.MULTILINE),
    "cssr": re.compile(r"\A[^\n]*\n[^\n]*\n\s*(\d+)"),
}
"""The number of atoms that a file states. pymatgen passes over those that it cannot read."""

_RES_SITE = re.compile(r"^\s*([A-Z]\w*)\s+\d+(?:\s+[-+\d.]+){3}\s+(\d*\.?\d+)\s", re.MULTILINE | re.IGNORECASE)
"""Name and occupancy in an atom's line of a SHELX file: name, number of its element, three coordinates, occupancy."""
_D_EXPONENT = re.compile(rb"(\d\.\d*|\.\d+)[dD]([+-]?\d)")
"""A number in double precision with the exponent that Fortran writes."""


class NoStructureError(TomatError):
    """A file that holds no structure. If it was found in a folder, it is skipped."""


@dataclass(frozen=True)
class StructureFile:
    name: str
    """Name of its outputs, unique within a call."""
    path: str
    in_folder: bool
    """Whether it was found in a folder, rather than given itself."""


def find_structures(paths: Iterable[str], output: Path | None = None) -> tuple[list[StructureFile], dict[str, str]]:
    """The structure files among files and folders, unique by name (`structure_name`), in the order given, those of a
    folder sorted; and the reason for each file of a folder that is skipped. An `output` inside a folder is left out."""
    found: dict[str, StructureFile] = {}
    ignored: dict[str, str] = {}
    for given in paths:
        place = Path(given)
        if place.is_dir():
            files = (each for each in place.rglob("*") if each.is_file() and "/." not in f"/{each.relative_to(place)}")
            written = output.resolve() if output is not None and place.resolve() in output.resolve().parents else None
            inside = sorted(str(each) for each in files if written is None or written not in each.resolve().parents)
            taken = [each for each in inside if _reader(each, named=False) is not None]
            ignored |= {each: "its name is that of no structure" for each in inside if each not in set(taken)}
            if not taken:
                raise TomatError(f"The folder {given} holds no structure; expected {EXPECTED}.")
        elif not place.exists():
            raise TomatError(f"There is no file or folder {given}; expected {EXPECTED}, or a folder of such.")
        elif _reader(given, named=True) is None:
            raise TomatError(f"{given} is of no known kind; expected {EXPECTED}.")
        else:
            taken = [given]
        for each in taken:
            file = StructureFile(structure_name(each), each, place.is_dir())
            before = found.setdefault(file.name, file)
            if not os.path.samefile(before.path, each):
                said = f"{before.path} and {each} would both be called {file.name}"
                raise TomatError(f"{said}; rename one, or name the files to take, such as --structure */CONTCAR.")
    return list(found.values()), ignored


def structure_name(path: str) -> str:
    """`mp-149` for `mp-149.cif`, `mp-149.POSCAR.gz` and `mp-149/POSCAR`: the name without suffixes, or the folder's."""
    file = Path(path).absolute()
    stem = unpacked(file.name)
    suffix = next((suffix for suffix in _READERS if stem.lower().endswith(suffix)), "")
    stem = stem[: len(stem) - len(suffix)]
    for name in VASP_NAMES + OTHER_VASP_NAMES:
        stem = stem.removesuffix(f".{name}").removeprefix(f"{name}.").removeprefix(f"{name}_")
    if (not stem or stem in VASP_NAMES + OTHER_VASP_NAMES) and file.parent.name:
        return file.parent.name
    return stem


def read_structure(
    path: str | os.PathLike[str], name: str | None = None, rules: ReadRules = DEFAULT_RULES
) -> tuple[Crystal, list[str]]:
    """Read and check one structure of a kind that `EXPECTED` names; returns it and the reader's messages. JSON of
    something else raises NoStructureError. A MemoryError says nothing about the file."""
    source = os.fspath(path)
    reader = _reader(source, named=True)
    if "\n" in source:
        raise TomatError(f"found a text of several lines, {source[:40]!r}...; expected the path of a file: {EXPECTED}.")
    if reader is None or not Path(source).is_file():
        found = "is of no known kind" if Path(source).is_file() else "is no file"
        raise TomatError(f"{source} {found}; expected {EXPECTED}.")
    remedy = "; it is damaged, or holds something else."
    with naming(f"{source} cannot be read as a structure", remedy), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            lattice, numbers, coords = reader(source, rules)
        except COMPRESSION_ERRORS as error:
            raise TomatError(f"cannot read {source}: {first_line(error)}") from error
    crystal = Crystal(lattice, numbers, coords, name or structure_name(source))
    check_atom_count(len(crystal.atomic_numbers), source)
    if "distances" not in rules.accept:
        check_cell(crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, source)
    unimportant = (DeprecationWarning, PendingDeprecationWarning, ResourceWarning)
    notes = [first_line(each.message) for each in told if not issubclass(each.category, unimportant)]  # type: ignore[arg-type]  # warnings.WarningMessage.message is typed Warning | str
    return crystal, list(dict.fromkeys(notes))


def check_species_used(paths: Iterable[str], rules: ReadRules) -> None:
    """Refuse `--species` where every structure names its elements; only VASP's files may name none."""
    paths = list(paths)
    of_vasp = [path for path in paths if _reader(path, named=True) is _vasp]
    if rules.species and not of_vasp:
        said = f"--species names {' '.join(rules.species)}, but none of the structures is a POSCAR"
        raise TomatError(f"{said}; other files name their elements themselves. Leave it out.")
    if of_vasp:
        from tomat.data.density import poscar

        poscar.check_species_used(of_vasp, rules)


def crystal_of(structure: Any) -> tuple[Crystal, list[str]]:
    """The crystal of pymatgen's structure (or of an object that holds one, such as a Poscar), of ASE's atoms, of a dict
    of a structure, of a density, or of a crystal; and in words, what a prediction does not use of it. Distances are not
    checked here: the predictor checks them, and may be told to accept them."""
    if isinstance(structure, Crystal | DensityGrid):
        return structure if isinstance(structure, Crystal) else Crystal.of(structure), []
    if hasattr(structure, "get_scaled_positions"):  # ASE, which need not be installed
        parts, notes = _of_ase(structure)
    else:
        holder = getattr(structure, "structure", structure)
        content = holder.as_dict() if hasattr(holder, "as_dict") and hasattr(holder, "sites") else structure
        kind = type(structure)
        if not isinstance(content, Mapping):
            expected = "a structure of pymatgen, atoms of ASE, pymatgen's dict of a structure, or the path of a file"
            raise TomatError(f"found a {kind.__module__}.{kind.__qualname__}; expected {expected}.")
        parts, notes = _of_dict(content, f"the {kind.__name__}")
    crystal = Crystal(*parts)
    return replace(crystal, name=reduced_formula(crystal.atomic_numbers.tolist())), notes


def _of_ase(atoms: Any) -> tuple["Parts", list[str]]:
    """The parts of ASE's atoms. A cell that is not periodic is refused, because its density would be another one."""
    if (rank := int(atoms.cell.rank)) < 3:
        what = "no cell" if rank == 0 else f"a cell of {rank} vectors"
        said = f"the Atoms have {what}: {'a molecule' if rank == 0 else 'no crystal'}. tomat predicts crystals"
        raise TomatError(f"{said}; give them a cell of three vectors and set pbc, such as atoms.center(vacuum=4).")
    if not all(atoms.pbc):
        along = ", ".join(axis for axis, periodic in zip("abc", atoms.pbc, strict=True) if periodic) or "no axis"
        said = f"the Atoms are periodic along {along} only" if any(atoms.pbc) else "the Atoms are not periodic"
        raise TomatError(f"{said}; expected all three axes. If the cell has its vacuum, set atoms.pbc = True.")
    mixed = [each for each in (atoms.info.get("occupancy") or {}).values() if set(each.values()) != {1}]
    if mixed:
        raise TomatError(f"the Atoms have a site that holds {mixed[0]}; expected one element, fully occupied.")
    given = {"magnetic moments": atoms.get_initial_magnetic_moments(), "charges": atoms.get_initial_charges()}
    notes = [_unused(what) for what, values in given.items() if np.any(values)]
    return (np.array(atoms.cell), atoms.get_atomic_numbers(), atoms.get_scaled_positions(wrap=False)), notes


def _of_dict(content: Mapping[str, Any], source: str) -> tuple["Parts", list[str]]:
    """The parts of pymatgen's dict of a structure, or of a document that has one as its `structure`."""
    if isinstance(content.get("structure"), dict):
        content = content["structure"]
    if "sites" not in content:
        found = f", found {', '.join(map(str, list(content)[:5]))}" if content else ""
        raise NoStructureError(f"{source} holds no structure: expected pymatgen's `lattice` and `sites`{found}.")
    if not content.get("lattice"):
        raise _molecule(source)
    parts = structure_from_dict(content, source)
    if not all(content["lattice"].get("pbc", (True,))):
        raise TomatError(f"{source} is periodic along {content['lattice']['pbc']} only; expected all three axes.")
    sites = content["sites"]
    states = any(site["species"][0].get("oxidation_state") for site in sites)
    moments = any(
        np.any((site.get("properties") or {}).get("magmom")) or site["species"][0].get("spin") for site in sites
    )
    given = {"oxidation states": states, "magnetic moments": moments, "charges": content.get("charge")}
    return parts, [_unused(what) for what, there in given.items() if there]


def _unused(what: str) -> str:
    return f"{what} are not used: the density is that of the neutral cell, without spin"


Parts = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Lattice, atomic numbers, fractional coordinates."""


def _reader(path: str, *, named: bool) -> Callable[[str, ReadRules], Parts] | None:
    """The reader for a file of that name; None for a name of no known kind."""
    name = unpacked(Path(path).name)
    found = next((reader for suffix, reader in _READERS.items() if name.lower().endswith(suffix)), None)
    taken = VASP_NAMES + OTHER_VASP_NAMES if named else VASP_NAMES
    return _vasp if found is None and any(kind in name.upper() for kind in taken) else found


def _vasp(source: str, rules: ReadRules) -> Parts:
    from tomat.data.density.poscar import read_header, species_of

    text = open_text(source)
    with text.stream:
        header = read_header(text)
        return header.lattice, species_of(header, Path(source), rules), header.frac_coords


def _json(source: str, rules: ReadRules) -> Parts:
    try:
        content = json.loads(structure_text(source))
    except (ValueError, RecursionError) as error:
        raise TomatError(f"{source} is not JSON ({first_line(error)}); it is damaged.") from error
    return _parts(content if isinstance(content, dict) else {}, source)


def _xyz(source: str, rules: ReadRules) -> Parts:
    """Extended XYZ: the second line has `Lattice="ax ay az bx by bz cx cy cz"`, in A, and may name the columns with
    `Properties=species:S:1:pos:R:3` (libAtoms, https://github.com/libAtoms/extxyz)."""
    lines = structure_text(source).split("\n")
    head = lines[1] if len(lines) > 1 else ""
    lattice = re.search(r"""\bLattice\s*=\s*["'{]([^"'}]*)["'}]""", head, flags=re.IGNORECASE)
    if lattice is None:
        raise _molecule(source)
    periodic = re.search(r'\bpbc\s*=\s*(\[[^]]*\]|\{[^}]*\}|"[^"]*"|\S+)', head, flags=re.IGNORECASE)
    along = re.findall(r"\w+", periodic[1]) if periodic is not None else []
    if not {word.lower() for word in along} <= {"t", "true", "1"}:
        raise TomatError(f"{source} is periodic along '{' '.join(along)}' only; expected all three axes.")
    count = int(lines[0])
    check_atom_count(count, source)
    if any(line.strip() for line in lines[2 + count :]):
        raise TomatError(f"{source} holds more than one structure, or more atoms than the {count} it says.")
    found = re.search(r"\bProperties\s*=\s*\"?([\w:]+)", head, flags=re.IGNORECASE)
    fields = (found[1] if found else "species:S:1:pos:R:3").split(":")
    columns, column = {}, 0
    for name, width in zip(fields[::3], fields[2::3], strict=True):
        columns[name] = slice(column, column := column + int(width))
    if not {"species", "pos"} <= columns.keys():
        raise TomatError(f"{source} has the columns {', '.join(columns)}; expected species and pos among them.")
    rows = [line.split() for line in lines[2 : 2 + count]]

    def named(part: str) -> list[float]:
        """The numbers in columns with such a name, and of the cell in its line."""
        own = [row[span] for name, span in columns.items() if part in name.lower() for row in rows]
        stated = re.findall(rf"\b\w*{part}\w*=([-+]?\d[\d.]*)", head, flags=re.IGNORECASE)
        words = itertools.chain(stated, *own)
        return [number for word in words for number in finite_numbers(word.encode()) or ()]

    # ASE writes the occupancies of all sites as `occupancy="_JSON {\"0\": {\"Na\": 0.5}}"`.
    of_ase = re.search(r'\boccupancy="_JSON (.*?)}}"', head)
    held = [*named("occupanc"), *map(float, re.findall(r":\s*([\d.]+)", of_ase[1] if of_ase else ""))]
    if other := [each for each in held if each != 1]:
        raise TomatError(f"{source} has a site with an occupancy of {other[0]:g}; expected full occupancy.")
    for what, part in (("magnetic moments", "magmom"), ("charges", "charge")):
        if any(named(part)):
            warnings.warn(_unused(what), stacklevel=2)
    numbers = np.array([atomic_number(row[columns["species"]][0]) for row in rows])
    places = np.array([_numbers(" ".join(row[columns["pos"]]), 3, source) for row in rows])
    matrix = np.reshape(_numbers(lattice[1], 9, source), (3, 3))
    return matrix, numbers, places @ np.linalg.inv(matrix)


def _numbers(words: str, count: int, source: str) -> list[float]:
    values = finite_numbers(words.encode())
    if values is None or len(values) != count:
        raise TomatError(f"{source}: found {words[:60]!r} where {count} numbers are expected; it is damaged.")
    return values


def bounded_cif(text: str, source: str) -> str:
    """The text without blank lines and loops that hold no structure. Refuses what would take pymatgen minutes."""
    lines = [line for line in text.splitlines() if not (line == "" or line.isspace())]
    if sum(len(line) * (line.count("'") + line.count('"')) for line in lines) > MOST_QUOTED:
        raise TomatError(f"{source} has lines of thousands of quotes; it is no CIF, or damaged.")
    text = "\n".join(lines) + "\n"
    # Journals put the data of the paper into separate blocks, such as data_global.
    blocks = re.split(r"(?mi)^(?=[ \t]*data_)", text)
    text = "".join([block for block in blocks if "_atom_site" in block.lower()] or blocks)
    n_sites, operations = 0, _operations(text)
    for loop in _LOOP.finditer(text):
        names = [name.lower() for name in loop["names"].split() if name.startswith("_")]
        if any(name.startswith(("_atom_site_fract_x", "_atom_site.fract_x")) for name in names):
            n_sites = max(n_sites, len(loop["rows"].split()) // len(names))
    check_atom_count(max(n_sites, 1), source)
    if not operations and _groups(text):
        operations.append(MOST_OPERATIONS)
    if (n_images := n_sites * math.prod(operations)) > MOST_IMAGES:
        raise TomatError(
            f"{source} has {n_sites:,} sites and {math.prod(operations):,} operations of symmetry, {n_images:,} "
            f"images; expected at most {MOST_IMAGES:,}. Write the cell without symmetry (P1), where it may have "
            f"{MOST_ATOMS:,} atoms."
        )
    return _LOOP.sub(lambda loop: loop[0] if _READ.search("\n".join(loop["names"].split())) else "", text)


def _operations(text: str) -> list[int]:
    """How many operations of symmetry each loop of a CIF lists."""
    loops = ((loop["names"].lower(), loop["rows"]) for loop in _LOOP.finditer(text))
    of_symmetry = (rows for names, rows in loops if "symop" in names or "equiv_pos_as_xyz" in names)
    return [max(rows.strip().count("\n") + 1, 1) for rows in of_symmetry]


def _groups(text: str) -> list[str]:
    """The names and numbers of a CIF's space groups, without spaces; empty for P1."""
    found = (_bare(group.strip("'\" ")) for group in _GROUP.findall(text))
    return [group for group in found if group not in ("P1", "1", "?", ".")]


def _bare(group: str) -> str:
    return group.replace(" ", "").replace("_", "")


def _check_operations(text: str, told: Collection[str], source: str) -> None:
    """Refuse a CIF whose operations of symmetry pymatgen does not know. It takes P1, or that group of the same number
    which is in its own tables: P21/c for P21/n."""
    if any("Spacegroup from" in each or "1-line symmetry op" in each for each in told):
        return
    groups, operations = _groups(text), _operations(text)
    if any("Defaulting to P1" in each for each in told):
        unknown = bool(groups) or max(operations, default=1) > 1
    elif operations:
        return
    else:
        from pymatgen.symmetry.groups import SpaceGroup

        numbers = [int(group) for group in groups if group.isdigit()]
        own = _bare(SpaceGroup.from_int_number(numbers[0]).symbol) if numbers else ""
        short = re.sub(r"^([A-Z])1(.+)1$", r"\1\2", own)  # P21/c is P121/c1
        names = [group.removesuffix(":H") for group in groups if not group.isdigit()]
        unknown = bool(names) and not {own.removesuffix(":H"), short} & set(names)
    if unknown:
        named = f" (group {' '.join(groups)})" if groups else ""
        said = f"{source} has operations of symmetry that cannot be told{named}"
        raise TomatError(f"{said}; expected each in _symmetry_equiv_pos_as_xyz, or all atoms of the cell in P1.")


def _cif(source: str, rules: ReadRules) -> Parts:
    text = bounded_cif(structure_text(source), source)
    from pymatgen.io.cif import CifParser

    parser = CifParser.from_str(text)
    structures = parser.parse_structures(primitive=False, on_error="raise")
    _check_operations(text, parser.warnings, source)
    for told in parser.warnings:
        if "implicit hydrogens" in told:
            said = f"{source} has hydrogens without places (_atom_site_attached_hydrogens, or sites such as Wat)"
            raise TomatError(f"{said}; expected a site for each. Add them first.")
        if told.endswith(" parsed as "):
            said = f"{source} has a site {told.removesuffix(' parsed as ')}, which is no single element"
            raise TomatError(f"{said}; expected a site for each atom.")
    # pymatgen leaves out sites of occupancy 0, and takes `.`, which stands for the default of 1, as 0.
    for held in (held for block in parser.as_dict().values() for held in block.get("_atom_site_occupancy", ())):
        if not held.partition("(")[0].strip("0."):
            said = f"{source} has a site with an occupancy of {held}"
            raise TomatError(f"{said}, which would be left out; expected 1. Remove the site, or write 1.")
    if len(structures) != 1:
        raise TomatError(f"{source} holds {len(structures)} structures; expected one a file.")
    return _parts(structures[0].as_dict(), source)


def _pymatgen(source: str, rules: ReadRules) -> Parts:
    """Read XSF, CSSR or RES: one line an atom. The densities that follow the atoms of an XSF are not read."""
    text = open_structure(source)
    lines: list[bytes] = []
    with text.stream:
        while (line := text.line()) and b"BEGIN_BLOCK_DATAGRID" not in line.upper():
            lines.append(_D_EXPONENT.sub(rb"\1E\2", line))
            if len(lines) > MOST_ATOMS + _OTHER_LINES:
                said = f"{source} has more than {MOST_ATOMS + _OTHER_LINES:,} lines before any grid"
                raise TomatError(f"{said}; expected at most {MOST_ATOMS:,} atoms, one a line.")
    from pymatgen.core import Structure

    kind = Path(unpacked(source)).suffix.lower().removeprefix(".")
    content = b"".join(lines).decode("utf-8")
    if kind == "xsf" and (found := re.search(r"^\s*(SLAB|POLYMER|MOLECULE)\b", content, re.MULTILINE)):
        raise TomatError(f"{source} is a {found[1]}, not periodic along all three axes; expected CRYSTAL.")
    if kind == "res":
        for site, occupancy in _RES_SITE.findall(content.partition("SFAC")[2]):
            if float(occupancy) not in (1.0, 11.0):  # adding 10 tells SHELX to keep the value fixed
                raise TomatError(f"{source}: {site} has an occupancy of {occupancy}; expected full occupancy.")
    if kind != "xsf" and (found := _BY_SYMMETRY.search(content)):
        raise TomatError(f"{source} has atoms by symmetry ({found[0].strip()}); expected all of the cell, in P1.")
    if kind == "cssr" and re.match(r"[^\n]*\n[^\n]*\n\s*\d+\s+1\b", content):
        raise TomatError(f"{source} has orthogonal coordinates (1 after its number of atoms); expected fractions, 0.")
    parts = _parts(Structure.from_str(content, fmt=kind).as_dict(), source)  # type: ignore[arg-type]  # one of _READERS
    stated = _STATED[kind].search(content) if kind in _STATED else None
    if stated is not None and int(stated[1]) != len(parts[1]):
        raise TomatError(f"{source} says {stated[1]} atoms, and {len(parts[1])} can be read; it is cut off or damaged.")
    return parts


def _parts(content: Mapping[str, Any], source: str) -> Parts:
    """The parts of pymatgen's dict. Data that are not used give a warning, like those of pymatgen's readers."""
    parts, notes = _of_dict(content, source)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return parts


_READERS = {
    ".cif": _cif, ".mcif": _cif, ".json": _json, ".xyz": _xyz, ".cssr": _pymatgen, ".xsf": _pymatgen,
    ".res": _pymatgen, ".vasp": _vasp, ".poscar": _vasp,
}  # fmt: skip
"""Readers by the end of a file's name. VASP's files are also recognised by the name itself."""


def formula(crystal: Crystal) -> str:
    """Atoms of the cell by element, in the order of atomic numbers: `F2 Sr1`."""
    numbers, counts = np.unique(crystal.atomic_numbers, return_counts=True)
    return " ".join(f"{symbol_of(z)}{n}" for z, n in zip(numbers.tolist(), counts.tolist(), strict=True))


def _molecule(source: str) -> TomatError:
    said = f"{source} has no lattice: it is a molecule. tomat predicts crystals"
    return TomatError(f"{said}; models that have not learnt from vacuum fill a box around a molecule with charge.")
