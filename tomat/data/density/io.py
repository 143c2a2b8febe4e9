"""Densities by path: the search that every `--input` uses, and the opening of a density of any format."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.reporting import counted, naming
from tomat.base.retries import STORAGE_TRIES, first_contact, with_retries
from tomat.data.density.chgcar import Parts, read_chgcar, read_parts
from tomat.data.density.cube import SUFFIXES as CUBE_SUFFIXES
from tomat.data.density.cube import read_cube, read_cube_parts
from tomat.data.density.grid import DensityGrid
from tomat.data.density.limits import PACKED, unpacked
from tomat.data.density.materials_project import parts_of_document, read_materials_project
from tomat.data.density.poscar import check_species_used
from tomat.data.density.rules import DEFAULT_RULES, ReadRules, kind_of_name
from tomat.data.density.zarr_store import parts_of_group, read_zarr

CHGCAR_NAMES = ("CHGCAR", "AECCAR", "CHG", "PARCHG")
EXPECTED = "CHGCAR*[.gz|.bz2|.xz], *.vasp, *.cube, *.zarr, *.json.gz or *.json"
_ENDINGS = (".zarr", ".json.gz", ".json", *PACKED, ".vasp", *CUBE_SUFFIXES)
_REMOTE = (".zarr", ".json.gz", ".json")
"""Endings that are looked for in a bucket. A single object may have any ending of `_ENDINGS`."""
MOST_SHOWN = 5
"""Most names shown for each reason."""

READERS = {
    read_chgcar: ("CHGCAR", read_parts),
    read_cube: ("cube", read_cube_parts),
    read_zarr: ("rho_gga Zarr", parts_of_group),
    read_materials_project: ("Materials Project JSON", parts_of_document),
}
"""For each reader: the name of its format, and the function that tells what else such a file holds."""


def open_density(
    location: str | os.PathLike[str], material_id: str | None = None, rules: ReadRules = DEFAULT_RULES
) -> DensityGrid:
    """Read a density. Its name tells the format: `*CHGCAR*[.gz|.bz2|.xz]`, `*.vasp`, `*.cube[.gz|.bz2|.xz]`, `*.zarr`
    (or a folder with `zarr.json`), `*.json[.gz]` of the Materials Project. Zarr and JSON may be URLs. A MemoryError is
    passed on."""
    text = os.fspath(location).rstrip("/")
    return read_density(lambda: _known_reader(text)(text, material_id, rules), text)


def format_name(location: str) -> str:
    """What a density of that name is called: "CHGCAR", "cube", ..."""
    return READERS[_known_reader(location)][0]


def parts_beside(location: str) -> Parts:
    """What a file holds beside the total density. `open_density` only checks that these parts are whole."""
    return READERS[_known_reader(location)][1](location.rstrip("/"))


def check_species_apply(locations: Iterable[str], rules: ReadRules) -> None:
    """Refuse `--species` if no density is a CHGCAR without element names, since all others name their elements."""
    if not rules.species:
        return
    chgcars = [each for each in locations if is_chgcar(each)]
    if not chgcars:
        raise TomatError(
            f"--species names {' '.join(rules.species)}, but no input is a CHGCAR, which may need it; leave it out."
        )
    check_species_used(chgcars, rules)


def is_chgcar(location: str) -> bool:
    return _reader(location) is read_chgcar


def read_density(read: Callable[[], DensityGrid], location: str) -> DensityGrid:
    """Call `read`, and turn any error but a MemoryError into a TomatError that names the file: a damaged file may fail
    anywhere in Zarr, pymatgen, NumPy or a decompressor."""
    remedy = "; it cannot be opened, is damaged, or holds something else."
    with naming(f"{location} cannot be read as a density", remedy):
        return read()


def _known_reader(text: str) -> Callable[[str, str | None, ReadRules], DensityGrid]:
    reader = _reader(text)
    if reader is None:
        there = "is there, but" if "://" in text or Path(text).exists() else "does not exist, and"
        raise TomatError(f"{text} {there} its name is of no known kind; expected {EXPECTED}.")
    return reader


def _reader(location: str) -> Callable[[str, str | None, ReadRules], DensityGrid] | None:
    """The reader for a density of that name; None for a name of no known kind."""
    text = location.rstrip("/")
    name = text.rsplit("/", 1)[-1]
    if name.endswith(".zarr") or (Path(text) / "zarr.json").is_file():
        return read_zarr
    if name.endswith((".json.gz", ".json")):
        return read_materials_project
    plain = unpacked(name)
    if plain.lower().endswith(CUBE_SUFFIXES):
        return read_cube
    if plain.endswith(".vasp") or any(kind in name.upper() for kind in CHGCAR_NAMES):
        return read_chgcar
    return None


@dataclass(frozen=True)
class DensityFile:
    """A file, folder or object with the name of a density."""

    name: str
    """Name of the material, unique in a search."""
    path: str


@dataclass(frozen=True)
class FoundDensities:
    files: tuple[DensityFile, ...]
    """In the order given, those of a folder sorted by path."""
    ignored: Mapping[str, str]
    """By path, why every other file of a folder is ignored."""


def find_densities(paths: Iterable[str], tries: int = STORAGE_TRIES, accept: Sequence[str] = ()) -> FoundDensities:
    """The densities among files, folders and URLs.

    A folder is searched to any depth, links to folders too, but without hidden files or folders. In a folder a CHG is
    taken only if no CHGCAR lies beside it, and a part of a density (AECCAR0, PARCHG) only with `not_total` in `accept`.
    A file that is given itself is taken whatever its name. A material has the name of its file without suffixes, or of
    its folder if it is just called CHGCAR, CHG or AECCAR0 or 2. Folders above are put before names that are equal.
    """
    found: dict[str, tuple[str, str]] = {}
    ignored: dict[str, str] = {}
    for given in paths:
        taken, others = _below(given, tries, "not_total" in accept)
        if not taken:
            why = f"; {ignored_words(others)}" if others else ""
            raise TomatError(f"The folder {given} holds no density; expected {EXPECTED}{why}.")
        for path in taken:
            root = given if os.path.isdir(given) and path != given.rstrip("/") else str(PurePosixPath(path).parent)
            found.setdefault(path if "://" in path else os.path.realpath(path), (path, root))
        ignored |= others
    if not found:
        raise TomatError("No density was given; name files, folders, or the embedded data.")
    return FoundDensities(tuple(_named(dict(found.values()))), ignored)


def ignored_words(ignored: Mapping[str, str]) -> str:
    """`3 ignored: a/INCAR, a/KPOINTS (its name is that of no density), ...`, some names for each reason."""
    by_reason: dict[str, list[str]] = {}
    for path, reason in ignored.items():
        by_reason.setdefault(reason, []).append("/".join(PurePosixPath(path).parts[-2:]))
    parts = []
    for reason, names in by_reason.items():
        more = f" and {len(names) - MOST_SHOWN:,} more" if len(names) > MOST_SHOWN else ""
        parts.append(f"{', '.join(names[:MOST_SHOWN])}{more} ({reason})")
    return f"{len(ignored):,} ignored" + (f": {'; '.join(parts)}" if parts else "")


def material_name(path: str) -> str:
    """The name of the material in a file: `mp-149` for `data/mp-149.zarr`, `mp-149.json.gz` and `mp-149/CHGCAR.gz`."""
    name = PurePosixPath(path.replace("\\", "/"))
    stem = name.name
    while (suffix := next((each for each in _ENDINGS if stem.endswith(each)), None)) is not None:
        stem = stem.removesuffix(suffix)
    stem = stem.removesuffix(".CHGCAR")
    if stem in ("CHGCAR", "CHG", "AECCAR0", "AECCAR2") and name.parent.name:
        return name.parent.name
    return stem


def densities_below(root: str, suffixes: str | tuple[str, ...], tries: int = STORAGE_TRIES) -> list[str]:
    """The paths or URLs directly below a folder or URL that end with `suffixes`."""
    entries = asked(root, tries, lambda files, path: files.ls(path, detail=False))
    names = (str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries)
    return [f"{root}/{name}" for name in names if name.endswith(suffixes)]


def asked[Answer](place: str, tries: int, ask: Callable[[Any, str], Answer]) -> Answer:
    """Call `ask` with the file system of a path or URL and the path on it. Tries again in an outage."""
    import fsspec

    def answer() -> Answer:
        try:
            first_contact(place)
            return ask(*fsspec.core.url_to_fs(place))
        except FileNotFoundError as error:
            raise TomatError(f"There is no {place}. Give a path or URL that this user can read.") from error
        except (OSError, ValueError) as error:
            raise TomatError(f"Cannot read {place}: {type(error).__name__}: {error}.") from error

    return with_retries(answer, place, tries)


def text_at(place: str, tries: int = STORAGE_TRIES) -> str:
    return asked(place, tries, lambda files, path: files.cat_file(path).decode())


def _below(given: str, tries: int, not_total: bool) -> tuple[list[str], dict[str, str]]:
    """The densities at one path, and by path why other files there are ignored."""
    path = given.rstrip("/") or given
    if "://" in path:
        if path.endswith(_ENDINGS):
            return [path], {}
        return sorted(densities_below(path, _REMOTE, tries)), {}
    if not os.path.exists(path):
        raise TomatError(f"There is no file or folder {path}; expected {EXPECTED}, or a folder of such.")
    if not os.path.isdir(path) or path.endswith(".zarr") or (Path(path) / "zarr.json").is_file():
        return [path], {}
    taken: list[str] = []
    ignored: dict[str, str] = {}
    seen: set[str] = set()
    for folder, below, files in os.walk(path, followlinks=True):
        if (real := os.path.realpath(folder)) in seen:  # a link to a folder above, or to one that was searched
            below.clear()
            continue
        seen.add(real)
        stores = {name for name in below if name.endswith(".zarr")}
        beside = {unpacked(name) for name in files}
        for name in sorted(name for name in [*stores, *files] if not name.startswith(".")):
            kind = kind_of_name(name)
            let_in = not_total and kind is not None and kind.form == "not_total"
            reason = None if let_in else _passed_over(name, name in stores, beside)
            if reason is None:
                taken.append(os.path.join(folder, name))
            else:
                ignored[os.path.join(folder, name)] = reason
        below[:] = sorted(name for name in below if not name.startswith(".") and name not in stores)
    return sorted(taken), ignored


def _passed_over(name: str, store: bool, beside: set[str]) -> str | None:
    """Why a file or a Zarr store of a folder is not taken; None if it is."""
    plain = unpacked(name)
    upper, lower = plain.upper(), plain.lower()
    if kind := kind_of_name(plain):
        return f"another quantity than the total density: {kind.words}"
    if store or lower.endswith((".json", *CUBE_SUFFIXES)) or "CHGCAR" in upper:
        return None
    if plain == "CHG" or upper.endswith(".CHG") or upper.startswith("CHG."):
        return "the CHGCAR beside it holds the same density" if plain.replace("CHG", "CHGCAR") in beside else None
    if "POSCAR" in upper or "CONTCAR" in upper:
        return "a structure without a density"
    if "POTCAR" in upper:
        return "pseudopotentials without a density"
    return None if lower.endswith(".vasp") else "its name is that of no density"


def _named(paths: Mapping[str, str]) -> list[DensityFile]:
    """Files with unique names. Folders are put before equal names, first the folders below the place of the search."""
    beside = Counter((PurePosixPath(path).parent, material_name(path)) for path in paths)
    # Two files of one folder that differ only in their suffix keep it.
    plain = {
        path: PurePosixPath(path).name
        if beside[PurePosixPath(path).parent, material_name(path)] > 1
        else material_name(path)
        for path in paths
    }
    names = dict(plain)
    for below_root in (True, False):
        above = {}
        for path, root in paths.items():
            parts = PurePosixPath(path).parts[len(PurePosixPath(root).parts) if below_root else 0 : -1]
            kept = [part for part in parts if part not in ("/", ".", "..")]
            above[path] = kept[:-1] if kept[-1:] == [plain[path]] else kept
        for depth in range(1, 1 + max(map(len, above.values()))):
            for path in _twice(names):
                names[path] = "-".join([*above[path][-depth:], plain[path]])
    if twice := _twice(names):
        raise TomatError(f"{counted(len(twice), 'file')} would be called {names[twice[0]]}: {', '.join(twice[:5])}.")
    return [DensityFile(names[path], path) for path in paths]


def _twice(names: Mapping[str, str]) -> list[str]:
    """The paths whose name is not unique."""
    often = Counter(names.values())
    return [path for path, name in names.items() if often[name] > 1]
