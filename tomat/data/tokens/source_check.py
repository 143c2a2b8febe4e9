"""A shard set against the densities it was made of: compare a sample, and write damaged chunks again."""

from collections.abc import Iterable

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.storage import ARRAY_NAME, STRUCTURES_NAME, Store, explaining_storage
from tomat.data.codec.relative import cell_codec
from tomat.data.tokens.patch import ANGLE_STEP_DEGREES, LENGTH_STEP_A, decode_sequence
from tomat.data.tokens.shards import ShardSet
from tomat.data.tokens.vocabulary import MAX_POSITION_ERROR
from tomat.data.tokens.writer import GetGrid, begin_chunk, chunk_tokens, rows_checksum

COORDINATE_TOLERANCE = 2 * MAX_POSITION_ERROR
"""Of fractional coordinates: the position codec's largest error, and as much for moving the origin."""

STRUCTURE_TOLERANCE_A = 1e-4
"""Of lattice and places: a CHGCAR that was written from another kind of file has places to six decimals of a side."""


def damaged_chunks(shards: ShardSet, blocks: Iterable[int] | None = None) -> dict[int, str]:
    """Those of the chunks (None: of all) that are missing or have another checksum than the manifest's, and why."""
    bad = {}
    for block in range(shards.n_blocks) if blocks is None else blocks:
        try:
            shards.read_block(block, verify=True).result()
        except TomatError as error:
            bad[block] = str(error)
    return bad


def repair_chunks(shards: ShardSet, chunks: Iterable[int], get_grid: GetGrid) -> None:
    """Write chunks again, and nothing else, from a source that gives the tokens of the manifest's checksum."""
    store = Store(shards.url)
    for chunk in chunks:
        rows = chunk_tokens(shards.manifest, chunk, get_grid, shards.codec)
        found, expected = rows_checksum(rows), shards.manifest.chunk_checksums[chunk]
        if found != expected:
            raise TomatError(
                f"Chunk {chunk} of {shards.url} cannot be repaired from this source: checksum {found[:12]}..., "
                f"expected {expected[:12]}... Give the densities that the set was made of."
            )
        with explaining_storage(f"Cannot write chunk {chunk} of {store.url}{ARRAY_NAME}"):
            begin_chunk(store, shards.array, shards.manifest, chunk, rows).result()


def compare_with_source(shards: ShardSet, rows: Iterable[int], get_grid: GetGrid) -> dict[str, float]:
    """Read rows back into densities, cells and atoms, and hold them against the source, independently of how rows are
    written: every voxel's token must be the bin its density, by `DensityGrid.patch`, lies in.

    Returns `rows_compared` and `voxels_compared`; `nmae_fraction`, sum |decoded - source| / sum |source| over the
    patches, the codec's own error; `largest_relative_error_fraction`, of voxels above 1e-3 of their patch's largest
    density.
    """
    error_sum = total_sum = largest = 0.0
    n_rows = voxels = 0
    grid, held = None, ""
    for row in rows:
        material = shards.material_of_row(row)
        if grid is None or material.material_id != held:
            grid, held = get_grid(material.material_id), material.material_id
        where = f"Row {row} of {shards.url} (material {held}) differs from its source"
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
        if shards.manifest.structures_sha256 is not None:
            stored = shards.crystals[int(shards.manifest.material_indices(np.array(row)))]
            moved = stored.frac_coords - grid.frac_coords
            if not (
                np.array_equal(stored.atomic_numbers, grid.atomic_numbers)
                and np.allclose(stored.lattice, grid.lattice, rtol=0, atol=STRUCTURE_TOLERANCE_A)
                and np.allclose((moved - np.round(moved)) @ grid.lattice, 0, atol=STRUCTURE_TOLERANCE_A)
            ):
                raise TomatError(f"{where}: the structure in {STRUCTURES_NAME} is another one.")
        patch = grid.patch(anchor.tolist(), read.patch_shape)
        cell = cell_codec(shards.codec, grid).patches(anchor[None], read.patch_shape)
        offset = cell.encode(patch[None])[0].astype(np.int64) - read.density_tokens
        if np.any(offset):
            n = np.count_nonzero(offset)
            raise TomatError(f"{where}: {n} of {patch.size} voxels lie in another bin than their token's.")
        error = np.abs(cell.decode(read.density_tokens[None])[0].astype(np.float64) - patch)
        error_sum += float(error.sum())
        total_sum += float(np.abs(patch).sum(dtype=np.float64))
        dense = patch > 1e-3 * patch.max()
        if dense.any():
            largest = max(largest, float((error[dense] / patch[dense]).max()))
        n_rows += 1
        voxels += patch.size
    return {
        "rows_compared": n_rows,
        "voxels_compared": voxels,
        "nmae_fraction": error_sum / max(total_sum, 1e-300),
        "largest_relative_error_fraction": largest,
    }


def sample_rows(n_rows: int, count: int, seed: int) -> list[int]:
    """`count` different rows, ascending; all if there are fewer."""
    if count >= n_rows:
        return list(range(n_rows))
    return sorted(np.random.default_rng(seed).choice(n_rows, count, replace=False).tolist())
