"""Open a density whatever its format."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line
from tomat.data.density.chgcar import Parts, read_chgcar, read_parts
from tomat.data.density.cube import SUFFIXES as CUBE_SUFFIXES
from tomat.data.density.cube import read_cube, read_cube_parts
from tomat.data.density.grid import DensityGrid
from tomat.data.density.materials_project import parts_of_document, read_materials_project
from tomat.data.density.poscar import check_species_used
from tomat.data.density.rules import DEFAULT_RULES, ReadRules
from tomat.data.density.zarr_store import parts_of_group, read_zarr

CHGCAR_NAMES = ("CHGCAR", "AECCAR", "CHG", "PARCHG")
EXPECTED = "CHGCAR*[.gz|.bz2|.xz], *.vasp, *.cube, *.zarr, *.json.gz or *.json"
PACKED = (".gz", ".bz2", ".xz")

READERS = {
    read_chgcar: ("CHGCAR", read_parts),
    read_cube: ("cube", read_cube_parts),
    read_zarr: ("rho_gga Zarr", parts_of_group),
    read_materials_project: ("Materials Project JSON", parts_of_document),
}
"""To each reader the name of what it reads, and what else is in such a file."""


def open_density(
    location: str | os.PathLike[str], material_id: str | None = None, rules: ReadRules = DEFAULT_RULES
) -> DensityGrid:
    """Read a CHGCAR, a cube, a `rho_gga` Zarr group or a Materials Project document, told apart by name.

    `location`: `*CHGCAR*[.gz|.bz2|.xz]`, `*.vasp`, `*.cube[.gz|.bz2|.xz]`, `*.zarr` (or a folder with `zarr.json`),
    `*.json[.gz]`; Zarr and JSON also as URLs.

    Raises:
        MemoryError: as it is; it says nothing about the file.
    """
    text = os.fspath(location).rstrip("/")
    return read_density(lambda: _known_reader(text)(text, material_id, rules), text)


def format_name(location: str) -> str:
    """What a density of that name is called: "CHGCAR", "cube", ..."""
    return READERS[_known_reader(location)][0]


def parts_beside(location: str) -> Parts:
    """What a file holds beside the total density, of which `open_density` reads no more than that it is whole."""
    return READERS[_known_reader(location)][1](location.rstrip("/"))


def check_species_apply(locations: Iterable[str], rules: ReadRules) -> None:
    """Refuse elements for densities of which none is a CHGCAR that names none: all others name theirs."""
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
    """Call `read`, and make a TomatError that names the file of whatever it raises, but for a MemoryError.

    Readers refuse by themselves what they foresee. But a file can be broken in ways that surface anywhere in Zarr,
    pymatgen, NumPy or a decompressor, each with exceptions of its own, and one such file must not end the work on all.
    """
    try:
        return read()
    except (TomatError, MemoryError):
        raise
    except Exception as error:
        raise TomatError(
            f"{location} cannot be read as a density ({type(error).__name__}: {first_line(error)}); it cannot be "
            "opened, is damaged, or holds something else."
        ) from error


def _known_reader(text: str) -> Callable[[str, str | None, ReadRules], DensityGrid]:
    reader = _reader(text)
    if reader is None:
        there = "is there, but" if "://" in text or Path(text).exists() else "does not exist, and"
        raise TomatError(f"{text} {there} its name is of no known kind; expected {EXPECTED}.")
    return reader


def _reader(location: str) -> Callable[[str, str | None, ReadRules], DensityGrid] | None:
    """What reads a density of that name; None for a name of no known kind."""
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


def unpacked(name: str) -> str:
    """Without the suffix of a compression."""
    return next((name.removesuffix(suffix) for suffix in PACKED if name.endswith(suffix)), name)
