"""Open a density whatever its format."""

import os
from pathlib import Path

from tomat.density.grid import DensityGrid
from tomat.errors import TomatError

CHGCAR_NAMES = ("CHGCAR", "AECCAR", "CHG", "PARCHG")


def open_density(location: str | os.PathLike[str], material_id: str | None = None) -> DensityGrid:
    """Read a CHGCAR, a `rho_gga` Zarr group or a Materials Project document, told apart by name.

    Args:
        location: `*CHGCAR*[.gz|.bz2]`, `*.vasp`, `*.zarr` (or a folder with `zarr.json`), `*.json[.gz]`; Zarr and JSON
            also as URLs.

    Raises:
        TomatError: a name of none of these kinds, or what the reader of its kind finds wrong.
    """
    text = os.fspath(location).rstrip("/")
    name = text.rsplit("/", 1)[-1]
    if name.endswith(".zarr") or (Path(text) / "zarr.json").is_file():
        from tomat.density.zarr_store import read_zarr

        return read_zarr(text, material_id)
    if name.endswith((".json.gz", ".json")):
        from tomat.density.materials_project import read_materials_project

        return read_materials_project(text, material_id)
    if any(kind in name.upper() for kind in CHGCAR_NAMES) or name.endswith(".vasp"):
        from tomat.density.chgcar import read_chgcar

        return read_chgcar(text, material_id)
    there = "is there, but" if "://" in text or Path(text).exists() else "does not exist, and"
    raise TomatError(
        f"{text} {there} its name is of no known kind; expected CHGCAR*[.gz|.bz2], *.vasp, *.zarr, *.json.gz or *.json."
    )
