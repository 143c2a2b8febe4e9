"""Rows of scattered voxels: nothing but the density tokens of voxels drawn over the whole cell, and PAD after the last.
Neighbouring voxels say nearly the same, so a model that reads only the structure learns more from scattered voxels than
from as many in a patch. Cell and atoms lie beside the rows (`structures.py`), so a context does not limit them.

Row r of a material holds the voxels p(r L), ..., p(r L + L - 1) of its flat grid in C order, where p is a permutation
keyed by the set's seed and the material's name (`KeyedPermutation`), and L is the context. So every voxel is in at most
one row, and all are equally likely: the mean over a material's voxels stands for the mean over its cell, and NMAE needs
no weights. Only in a mean over rows do the voxels of a padded row (the last of a cell that is written whole) weigh
more. The places of the voxels are not stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.relative import UNIT_RATIO, CellCodec, RelativeCodec, cell_codec, relative_to
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import UNIT_WORDS, check_codec
from tomat.data.tokens.shuffle import KeyedPermutation

_permutation = lru_cache(maxsize=64)(KeyedPermutation)


def draw_voxels(key: str, grid_shape: Sequence[int], context: int, start: int, stop: int) -> np.ndarray:
    """Flat indices in C order of the voxels in rows `start` to `stop` - 1 of a material: int64 [rows, context], -1
    where the cell has no more. `key`: 32 hexadecimal digits (`manifest.anchors_seed`)."""
    n_voxels = prod(int(side) for side in grid_shape)
    voxels = np.full((stop - start) * context, -1, np.int64)
    held = np.arange(start * context, min(stop * context, n_voxels))
    voxels[: len(held)] = _permutation(n_voxels, int(key, 16))(held)
    return voxels.reshape(-1, context)


def encode_scattered(grid: DensityGrid, voxels: np.ndarray, layout: SequenceLayout, codec: DensityCodec) -> np.ndarray:
    """Rows uint16 [n, context] of the voxels int64 [n, context] of `draw_voxels`; no other voxel is encoded."""
    check_codec(layout, codec)
    cell = cell_codec(codec, grid)
    if cell.scale is not None:
        cell = replace(cell, scale=_taken(cell.scale, voxels))
    rows = cell.encode(_taken(grid.rho, voxels))
    rows += np.uint16(v.DENSITY_START)
    if voxels.size and voxels[-1, -1] < 0:
        rows[voxels < 0] = v.PAD
    return rows


def _taken(values: np.ndarray, voxels: np.ndarray) -> np.ndarray:
    """The values of a grid at flat indices; for the padding's -1 the value of voxel 0."""
    return values.reshape(-1).take(voxels, mode="clip")


@dataclass(frozen=True, eq=False)
class DecodedVoxels:
    """What a row of scattered voxels says, padding left out."""

    density_tokens: np.ndarray
    """int64 [n]: ids of the codec, starting from 0."""
    values: np.ndarray
    """float32 [n]: the decoded density, in `unit`."""
    unit: str
    """The codec's unit; `UNIT_RATIO` for a relative codec without its scale."""


def decode_scattered(
    ids: np.ndarray, layout: SequenceLayout, codec: DensityCodec, scale: np.ndarray | None = None
) -> DecodedVoxels:
    """Read a row back, exactly except for the codec's bins. `scale`: float32 [n], of a relative codec at the voxels."""
    check_codec(layout, codec)
    ids = np.asarray(ids).astype(np.int64)
    end = v.DENSITY_START + codec.n_density_tokens
    is_density = (ids >= v.DENSITY_START) & (ids < end)
    n = int(np.argmin(is_density)) if not is_density.all() else len(ids)
    bad = np.flatnonzero(ids[n:] != v.PAD)
    if n == 0 or bad.size:
        place = n + int(bad[0]) if bad.size else 0
        expected = f"a density token ({v.DENSITY_START} to {end - 1})" + (", or padding to the end" if n else "")
        raise TomatError(
            f"The sequence is not scattered: position {place} has {ids[place] if len(ids) else 'the end'}, expected "
            f"{expected}. Is it damaged, or from another layout or codec?"
        )
    tokens = ids[:n] - v.DENSITY_START
    values, unit = codec.decode(tokens), codec.unit
    if relative_to(codec) is not None:
        values, unit = (values, UNIT_RATIO) if scale is None else (CellCodec(codec, 1.0, scale).density(values), unit)
    return DecodedVoxels(tokens, values, unit)


def humanise_scattered(
    ids: np.ndarray,
    voxels: np.ndarray,
    crystal: Crystal,
    grid_shape: tuple[int, int, int],
    layout: SequenceLayout,
    codec: DensityCodec,
    first_voxels: int = 8,
) -> list[str]:
    """A row in words, with `voxels` int64 [context], the structure that lies beside it and its grid."""
    scale = None
    if isinstance(codec, RelativeCodec):
        scale = _taken(codec.scale(crystal, grid_shape), voxels[voxels >= 0])
    read = decode_scattered(ids, layout, codec, scale=scale)
    n, unit = len(read.values), UNIT_WORDS[read.unit]
    low, mean, high = read.values.min(), read.values.mean(dtype=np.float64), read.values.max()
    lines = [
        f"layout   {layout.name}: {len(ids):,} tokens, {len(ids) - n:,} of them padding "
        f"({100 * (len(ids) - n) / len(ids):.1f} %)",
        f"grid     {' x '.join(map(str, grid_shape))} voxels, of which {n:,} stand here",
        f"atoms    {len(crystal.atomic_numbers)}, which the row does not name: they lie beside the rows",
        f"density  min {low:.4g}, mean {mean:.4g}, max {high:.4g} {unit}",
    ]
    places = np.stack(np.unravel_index(voxels[:n], grid_shape), axis=-1)[:first_voxels]
    for (x, y, z), token, value in zip(places.tolist(), read.density_tokens, read.values, strict=False):
        lines.append(f"         voxel {x} {y} {z}  rho {token}  = {value:.5g} {unit}")
    if n > first_voxels:
        lines.append(f"         and {n - first_voxels:,} more, anywhere in the cell")
    return lines
