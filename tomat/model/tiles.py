"""Tiles of the Pallas loss, what a configuration may set of them; and the tables of tuned tiles of that and of the
kernels that hold a head in VMEM. No JAX here.

`loss/loss_tiles.json` and `attention_tiles.json`, written by `tomat bench loss-tiles` and `attention-tiles`, have for
each chip, shape and compute type the tiles with the shortest planned time, that time, those of the others, and the
compiler.
"""

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, TypedDict

from msgspec import Meta

from tomat.base.config_keys import key
from tomat.base.errors import TomatError
from tomat.base.records import Positive, read_typed

LANES = 128
"""Lanes of a TPU vector register (`NUM_LANES` in JAX's splash kernel): ids of a tile are a multiple of it."""
PACKED_ROWS = 16
"""Rows of a bfloat16 register tile (two rows in each of 8 sublanes): rows of a block are a multiple of it."""
VMEM_BYTES = {"TPU v4": 16 * 2**20, "TPU v5 lite": 128 * 2**20, "TPU v5": 64 * 2**20, "TPU v6 lite": 128 * 2**20}
"""VMEM of a core by JAX's name of the device (`vmem_capacity_bytes` in jax 0.11.1's `tpu_info.py`)."""
VMEM_SHARE = 0.8
"""Share of VMEM that the kernels' blocks may take; the rest is for the products on their way and what is spilled."""
SPARE_VMEM = 16 * 2**20
"""VMEM that is granted on top of the blocks, bytes. What is not asked for stays with XLA, which keeps other arrays
there."""


@dataclass(frozen=True)
class LossTiles:
    """Tiles of the Pallas loss. They change the speed, not (beyond rounding) the values. None: from the table of tuned
    tiles."""

    resident_rows: int | None = key(None, free="rounding")
    """Positions (of all sequences on a device) that are worked on between two passes over the head: their hidden
    states and gradients stay in VMEM meanwhile. A multiple of `block_rows`."""
    block_rows: int | None = key(None, free="rounding")
    """Positions of one matrix product; a multiple of 16."""
    block_ids: int | None = key(None, free="rounding")
    """Ids of one matrix product; a multiple of 128."""
    chunk_rows: int | None = key(None, free="rounding")
    """Positions whose softmax sums are held in registers at one time; a multiple of 16 that divides `block_rows`."""

    def __post_init__(self) -> None:
        for name, unit in zip(LOSS_NAMES, (PACKED_ROWS, PACKED_ROWS, LANES, PACKED_ROWS), strict=True):
            size = getattr(self, name)
            if size is not None and (size < unit or size % unit):
                raise TomatError(f"loss.tiles.{name} is {size}; expected a positive multiple of {unit}.")
        for outer, inner in (("resident_rows", "block_rows"), ("block_rows", "chunk_rows")):
            large, small = getattr(self, outer), getattr(self, inner)
            if large is not None and small is not None and large % small:
                said = f"loss.tiles.{outer} is {large} and {inner} is {small}"
                raise TomatError(f"{said}; expected {outer} to be a multiple of {inner}.")

    def filled(self, tuned: "LossTiles") -> "LossTiles":
        mine = {name: size for name, size in asdict(self).items() if size is not None}
        return LossTiles(**asdict(tuned) | mine)


LOSS_NAMES = tuple(field.name for field in fields(LossTiles))


@dataclass(frozen=True)
class TunedTiles:
    """An entry of the table of the loss."""

    FILE: ClassVar = Path(__file__).parent / "loss/loss_tiles.json"
    REMEDY: ClassVar = "Write it with `tomat bench loss-tiles`, or set every size of loss.tiles."

    device_kind: str
    width: int
    ids: int
    dtype: str
    tiles: LossTiles


class Sizes(TypedDict):
    """Of the kernels that hold a head; `WholeHeadConfig` says what each is."""

    block: Positive
    rows: Positive
    block_bwd: Positive
    keys_bwd: Positive


HEAD_NAMES = tuple(Sizes.__annotations__)


@dataclass(frozen=True)
class TunedSizes:
    """An entry of the table of the kernels that hold a head."""

    FILE: ClassVar = Path(__file__).with_name("attention_tiles.json")
    REMEDY: ClassVar = "Write it with `tomat bench attention-tiles`, or set every size of model.whole_head."

    positions: Positive
    head_size: Positive
    tiles: Sizes


@dataclass(frozen=True)
class _Table[T]:
    entries: Annotated[tuple[T, ...], Meta(min_length=1)]


@lru_cache
def load_table[T: (TunedTiles, TunedSizes)](kind: type[T], path: Path | None = None) -> tuple[T, ...]:
    return read_typed(path or kind.FILE, _Table[kind], kind.REMEDY).entries


def _apart(*sizes: tuple[int, int]) -> float:
    """How far two shapes are from each other: factors between their sizes, as logarithms."""
    return sum(abs(math.log(one / other)) for one, other in sizes)


def tuned_tiles(
    device_kind: str, width: int, ids: int, dtype: str, table: tuple[TunedTiles, ...] | None = None
) -> LossTiles:
    """The tiles of the nearest entry: of this chip (JAX's name of it) and compute type where there is one, then by
    width and number of ids."""

    def distance(entry: TunedTiles) -> tuple[bool, bool, float]:
        apart = _apart((entry.width, width), (entry.ids, ids))
        return entry.device_kind != device_kind, entry.dtype != dtype, apart

    return min(table or load_table(TunedTiles), key=distance).tiles


def tuned_sizes(positions: int, head_size: int, table: tuple[TunedSizes, ...] | None = None) -> dict[str, int]:
    """The sizes of the entry with the nearest number of positions and head size, whatever its chip and type."""

    def distance(entry: TunedSizes) -> float:
        return _apart((entry.positions, positions), (entry.head_size, head_size))

    sizes = min(table or load_table(TunedSizes), key=distance).tiles
    return {name: sizes[name] for name in HEAD_NAMES}


def vmem_bytes(tiles: LossTiles, rows: int, width: int, itemsize: int, n_statistics: int) -> int:
    """VMEM of the blocks of the larger of the two kernels, bytes, for so many rows resident: fewer than
    `tiles.resident_rows` where a device has fewer."""
    block_rows, block_ids = tiles.block_rows or 0, tiles.block_ids or 0
    lanes = 4 * LANES * rows
    logits = 2 * 4 * block_rows * block_ids
    head = 2 * itemsize * block_ids * width
    statistics = lanes * (1 + 2 * n_statistics) + itemsize * rows * width + head + logits
    by_head = 4 * 4 * block_ids * width
    gradients = lanes + (4 + 2 * itemsize) * rows * width + head + by_head + logits + itemsize * block_rows * block_ids
    return max(statistics, gradients)


def check_vmem(tiles: LossTiles, rows: int, width: int, itemsize: int, n_statistics: int, device_kind: str) -> int:
    """VMEM to ask for, bytes, where the tiles fit."""
    capacity = VMEM_BYTES.get(device_kind, max(VMEM_BYTES.values()))
    needed = vmem_bytes(tiles, rows, width, itemsize, n_statistics)
    if needed > VMEM_SHARE * capacity:
        raise TomatError(
            f"the tiles of the Pallas loss need {needed / 2**20:.0f} MiB of VMEM at a width of {width} "
            f"({', '.join(f'{name} {getattr(tiles, name)}' for name in LOSS_NAMES)}); {device_kind} has "
            f"{capacity / 2**20:.0f} MiB, of which {VMEM_SHARE * capacity / 2**20:.0f} may be used. Set a smaller "
            "loss.tiles.resident_rows or loss.tiles.block_ids, or loss.kernel: xla."
        )
    return needed + SPARE_VMEM
