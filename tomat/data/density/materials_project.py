"""Materials Project charge densities: one gzipped JSON document per calculation, `chgcars/<id>.json.gz`, CC BY 4.0:
`{task_id, fs_id, data: {"@class": "Chgcar", poscar: {structure}, data: {total: {"@class": "array", dtype, data}}}}`;
values are rho x V in electrons, nested as `[nx][ny][nz]`."""

import io
import json
import os
from collections.abc import Mapping
from itertools import chain
from typing import IO, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.retries import first_contact
from tomat.data.density.checks import density_of
from tomat.data.density.chgcar import Location, Parts
from tomat.data.density.crystal import structure_from_dict
from tomat.data.density.grid import DensityGrid
from tomat.data.density.limits import COMPRESSION_ERRORS, BoundedText, check_grid_shape
from tomat.data.density.rules import DEFAULT_RULES, ReadRules, check_kind


def read_materials_project(
    location: Location, material_id: str | None = None, rules: ReadRules = DEFAULT_RULES
) -> DensityGrid:
    """Read one document, `.json.gz` or `.json`, from a local path or a URL that fsspec opens; the density in e/Å³."""
    source = os.fspath(location)
    document, chgcar, structure, total = _load(source)
    title = chgcar["poscar"].get("comment")
    partial = check_kind(source, [title] if isinstance(title, str) else [], rules.accept)
    atoms = structure_from_dict(structure, source)
    values = _values(total, source)
    name = material_id or str(document.get("task_id") or document.get("fs_id") or source.rsplit("/", 1)[-1])
    return density_of(values, *atoms, source=source, material_id=name, rules=rules, partial=partial)


def parts_of_document(location: Location) -> Parts:
    _, chgcar, _, _ = _load(os.fspath(location))
    return Parts(len(chgcar["data"].keys() & {"diff", "diff_x", "diff_y", "diff_z"}), bool(chgcar.get("data_aug")))


def write_materials_project(grid: DensityGrid, file: IO[bytes], metadata: Mapping[str, Any] | None = None) -> None:
    """Write one document, not compressed; `data` is pymatgen's own JSON of a `Chgcar`."""
    said = f'"metadata": {json.dumps(metadata)}, ' if metadata else ""
    document = f'{{"task_id": {json.dumps(grid.material_id)}, {said}"data": {grid.to_pymatgen().to_json()}}}\n'
    file.write(document.encode())


def _values(nested: Any, source: str) -> np.ndarray:
    """float64 `[nx, ny, nz]` of lists of lists of lists of numbers."""
    where = f"{source}: `data.data.total`"
    try:
        # NumPy would take `true` and "1" as numbers.
        kinds = set(map(type, chain.from_iterable(chain.from_iterable(nested))))
        values = np.array(nested, dtype=np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise TomatError(f"{where} is no [nx][ny][nz] lists of numbers ({error}); fetch it again.") from error
    if values.ndim != 3 or not kinds <= {float, int}:
        found = " and ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise TomatError(f"{where} holds {found} in {values.ndim} dimensions; expected [nx][ny][nz] lists of numbers.")
    check_grid_shape(values.shape, source)
    return values


def _load(source: str) -> tuple[Any, Any, Any, Any]:
    """The document, the `Chgcar` in it, its structure, and the nested values of its total density."""
    import fsspec.core

    try:
        first_contact(source)
        filesystem, path = fsspec.core.url_to_fs(source)
        raw = filesystem.cat_file(path)
    except FileNotFoundError as error:
        raise TomatError(f"no density at {source}; expected a file.") from error
    except (OSError, ValueError) as error:
        raise TomatError(f"cannot read {source}: {error}") from error
    try:
        document = json.loads(BoundedText(io.BytesIO(raw), source).everything())
    except (*COMPRESSION_ERRORS, ValueError, RecursionError) as error:
        raise TomatError(
            f"{source} is not a complete gzipped JSON document ({type(error).__name__}: {error}); fetch it again."
        ) from error
    try:
        chgcar = document["data"]
        structure, total = chgcar["poscar"]["structure"], chgcar["data"]["total"]
        return document, chgcar, structure, total["data"] if isinstance(total, dict) else total
    except (KeyError, TypeError) as error:
        found = sorted(document) if isinstance(document, dict) else type(document).__name__
        raise TomatError(
            f"{source}: found {found} and no {error} where a Materials Project charge density has "
            "`data.poscar.structure` and `data.data.total`."
        ) from error
