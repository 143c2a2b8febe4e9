"""The table of tuned sizes of the kernels that hold a head in VMEM. No JAX here.

`attention_tiles.json` beside this module is the table, written by `tomat bench attention-tiles`: for each chip, number
of positions, head size and compute type the sizes with the shortest planned time, that time, those of the others, and
the compiler.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tomat.base.documents import load_entries

NAMES = ("block", "rows", "block_bwd", "keys_bwd")
"""Sizes of an entry; `WholeHeadConfig` says what each is."""

TABLE_FILE = Path(__file__).with_name("attention_tiles.json")


class TunedSizes(NamedTuple):
    """One entry of the table."""

    positions: int
    head_size: int
    sizes: Mapping[str, int]

    def distance(self, positions: int, head_size: int) -> float:
        """How far another head is: factors between positions and between head sizes, as logarithms."""
        return abs(math.log(self.positions / positions)) + abs(math.log(self.head_size / head_size))


@lru_cache
def load_table(path: Path = TABLE_FILE) -> tuple[TunedSizes, ...]:
    """The table of tuned sizes."""

    def entry(row: Mapping[str, Any]) -> TunedSizes:
        return TunedSizes(row["positions"], row["head_size"], {name: int(row["tiles"][name]) for name in NAMES})

    keys = [f"model.whole_head.{name}" for name in NAMES]
    return load_entries(path, entry, name="attention tiles", verb="tomat bench attention-tiles", keys=keys)


def tuned_sizes(positions: int, head_size: int, table: tuple[TunedSizes, ...] | None = None) -> Mapping[str, int]:
    """The sizes of the entry with the nearest number of positions and head size, whatever its chip and type."""
    entries = load_table() if table is None else table
    return min(entries, key=lambda entry: entry.distance(positions, head_size)).sizes
