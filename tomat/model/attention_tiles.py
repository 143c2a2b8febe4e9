"""The table of tuned sizes of the kernels that hold a head in VMEM. No JAX here.

`attention_tiles.json`, written by `tomat bench attention-tiles`, has for each chip, number of positions, head size and
compute type the sizes with the shortest planned time, that time, those of the others, and the compiler.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, TypedDict

from msgspec import Meta

from tomat.base.records import Positive, read_typed

TABLE_FILE = Path(__file__).with_name("attention_tiles.json")


class Sizes(TypedDict):
    """Of an entry; `WholeHeadConfig` says what each is."""

    block: Positive
    rows: Positive
    block_bwd: Positive
    keys_bwd: Positive


NAMES = tuple(Sizes.__annotations__)


@dataclass(frozen=True)
class TunedSizes:
    positions: Positive
    head_size: Positive
    tiles: Sizes

    def distance(self, positions: int, head_size: int) -> float:
        """How far another head is: factors between positions and between head sizes, as logarithms."""
        return abs(math.log(self.positions / positions)) + abs(math.log(self.head_size / head_size))


@dataclass(frozen=True)
class _Table:
    entries: Annotated[tuple[TunedSizes, ...], Meta(min_length=1)]


@lru_cache
def load_table(path: Path = TABLE_FILE) -> tuple[TunedSizes, ...]:
    remedy = "Write it with `tomat bench attention-tiles`, or set every size of model.whole_head."
    return read_typed(path, _Table, remedy).entries


def tuned_sizes(positions: int, head_size: int, table: tuple[TunedSizes, ...] | None = None) -> dict[str, int]:
    """The sizes of the entry with the nearest number of positions and head size, whatever its chip and type."""
    sizes = min(table or load_table(), key=lambda entry: entry.distance(positions, head_size)).tiles
    return {name: sizes[name] for name in NAMES}
