"""Materials Project charge densities: one gzipped JSON document per calculation, `chgcars/<id>.json.gz`, CC BY 4.0.

`{task_id, fs_id, data: {"@class": "Chgcar", poscar: {structure}, data: {total: {"@class": "array", dtype, data}}}}`;
values are rho x V in electrons, nested as `[nx][ny][nz]`.
"""

import gzip
import json
import os
import zlib
from typing import Any

import numpy as np

from tomat.density.checks import check_rho_times_volume
from tomat.density.grid import DensityGrid
from tomat.density.structures import structure_from_dict
from tomat.errors import TomatError

Location = str | os.PathLike[str]


def read_materials_project(location: Location, material_id: str | None = None) -> DensityGrid:
    """Read one document.

    Args:
        location: a local path or a URL that fsspec opens; `.json.gz` or `.json`.
        material_id: name to give it; else the document's `task_id`, else its `fs_id`, else the file name.

    Returns:
        The density in e/A^3; negative values are set to zero and counted in `clipped_voxels`.

    Raises:
        TomatError: no such object, damaged compression or JSON, a part that is missing, values in another unit, a
            density that no set of atoms has.
    """
    source = os.fspath(location)
    document = _load(source)
    try:
        chgcar = document["data"]
        structure = chgcar["poscar"]["structure"]
        total = chgcar["data"]["total"]
        nested = total["data"] if isinstance(total, dict) else total
    except (KeyError, TypeError) as error:
        found = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise TomatError(
            f"{source}: found {found} and no {error} where a Materials Project charge density has "
            "`data.poscar.structure` and `data.data.total`."
        ) from error
    lattice, numbers, coords = structure_from_dict(structure, source)
    try:
        values = np.array(nested, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TomatError(
            f"{source}: `data.data.total` is ragged or not numeric ({error}); fetch the object again."
        ) from error
    if values.ndim != 3 or values.size == 0:
        raise TomatError(f"{source}: `data.data.total` has shape {values.shape}; expected [nx][ny][nz].")
    check_rho_times_volume(values, lattice, numbers, source)
    name = material_id or str(document.get("task_id") or document.get("fs_id") or source.rsplit("/", 1)[-1])
    return DensityGrid.from_rho_times_volume(values, lattice, numbers, coords, material_id=name)


def _load(source: str) -> Any:
    import fsspec.core

    try:
        filesystem, path = fsspec.core.url_to_fs(source)
        raw = filesystem.cat_file(path)
    except FileNotFoundError as error:
        raise TomatError(f"no density at {source}.") from error
    except (OSError, ValueError) as error:
        raise TomatError(f"cannot read {source}: {error}") from error
    try:
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        return json.loads(text)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise TomatError(
            f"{source} is not a complete gzipped JSON document ({type(error).__name__}: {error}); fetch it again."
        ) from error
