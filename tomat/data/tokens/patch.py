"""A patch of a density, with its cell and atoms, as a sequence of tokens, and back.

Voxels run in C order, z fastest. Version 3 moves the atoms so that the patch's first voxel is the origin and wraps them
into [0, 1); version 2 leaves them and says where the patch lies: OFFSET is its first voxel, HI its last, both wrapped
into the cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.data.codec.base import UNIT_RHO_TIMES_VOLUME, Decoder, DensityCodec
from tomat.data.codec.position import TOKENS_PER_COORDINATE, decode_positions, encode_positions
from tomat.data.density.geometry import lattice_parameters
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.layouts import PatchShape, SequenceLayout

LENGTH_STEP_A = 0.05
"""Step of the lattice lengths a, b, c, in angstrom: 0.05 to 51.15 fit the integers 1 to 1023."""
ANGLE_STEP_DEGREES = 0.2
"""Step of the lattice angles, in degrees: below 180 needs integers to 900."""

_INTEGER_END = v.INTEGER_START + v.N_INTEGERS


def check_encodable(grid: DensityGrid, layout: SequenceLayout, codec: DensityCodec) -> PatchShape:
    """Check that patches of `grid` can be written in `layout`, and return the shape of the patch, in voxels."""
    check_codec(layout, codec)
    return check_grid_encodable(grid, layout)


def check_grid_encodable(grid: DensityGrid, layout: SequenceLayout) -> PatchShape:
    """As `check_encodable`, while there is no codec yet."""
    return check_cell_encodable(grid.material_id, grid.grid_shape, grid.lattice, grid.atomic_numbers, layout)


def check_cell_encodable(
    name: str, grid_shape: Sequence[int], lattice: np.ndarray, atomic_numbers: np.ndarray, layout: SequenceLayout
) -> PatchShape:
    """As `check_grid_encodable`, for a density that was read before: no value of it matters."""
    _grid_and_lattice_integers(name, grid_shape, lattice)
    _element_ids(name, atomic_numbers)
    return layout.patch_shape(len(atomic_numbers))


def _named(name: str) -> str:
    return f"Material {name}" if name else "The material"


def check_codec(layout: SequenceLayout, codec: DensityCodec) -> None:
    """Refuse a codec that makes other tokens a voxel than the layout writes."""
    if codec.tokens_per_voxel != layout.tokens_per_voxel:
        raise TomatError(
            f"Layout {layout.name} writes {counted(layout.tokens_per_voxel, 'token')} a voxel, the codec makes "
            f"{codec.tokens_per_voxel}. Use a layout and a codec that agree: v2-p14 goes with the two-token codec, the "
            "v3 layouts with a Lloyd-Max codec."
        )


def _grid_and_lattice_integers(
    name: str, grid_shape: Sequence[int], lattice: np.ndarray
) -> tuple[list[int], list[int]]:
    shape = [int(side) for side in grid_shape]
    if max(shape) >= v.N_INTEGERS:
        raise TomatError(
            f"{_named(name)} has a grid of {' x '.join(map(str, shape))} voxels; the vocabulary's integers end at "
            f"{v.N_INTEGERS - 1}. Use a coarser grid, or leave this material out."
        )
    parameters = [float(value) for value in lattice_parameters(lattice)]
    steps = [LENGTH_STEP_A] * 3 + [ANGLE_STEP_DEGREES] * 3
    integers = [round(value / step) for value, step in zip(parameters, steps, strict=True)]
    if not all(1 <= value < v.N_INTEGERS for value in integers):
        raise TomatError(
            f"{_named(name)} has the lattice a, b, c = {', '.join(f'{p:.2f}' for p in parameters[:3])} A and angles "
            f"{', '.join(f'{p:.1f}' for p in parameters[3:])} degrees; lengths from {LENGTH_STEP_A} to "
            f"{LENGTH_STEP_A * (v.N_INTEGERS - 1):.2f} A can be written. Leave this material out."
        )
    return shape, integers


def _element_ids(name: str, atomic_numbers: np.ndarray) -> np.ndarray:
    numbers = np.asarray(atomic_numbers, dtype=np.int64)
    bad = numbers[(numbers < 1) | (numbers > v.N_ELEMENTS)]
    if bad.size:
        raise TomatError(f"{_named(name)} has an atom of Z = {bad[0]}; the vocabulary has Z = 1 to {v.N_ELEMENTS}.")
    return numbers - 1 + v.ELEMENT_START


def _patch_of(values: np.ndarray, anchor: np.ndarray, patch_shape: PatchShape) -> np.ndarray:
    """The box of voxels from `anchor` (inside the cell), wrapped; `values` is [nx, ny, nz, ...]."""
    ends = [int(start) + side for start, side in zip(anchor, patch_shape, strict=True)]
    if all(end <= length for end, length in zip(ends, values.shape, strict=False)):
        return values[tuple(slice(int(start), end) for start, end in zip(anchor, ends, strict=True))]
    steps = [np.arange(int(start), end) for start, end in zip(anchor, ends, strict=True)]
    return values[np.ix_(*(each % length for each, length in zip(steps, values.shape, strict=False)))]


def _in_unit(rho: np.ndarray, grid: DensityGrid, codec: DensityCodec) -> np.ndarray:
    if codec.unit == UNIT_RHO_TIMES_VOLUME:
        return (rho * np.float64(grid.volume_a3)).astype(np.float32)
    return rho


def encode_rows(grid: DensityGrid, anchors: np.ndarray, layout: SequenceLayout, codec: DensityCodec) -> np.ndarray:
    """One sequence for each anchor: uint16 [n, context].

    A codec of unit `rho_times_volume` gets the density times the cell volume.

    Args:
        grid: the density, e/Å³.
        anchors: int [n, 3], first voxel of each patch, wrapped into the cell.
    """
    v.Vocabulary(codec.n_density_tokens)
    patch_shape = check_encodable(grid, layout, codec)
    n_voxels = prod(patch_shape)
    shape, lattice = _grid_and_lattice_integers(grid.material_id, grid.grid_shape, grid.lattice)
    anchors = np.asarray(anchors, dtype=np.int64).reshape(-1, 3) % shape
    n_rows, n_atoms = len(anchors), len(grid.atomic_numbers)

    def integers(start: int, values: np.ndarray | list[int], end: int) -> np.ndarray:
        """[n, values + 2]: bracketed integers, the same in each row or given per row."""
        body = np.broadcast_to(np.asarray(values), (n_rows, np.shape(values)[-1])) + v.INTEGER_START
        return np.concatenate([np.full((n_rows, 1), start), body, np.full((n_rows, 1), end)], axis=1)

    coords = np.broadcast_to(np.asarray(grid.frac_coords, dtype=np.float64).reshape(1, -1, 3), (n_rows, n_atoms, 3))
    if layout.version == "v3":
        coords = coords - (anchors / np.asarray(shape))[:, None, :]
    coords = coords - np.floor(coords)
    positions = encode_positions(coords).reshape(n_rows, n_atoms * 3 * TOKENS_PER_COORDINATE).astype(np.int64)
    same = np.concatenate(
        [
            [v.BOS, v.GRID_START, *(np.array(shape) + v.INTEGER_START), v.GRID_END],
            [v.LATTICE_START, *(np.array(lattice) + v.INTEGER_START), v.LATTICE_END],
            [v.ATOMS_START, *_element_ids(grid.material_id, grid.atomic_numbers), v.ATOMS_END, v.POSITIONS_START],
        ]
    )
    parts = [np.broadcast_to(same, (n_rows, len(same))), positions + v.POSITION_START]
    parts.append(np.full((n_rows, 1), v.POSITIONS_END))
    if layout.version == "v2" or patch_shape != layout.default_shape:
        parts.append(integers(v.SHAPE_START, list(patch_shape), v.SHAPE_END))
    if layout.version == "v2":
        parts.append(integers(v.OFFSET_START, anchors, v.OFFSET_END))
        parts.append(integers(v.HIGH_START, (anchors + patch_shape - 1) % shape, v.HIGH_END))
    parts.append(np.full((n_rows, 1), v.DENSITY_BLOCK_START))
    preamble = np.concatenate(parts, axis=1)

    rows = np.full((n_rows, layout.context), v.PAD, dtype=np.uint16)
    start = preamble.shape[1]
    end = start + layout.tokens_per_voxel * n_voxels
    rows[:, :start] = preamble
    rows[:, end] = v.DENSITY_BLOCK_END
    rows[:, end + 1] = v.EOS
    # Encoding is voxel by voxel, so encode the smaller of the two: the whole cell, or the patches.
    whole = codec.encode(_in_unit(grid.rho, grid, codec)) if n_rows * n_voxels >= grid.rho.size else None
    for row, anchor in zip(rows, anchors, strict=True):
        if whole is None:
            ids = codec.encode(_in_unit(np.ascontiguousarray(_patch_of(grid.rho, anchor, patch_shape)), grid, codec))
        else:
            ids = _patch_of(whole, anchor, patch_shape)
        row[start:end] = ids.reshape(-1)
    rows[:, start:end] += np.uint16(v.DENSITY_START)
    return rows


def encode_sequence(
    grid: DensityGrid, anchor: tuple[int, int, int], layout: SequenceLayout, codec: DensityCodec
) -> np.ndarray:
    """The sequence of the patch whose first voxel is `anchor`: uint16 [context]. See `encode_rows`."""
    return encode_rows(grid, np.asarray([anchor]), layout, codec)[0]


@dataclass(frozen=True, eq=False)
class DecodedSequence:
    """What a sequence says."""

    grid_shape: tuple[int, int, int]
    lattice_parameters: tuple[float, float, float, float, float, float]
    """a, b, c in angstrom, in steps of 0.05; alpha, beta, gamma in degrees, in steps of 0.2."""
    atomic_numbers: np.ndarray
    frac_coords: np.ndarray
    """float64 [n_atoms, 3], in [0, 1): relative to the patch's first voxel in version 3, to the cell in version 2."""
    patch_shape: tuple[int, int, int]
    offset: tuple[int, int, int] | None
    """First voxel of the patch in version 2; version 3 does not tell."""
    density_tokens: np.ndarray
    """int64 [px, py, pz], or [px, py, pz, 2] for two tokens a voxel: ids of the codec, starting from 0."""
    values: np.ndarray
    """float32 [px, py, pz]: the decoded density, in `unit`."""
    unit: str
    """Unit of `values`, the codec's. To go from `rho_times_volume` to e/Å³, divide by the volume of the cell they
    were computed in: the lattice here is rounded."""


class _Reader:
    """Takes blocks off a sequence and refuses anything that is not as the layout writes it."""

    def __init__(self, ids: np.ndarray, layout: SequenceLayout) -> None:
        self.ids = np.asarray(ids).astype(np.int64)
        self.layout = layout
        self.place = 0

    def fail(self, expected: str) -> NoReturn:
        found = self.ids[self.place] if self.place < len(self.ids) else "the end"
        raise TomatError(
            f"The sequence is not {self.layout.version}: at position {self.place} it has {found}, expected {expected}. "
            "It is damaged, or was written in another layout or with another codec."
        )

    def next_is(self, token: int) -> bool:
        return self.place < len(self.ids) and self.ids[self.place] == token

    def expect(self, token: int) -> None:
        if not self.next_is(token):
            self.fail(f"{v.SPECIAL_NAMES[token]} ({token})")
        self.place += 1

    def take(self, count: int, low: int, high: int, what: str) -> np.ndarray:
        """`count` ids in [low, high), less `low`."""
        values = self.ids[self.place : self.place + count]
        bad = np.flatnonzero((values < low) | (values >= high))
        if bad.size or len(values) < count:
            self.place += int(bad[0]) if bad.size else len(values)
            self.fail(f"{what} (ids {low} to {high - 1})")
        self.place += count
        return values - low

    def integers(self, start: int, count: int, end: int) -> tuple[int, ...]:
        self.expect(start)
        values = self.take(count, v.INTEGER_START, _INTEGER_END, "an integer")
        self.expect(end)
        return tuple(int(value) for value in values)

    def count_until(self, token: int) -> int:
        ends = np.flatnonzero(self.ids[self.place :] == token)
        if not ends.size:
            self.fail(f"a block closed by {v.SPECIAL_NAMES[token]} ({token})")
        return int(ends[0])


def decode_sequence(
    ids: np.ndarray, layout: SequenceLayout, codec: DensityCodec, decoder: Decoder = "median"
) -> DecodedSequence:
    """Read a sequence back, exactly but for lattice steps and the codec's bins; padding may be cut off."""
    check_codec(layout, codec)
    read = _Reader(ids, layout)
    read.expect(v.BOS)
    grid_shape = read.integers(v.GRID_START, 3, v.GRID_END)
    if min(grid_shape) < 1:
        raise TomatError(f"The sequence is damaged: it has a grid of {' x '.join(map(str, grid_shape))} voxels.")
    lattice = read.integers(v.LATTICE_START, 6, v.LATTICE_END)
    read.expect(v.ATOMS_START)
    n_atoms = read.count_until(v.ATOMS_END)
    numbers = read.take(n_atoms, v.ELEMENT_START, v.INTEGER_START, "an element") + 1
    read.expect(v.ATOMS_END)
    read.expect(v.POSITIONS_START)
    n_ids = n_atoms * 3 * TOKENS_PER_COORDINATE
    positions = read.take(n_ids, v.POSITION_START, v.DENSITY_START, "a coordinate")
    read.expect(v.POSITIONS_END)
    frac_coords = decode_positions(positions.reshape(n_atoms, 3, TOKENS_PER_COORDINATE))
    patch_shape: tuple[int, ...] = layout.default_shape
    if layout.version == "v2" or read.next_is(v.SHAPE_START):
        patch_shape = read.integers(v.SHAPE_START, 3, v.SHAPE_END)
    offset = None
    if layout.version == "v2":
        offset = read.integers(v.OFFSET_START, 3, v.OFFSET_END)
        at = read.place
        last = tuple((o + p - 1) % n for o, p, n in zip(offset, patch_shape, grid_shape, strict=True))
        if read.integers(v.HIGH_START, 3, v.HIGH_END) != last:
            read.place = at
            read.fail(f"HI with the patch's last voxel {last}")
    read.expect(v.DENSITY_BLOCK_START)
    n_density = int(np.prod(patch_shape)) * layout.tokens_per_voxel
    density = read.take(n_density, v.DENSITY_START, v.DENSITY_START + codec.n_density_tokens, "a density token")
    read.expect(v.DENSITY_BLOCK_END)
    read.expect(v.EOS)
    rest = len(read.ids) - read.place
    if np.any(read.ids[read.place :] != v.PAD):
        read.take(rest, v.PAD, v.PAD + 1, "padding")
    a, b, c = (lattice[i] * LENGTH_STEP_A for i in range(3))
    alpha, beta, gamma = (lattice[i] * ANGLE_STEP_DEGREES for i in range(3, 6))
    density = density.reshape(patch_shape if layout.tokens_per_voxel == 1 else (*patch_shape, layout.tokens_per_voxel))
    return DecodedSequence(
        grid_shape=(grid_shape[0], grid_shape[1], grid_shape[2]),
        lattice_parameters=(a, b, c, alpha, beta, gamma),
        atomic_numbers=numbers,
        frac_coords=frac_coords,
        patch_shape=(patch_shape[0], patch_shape[1], patch_shape[2]),
        offset=None if offset is None else (offset[0], offset[1], offset[2]),
        density_tokens=density,
        values=codec.decode(density, decoder),
        unit=codec.unit,
    )


def tiling_anchors(grid_shape: Sequence[int], patch_shape: Sequence[int]) -> np.ndarray:
    """First voxels, int64 [patch, 3], of patches that tile a cell; the last along a side may reach past it."""
    starts = [np.arange(0, side, step) for side, step in zip(grid_shape, patch_shape, strict=True)]
    return np.stack(np.meshgrid(*starts, indexing="ij"), axis=-1).reshape(-1, 3).astype(np.int64)
