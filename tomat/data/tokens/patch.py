"""A patch of a density, with its cell and atoms, as a sequence of tokens, and back; and in words.

Voxels run z fastest. Version 3 moves the atoms so that the patch's first voxel is the origin; version 2 leaves them and
says where the patch lies: OFFSET is its first voxel, HI its last, both wrapped into the cell.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import NoReturn

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import counted
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.relative import UNIT_RATIO, CellCodec, cell_codec, relative_to, wrapped
from tomat.data.density.elements import symbol_of
from tomat.data.density.geometry import lattice_parameters
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.layouts import PatchShape, SequenceLayout
from tomat.data.tokens.vocabulary import TOKENS_PER_COORDINATE, decode_positions, encode_positions

LENGTH_STEP_A = 0.05
"""Step of the lattice lengths a, b, c, in angstrom: 0.05 to 51.15 fit the integers 1 to 1023."""
ANGLE_STEP_DEGREES = 0.2
"""Step of the lattice angles, in degrees: below 180 needs integers to 900."""


def check_encodable(grid: DensityGrid, layout: SequenceLayout, codec: DensityCodec) -> PatchShape:
    """Check that patches of `grid` can be written in `layout`, and return the shape of the patch, in voxels."""
    check_codec(layout, codec)
    check_cell_encodable(grid.material_id, grid.grid_shape, grid.lattice, grid.atomic_numbers, layout)
    return layout.patch_shape(len(grid.atomic_numbers))


def check_cell_encodable(
    name: str, grid_shape: Sequence[int], lattice: np.ndarray, atomic_numbers: np.ndarray, layout: SequenceLayout
) -> None:
    """Check that a cell can be written in `layout`, whatever the values of its density."""
    _element_ids(name, atomic_numbers)
    if not layout.is_scattered:
        _grid_and_lattice_integers(name, grid_shape, lattice)
        layout.patch_shape(len(atomic_numbers))
    elif prod(int(side) for side in grid_shape) < 2:
        said = f"{_named(name)} has a grid of one voxel, which gives only its mean density"
        raise TomatError(f"{said}; expected two or more. Use a finer grid, or leave this material out.")


def _named(name: str) -> str:
    return f"Material {name}" if name else "The material"


def check_codec(layout: SequenceLayout, codec: DensityCodec) -> None:
    """Refuse a codec with other tokens per voxel than the layout writes, or with more ids than the vocabulary holds."""
    v.Vocabulary(codec.n_density_tokens)
    if codec.tokens_per_voxel != layout.tokens_per_voxel:
        raise TomatError(
            f"Layout {layout.name} writes {counted(layout.tokens_per_voxel, 'token')} a voxel, the codec makes "
            f"{codec.tokens_per_voxel}. Layout v2-p14 goes with the two-token codec, all others with Lloyd-Max codecs."
        )


def _grid_and_lattice_integers(
    name: str, grid_shape: Sequence[int], lattice: np.ndarray
) -> tuple[list[int], list[int]]:
    shape = [int(side) for side in grid_shape]
    if max(shape) >= v.N_INTEGERS:
        most = f"at most {v.N_INTEGERS - 1} a side can be written. Use a coarser grid, or leave this material out"
        raise TomatError(f"{_named(name)} has a grid of {' x '.join(map(str, shape))} voxels; {most}.")
    parameters = [float(value) for value in lattice_parameters(lattice)]
    steps = [LENGTH_STEP_A] * 3 + [ANGLE_STEP_DEGREES] * 3
    integers = [round(value / step) for value, step in zip(parameters, steps, strict=True)]
    if not all(1 <= value < v.N_INTEGERS for value in integers):
        found = f"lattice {', '.join(f'{p:.2f}' for p in parameters)} (A, degrees)"
        most = f"{LENGTH_STEP_A * (v.N_INTEGERS - 1):.2f} A"
        raise TomatError(
            f"{_named(name)} has the {found}; expected lengths of {LENGTH_STEP_A} to {most}. Leave this material out."
        )
    return shape, integers


def _element_ids(name: str, atomic_numbers: np.ndarray) -> np.ndarray:
    numbers = np.asarray(atomic_numbers, dtype=np.int64)
    bad = numbers[(numbers < 1) | (numbers > v.N_ELEMENTS)]
    if bad.size:
        raise TomatError(f"{_named(name)} has an atom of Z = {bad[0]}; the vocabulary has Z = 1 to {v.N_ELEMENTS}.")
    return numbers - 1 + v.ELEMENT_START


def encode_rows(grid: DensityGrid, anchors: np.ndarray, layout: SequenceLayout, codec: DensityCodec) -> np.ndarray:
    """One sequence for each anchor: uint16 [n, context]. `anchors`: int [n, 3], first voxel of each patch, wrapped into
    the cell."""
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
    cell = cell_codec(codec, grid)
    whole = cell.encode(grid.rho) if n_rows * n_voxels >= grid.rho.size else None
    for row, anchor in zip(rows, anchors, strict=True):
        if whole is None:
            rho = np.ascontiguousarray(wrapped(grid.rho, anchor, patch_shape))
            ids = cell.patches(anchor[None], patch_shape).encode(rho[None])
        else:
            ids = wrapped(whole, anchor, patch_shape)
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
    grid_shape: tuple[int, int, int]
    lattice_parameters: tuple[float, float, float, float, float, float]
    """a, b, c in angstrom, in steps of 0.05; alpha, beta, gamma in degrees, in steps of 0.2."""
    atomic_numbers: np.ndarray
    frac_coords: np.ndarray
    """float64 [n_atoms, 3], in [0, 1): relative to the patch's first voxel in version 3, to the cell in version 2."""
    patch_shape: PatchShape
    offset: tuple[int, int, int] | None
    """First voxel of the patch in version 2; version 3 does not tell."""
    density_tokens: np.ndarray
    """int64 [px, py, pz], or [px, py, pz, 2] for two tokens a voxel: ids of the codec, starting from 0."""
    values: np.ndarray
    """float32 [px, py, pz]: the decoded density, in `unit`."""
    unit: str
    """Unit of `values`: the codec's, or `UNIT_RATIO` for a relative codec without its scale. The volume in
    `rho_times_volume` is of the density's own cell; the lattice here is rounded."""


class _Reader:
    """Takes blocks off a sequence and refuses anything that is not as the layout writes it."""

    def __init__(self, ids: np.ndarray, layout: SequenceLayout) -> None:
        self.ids = np.asarray(ids).astype(np.int64)
        self.layout = layout
        self.place = 0

    def fail(self, expected: str) -> NoReturn:
        found = self.ids[self.place] if self.place < len(self.ids) else "the end"
        raise TomatError(
            f"The sequence is not {self.layout.version}: position {self.place} has {found}, expected {expected}. Is it "
            "damaged, or from another layout or codec?"
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

    def block(
        self,
        start: int,
        count: int | None,
        low: int = v.INTEGER_START,
        high: int = v.POSITION_START,
        what: str = "an integer",
    ) -> np.ndarray:
        """The ids of a block, less `low`. A block ends with the id `start` + 1. `count` None: all ids before that."""
        self.expect(start)
        if count is None:
            ends = np.flatnonzero(self.ids[self.place :] == start + 1)
            if not ends.size:
                self.fail(f"a block closed by {v.SPECIAL_NAMES[start + 1]} ({start + 1})")
            count = int(ends[0])
        values = self.take(count, low, high, what)
        self.expect(start + 1)
        return values

    def triple(self, start: int) -> tuple[int, int, int]:
        x, y, z = self.block(start, 3).tolist()
        return x, y, z


def decode_sequence(
    ids: np.ndarray, layout: SequenceLayout, codec: DensityCodec, scale: np.ndarray | None = None
) -> DecodedSequence:
    """Read a sequence back, exactly except for lattice steps and the codec's bins; padding may be cut off. `scale`: the
    scale of a relative codec in the patch, float32 [px, py, pz], for which the rounded structure is too coarse."""
    check_codec(layout, codec)
    read = _Reader(ids, layout)
    read.expect(v.BOS)
    grid_shape = read.triple(v.GRID_START)
    if min(grid_shape) < 1:
        raise TomatError(f"The sequence is damaged: it has a grid of {' x '.join(map(str, grid_shape))} voxels.")
    a, b, c, alpha, beta, gamma = read.block(v.LATTICE_START, 6).tolist()
    lengths = (a * LENGTH_STEP_A, b * LENGTH_STEP_A, c * LENGTH_STEP_A)
    angles = (alpha * ANGLE_STEP_DEGREES, beta * ANGLE_STEP_DEGREES, gamma * ANGLE_STEP_DEGREES)
    numbers = read.block(v.ATOMS_START, None, v.ELEMENT_START, v.INTEGER_START, "an element") + 1
    n_ids = len(numbers) * 3 * TOKENS_PER_COORDINATE
    positions = read.block(v.POSITIONS_START, n_ids, v.POSITION_START, v.DENSITY_START, "a coordinate")
    frac_coords = decode_positions(positions.reshape(len(numbers), 3, TOKENS_PER_COORDINATE))
    patch_shape = layout.default_shape
    if layout.version == "v2" or read.next_is(v.SHAPE_START):
        patch_shape = read.triple(v.SHAPE_START)
    offset = None
    if layout.version == "v2":
        offset = read.triple(v.OFFSET_START)
        at = read.place
        last = tuple((o + p - 1) % n for o, p, n in zip(offset, patch_shape, grid_shape, strict=True))
        if read.triple(v.HIGH_START) != last:
            read.place = at
            read.fail(f"HI with the patch's last voxel {last}")
    n_density = prod(patch_shape) * layout.tokens_per_voxel
    end = v.DENSITY_START + codec.n_density_tokens
    density = read.block(v.DENSITY_BLOCK_START, n_density, v.DENSITY_START, end, "a density token")
    read.expect(v.EOS)
    read.take(len(read.ids) - read.place, v.PAD, v.PAD + 1, "padding")
    density = density.reshape(patch_shape if layout.tokens_per_voxel == 1 else (*patch_shape, layout.tokens_per_voxel))
    values, unit = codec.decode(density), codec.unit
    if relative_to(codec) is not None:
        values, unit = (values, UNIT_RATIO) if scale is None else (CellCodec(codec, 1.0, scale).density(values), unit)
    return DecodedSequence(
        grid_shape=grid_shape,
        lattice_parameters=(*lengths, *angles),
        atomic_numbers=numbers,
        frac_coords=frac_coords,
        patch_shape=patch_shape,
        offset=offset,
        density_tokens=density,
        values=values,
        unit=unit,
    )


def tiling_anchors(grid_shape: Sequence[int], patch_shape: Sequence[int]) -> np.ndarray:
    """First voxels, int64 [patch, 3], of patches that tile a cell; the last along a side may reach past it."""
    starts = [np.arange(0, side, step) for side, step in zip(grid_shape, patch_shape, strict=True)]
    return np.stack(np.meshgrid(*starts, indexing="ij"), axis=-1).reshape(-1, 3).astype(np.int64)


UNIT_WORDS = {
    "e_per_A3": "e/Å³",
    "rho_times_volume": "e (density x cell volume)",
    UNIT_RATIO: "of the sum of atoms",
}


def token_runs(ids: np.ndarray, vocabulary: v.Vocabulary) -> Iterator[tuple[int, list[str]]]:
    """The tokens by name, one block at a time, with the place of its first token."""
    start, names = 0, []
    for place, token in enumerate(np.asarray(ids).tolist()):
        name = vocabulary.name(token)
        opens = (name in v.SPECIAL_NAMES and not name.startswith("/") and name != "PAD") or (
            name == "PAD" and names[-1:] != ["PAD"]
        )
        if opens and names:
            yield start, names
            start, names = place, []
        names.append(name)
    if names:
        yield start, names


def humanise(
    ids: np.ndarray,
    layout: SequenceLayout,
    codec: DensityCodec,
    first_voxels: int = 8,
    scale: np.ndarray | None = None,
) -> list[str]:
    """A sequence in words; `scale` as for `decode_sequence`."""
    read = decode_sequence(ids, layout, codec, scale=scale)
    where = "" if read.offset is None else f", first voxel {_triple(read.offset)}"
    n_padding = int(np.count_nonzero(np.asarray(ids) == v.PAD))
    a, b, c, alpha, beta, gamma = read.lattice_parameters
    padding_percent = 100 * n_padding / len(ids)
    lines = [
        f"layout   {layout.name}: {len(ids):,} tokens, {n_padding:,} of them padding ({padding_percent:.1f} %)",
        f"cell     a {a:.2f}  b {b:.2f}  c {c:.2f} A, alpha {alpha:.1f}  beta {beta:.1f}  gamma {gamma:.1f} degrees",
        f"grid     {_triple(read.grid_shape)} voxels",
        f"atoms    {len(read.atomic_numbers)}, at fractions of the cell from the "
        + ("patch's first voxel" if read.offset is None else "cell's origin"),
        *(
            f"         {symbol_of(int(number)):<2}  {x:.5f}  {y:.5f}  {z:.5f}"
            for number, (x, y, z) in zip(read.atomic_numbers, read.frac_coords, strict=True)
        ),
        f"patch    {_triple(read.patch_shape)} voxels{where}",
    ]
    unit = UNIT_WORDS[read.unit]
    low, mean, high = read.values.min(), read.values.mean(dtype=np.float64), read.values.max()
    lines.append(f"density  min {low:.4g}, mean {mean:.4g}, max {high:.4g} {unit}")
    tokens = read.density_tokens.reshape(-1, layout.tokens_per_voxel)[:first_voxels]
    for k, (token, value) in enumerate(zip(tokens, read.values.reshape(-1), strict=False)):
        voxel = np.unravel_index(k, read.patch_shape)
        names = " ".join(f"rho {part}" for part in token)
        lines.append(f"         voxel {_triple([int(i) for i in voxel], ' ')}  {names}  = {value:.5g} {unit}")
    if read.values.size > first_voxels:
        lines.append(f"         and {read.values.size - first_voxels:,} more, z fastest")
    return lines


def _triple(values: Sequence[int], separator: str = " x ") -> str:
    return separator.join(str(value) for value in values)
