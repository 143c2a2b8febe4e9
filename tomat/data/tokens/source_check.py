"""Compare a sample of a shard set with the densities it was made of, and write damaged chunks again."""

from collections.abc import Iterable

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.storage import ARRAY_NAME, STRUCTURES_NAME, Store, explaining_storage
from tomat.data.codec.relative import CellCodec, cell_codec
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.patch import ANGLE_STEP_DEGREES, LENGTH_STEP_A, decode_sequence
from tomat.data.tokens.scattered import decode_scattered
from tomat.data.tokens.shards import ShardSet
from tomat.data.tokens.vocabulary import MAX_POSITION_ERROR
from tomat.data.tokens.writer import GetGrid, begin_chunk, chunk_tokens, rows_checksum

COORDINATE_TOLERANCE = 2 * MAX_POSITION_ERROR
"""For fractional coordinates: the position codec's largest error, and as much again for moving the origin."""

STRUCTURE_TOLERANCE_A = 1e-4
"""For lattice and positions: a CHGCAR written from another kind of file has positions to six decimals of a side."""


def damaged_chunks(shards: ShardSet, blocks: Iterable[int] | None = None) -> dict[int, str]:
    """Those chunks (None: of all chunks) that are missing or have another checksum than in the manifest, and why."""
    bad = {}
    for block in range(shards.n_blocks) if blocks is None else blocks:
        try:
            shards.read_block(block, verify=True).result()
        except TomatError as error:
            bad[block] = str(error)
    return bad


def repair_chunks(shards: ShardSet, chunks: Iterable[int], get_grid: GetGrid) -> None:
    """Write these chunks again, and nothing else, from a source whose tokens have the manifest's checksums."""
    store = Store(shards.url)
    for chunk in chunks:
        rows = chunk_tokens(shards.manifest, chunk, get_grid, shards.codec)
        found, expected = rows_checksum(rows), shards.manifest.chunk_checksums[chunk]
        if found != expected:
            raise TomatError(
                f"Chunk {chunk} of {shards.url} cannot be repaired from this source: checksum {found[:12]}..., "
                f"expected {expected[:12]}... Give the densities that the set was made from."
            )
        with explaining_storage(f"Cannot write chunk {chunk} of {store.url}{ARRAY_NAME}"):
            begin_chunk(store, shards.array, shards.manifest, chunk, rows).result()


def compare_with_source(shards: ShardSet, rows: Iterable[int], get_grid: GetGrid) -> dict[str, float]:
    """Read rows back into densities, cells and atoms, and compare them with the source, independently of how rows are
    written: every voxel's token must be the bin its density lies in.

    Returns `rows_compared` and `voxels_compared`; `nmae_fraction`, sum |decoded - source| / sum |source| over the
    rows, the codec's own error; `largest_relative_error_fraction`, of voxels above 1e-3 of their row's largest density.
    """
    error_sum = total_sum = largest = 0.0
    n_rows = voxels = 0
    grid, held = None, ""
    for row in rows:
        material = shards.material_of_row(row)
        if grid is None or material.material_id != held:
            grid, held = get_grid(material.material_id), material.material_id
        where = f"Row {row} of {shards.url} (material {held}) differs from its source"
        compared = _scattered_row if shards.layout.is_scattered else _patch_row
        rho, cell, tokens = compared(shards, row, grid, where)
        if shards.manifest.structures_sha256 is not None:
            stored = shards.crystals[int(shards.manifest.material_indices(np.array(row)))]
            moved = stored.frac_coords - grid.frac_coords
            if not (
                np.array_equal(stored.atomic_numbers, grid.atomic_numbers)
                and np.allclose(stored.lattice, grid.lattice, rtol=0, atol=STRUCTURE_TOLERANCE_A)
                and np.allclose((moved - np.round(moved)) @ grid.lattice, 0, atol=STRUCTURE_TOLERANCE_A)
            ):
                raise TomatError(f"{where}: the structure in {STRUCTURES_NAME} is different.")
        offset = cell.encode(rho).astype(np.int64) - tokens
        if np.any(offset):
            n = np.count_nonzero(offset)
            raise TomatError(f"{where}: {n} of {rho.size} voxels lie in another bin than their token's.")
        error = np.abs(cell.decode(tokens).astype(np.float64) - rho)
        error_sum += float(error.sum())
        total_sum += float(np.abs(rho).sum(dtype=np.float64))
        dense = rho > 1e-3 * rho.max()
        if dense.any():
            largest = max(largest, float((error[dense] / rho[dense]).max()))
        n_rows += 1
        voxels += rho.size
    return {
        "rows_compared": n_rows,
        "voxels_compared": voxels,
        "nmae_fraction": error_sum / max(total_sum, 1e-300),
        "largest_relative_error_fraction": largest,
    }


def _patch_row(shards: ShardSet, row: int, grid: DensityGrid, where: str) -> tuple[np.ndarray, CellCodec, np.ndarray]:
    """For a patch: the source's density, by `DensityGrid.patch`, the codec there, and the density ids. Compares the
    preamble with the source's cell and atoms."""
    anchor = np.array(shards.anchor_of_row(row))
    read = decode_sequence(shards.read_rows(row, row + 1)[0], shards.layout, shards.codec)
    if read.grid_shape != grid.grid_shape:
        raise TomatError(f"{where}: grid {read.grid_shape} against {grid.grid_shape}.")
    origin = anchor / np.array(grid.grid_shape) if shards.layout.version == "v3" else np.zeros(3)
    apart = read.frac_coords - (grid.frac_coords - origin)
    if not (
        np.array_equal(read.atomic_numbers, grid.atomic_numbers)
        and np.all(np.abs(apart - np.round(apart)) < COORDINATE_TOLERANCE)
    ):
        raise TomatError(f"{where}: other atoms.")
    steps = np.array([LENGTH_STEP_A] * 3 + [ANGLE_STEP_DEGREES] * 3)
    lattice_error = np.abs(np.array(read.lattice_parameters) - grid.lattice_parameters)
    if np.any(lattice_error > 0.5001 * steps):
        raise TomatError(f"{where}: lattice {read.lattice_parameters} against {grid.lattice_parameters}.")
    cell = cell_codec(shards.codec, grid).patches(anchor[None], read.patch_shape)
    return grid.patch(anchor.tolist(), read.patch_shape)[None], cell, read.density_tokens[None]


def _scattered_row(
    shards: ShardSet, row: int, grid: DensityGrid, where: str
) -> tuple[np.ndarray, CellCodec, np.ndarray]:
    if (planned := shards.material_of_row(row).grid_shape) != grid.grid_shape:
        raise TomatError(f"{where}: grid {planned} against {grid.grid_shape}.")
    read = decode_scattered(shards.read_rows(row, row + 1)[0], shards.layout, shards.codec)
    voxels = shards.voxels_of_row(row)
    voxels = voxels[voxels >= 0]
    if len(voxels) != len(read.values):
        raise TomatError(f"{where}: {len(read.values)} voxels against {len(voxels)}.")
    at = np.unravel_index(voxels, grid.grid_shape)
    return grid.rho[at], cell_codec(shards.codec, grid).at(at), read.density_tokens


def sample_rows(n_rows: int, count: int, seed: int) -> list[int]:
    """`count` different rows, ascending; all if there are fewer."""
    if count >= n_rows:
        return list(range(n_rows))
    return sorted(np.random.default_rng(seed).choice(n_rows, count, replace=False).tolist())
