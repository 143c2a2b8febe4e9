"""Densities as `rho_gga` Zarr v3: one group per material, `<task_id>.zarr`, local or at a URL such as `gs://`.

The array `charge_density_total` (float32, zstd, in one chunk or chunks of 16^3 voxels) holds rho x V in electrons. The
attributes `structure` (of pymatgen) and `metadata` (`task_id` and what the source adds) are JSON strings. What tomat
writes has zstd's checksum in every chunk, and the attribute `sha256` over values, structure and metadata.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import naming
from tomat.data.density.checks import density_of
from tomat.data.density.chgcar import Location, Parts
from tomat.data.density.crystal import structure_from_dict
from tomat.data.density.grid import DensityGrid, check_electrons
from tomat.data.density.rules import DEFAULT_RULES, ReadRules, check_kind

TOTAL = "charge_density_total"
DIFFERENCE = "charge_density_diff"
CHECKSUM = "sha256"
CODEC_BYTES = 64
"""Bytes that a compressor may add to a chunk that it cannot shrink."""


def read_zarr(location: Location, material_id: str | None = None, rules: ReadRules = DEFAULT_RULES) -> DensityGrid:
    """Read one material; the density in e/Å³, negative values set to zero and counted in `clipped_voxels`."""
    import zarr

    from tomat.data.density.zarr_limits import check_array

    text = os.fspath(location)
    partial = check_kind(text, (), rules.accept)
    group = _open_group(text)
    attributes = dict(group.attrs)
    with naming(f"{text}: no readable array {TOTAL!r}", "; expected the `rho_gga` layout."):
        array = group[TOTAL]
    kind = array.dtype if isinstance(array, zarr.Array) else "group"
    if not isinstance(array, zarr.Array) or array.ndim != 3 or array.dtype.kind != "f":
        raise TomatError(f"{text}: {TOTAL!r} has shape {getattr(array, 'shape', ())} of {kind}; expected 3-D floats.")
    check_array(array, f"{text}: {TOTAL!r}")
    # Otherwise Zarr reads a missing chunk as zeros.
    array = array.with_config({"read_missing_chunks": False})
    structure = _json_attribute(attributes, "structure", text)
    lattice, numbers, coords = structure_from_dict(structure, text)
    metadata = _json_attribute(attributes, "metadata", text) if "metadata" in attributes else {}
    name = material_id or str(metadata.get("task_id") or text.rstrip("/").rsplit("/", 1)[-1].removesuffix(".zarr"))
    group.store.chunk_bytes = math.prod(array.chunks) * array.dtype.itemsize + CODEC_BYTES
    with naming(f"{text}: array {TOTAL!r} is not whole or does not decode", "; fetch it again."):
        values = np.asarray(array[...])
    # Checked before the values are interpreted, so that damage is reported as damage.
    if attributes.get(CHECKSUM, found := _checksum(values, attributes)) != found:
        raise TomatError(
            f"{text}: values, structure or metadata are not what was written (sha256 {found[:12]}..., written "
            f"{str(attributes[CHECKSUM])[:12]}...); fetch this material again."
        )
    return density_of(values, lattice, numbers, coords, source=text, material_id=name, rules=rules, partial=partial)


def parts_of_group(location: Location) -> Parts:
    return Parts(int(DIFFERENCE in _open_group(os.fspath(location))), False)


def write_zarr(
    grid: DensityGrid, location: Location, *, chunks: int | None = None, metadata: Mapping[str, Any] | None = None
) -> None:
    """Write one material to a new place, in one chunk or in cubic chunks (of side 16 in the `rho_gga` set)."""
    import zarr
    from zarr.codecs import ZstdCodec

    check_electrons(grid, os.fspath(location))
    if Path(location).exists():
        raise TomatError(f"{location} is there already; remove it first, or name another place.")
    group = zarr.open_group(location, mode="w-", zarr_format=3)
    array = group.create_array(
        TOTAL,
        shape=grid.grid_shape,
        chunks=tuple(min(chunks or n, n) for n in grid.grid_shape),
        dtype="float32",
        compressors=[ZstdCodec(level=19, checksum=True)],
        fill_value=0.0,
        # An all-zero chunk is written too, so that a missing one always means a loss.
        config={"write_empty_chunks": True},
    )
    values = grid.rho_times_volume()
    array[...] = values
    attributes = {
        "structure": json.dumps(json.loads(grid.structure.to_json()), sort_keys=True),
        "metadata": json.dumps({"task_id": grid.material_id, **(metadata or {})}, sort_keys=True),
    }
    group.attrs.update({**attributes, CHECKSUM: _checksum(values, attributes)})


def _checksum(values: np.ndarray, attributes: Mapping[str, Any]) -> str:
    """sha256 of the shape, the values as little-endian float32 and the attributes that are JSON strings."""
    words = json.dumps([list(values.shape), attributes.get("structure"), attributes.get("metadata")], sort_keys=True)
    return hashlib.sha256(words.encode() + np.ascontiguousarray(values, dtype="<f4").tobytes()).hexdigest()


def _open_group(text: str) -> Any:
    import zarr

    from tomat.data.density.zarr_limits import read_only_store

    if "://" not in text and not Path(text).exists():
        raise TomatError(f"no density at {text}; the folder does not exist.")
    expected = f"; expected the `rho_gga` layout, a group with the array {TOTAL!r}."
    with naming(f"{text} is not a readable Zarr group", expected):
        return zarr.open_group(read_only_store(text), mode="r")


def _json_attribute(attributes: Mapping[str, Any], key: str, text: str) -> dict[str, Any]:
    value = attributes.get(key)
    wrong = "missing or not an object"
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        value, wrong = None, f"not JSON ({error})"
    if not isinstance(value, dict):
        raise TomatError(f"{text}: attribute {key!r} is {wrong}; expected a JSON string.")
    return value
