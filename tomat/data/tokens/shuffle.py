"""The order in which a run reads the rows of a shard set: a function of seed and position, with no state.

Blocks of rows are permuted over the epoch, and the rows of a window of blocks among themselves (`train/loader.py`
says why).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.tokens.permutation import KeyedPermutation, derive_key

IN_ORDER_WINDOW_BLOCKS = 16
"""Blocks in a window when nothing is shuffled: only how far to read ahead. 16 MiB of 8,192-token rows."""


@dataclass(frozen=True)
class BlockShuffleConfig:
    """How the rows of a shard set are shuffled."""

    io_block_size: int = 64
    """Rows that are read together: the rows of a chunk of the shard set, or a multiple of them."""
    window_blocks: int = 1024
    """Blocks whose rows are permuted together. The loader holds two windows: 1,024 blocks of 64 rows of 8,192 tokens
    are 1 GiB, so 2 GiB on every host."""
    perm_type: Literal["feistel", "none", "full"] = "feistel"
    """`feistel`: blocks permuted over the epoch, rows within each window. `none`: rows in the order of the disk.
    `full`: one permutation of all rows; each row then costs the reading of its block, unless the set fits the cache."""

    def __post_init__(self) -> None:
        if self.io_block_size < 1 or self.window_blocks < 1:
            raise TomatError(
                f"shuffle.io_block_size is {self.io_block_size} and shuffle.window_blocks is {self.window_blocks}; "
                "both must be at least 1."
            )
        if self.perm_type not in ("feistel", "none", "full"):
            raise TomatError(f"shuffle.perm_type is '{self.perm_type}'; expected feistel, none or full.")


@dataclass(frozen=True)
class _Epoch:
    """The block shuffle of one epoch."""

    block_order: KeyedPermutation
    """Slot in the epoch -> block."""
    tail_slot: int
    """Slot of the block that has fewer rows than the others; one past the last slot if there is none."""
    window_rows: np.ndarray
    """int64 [windows + 1]: offset in the epoch at which each window begins; ends with the number of rows."""


class ShuffledIndex:
    """The row at every position of a run. Positions count rows since the start of the first epoch, without end.

    Each epoch is a bijection of [0, rows), the rows of a last, shorter block included, and has permutations of its own.
    With `feistel`, the blocks are dealt to ceil(blocks / window_blocks) windows whose sizes differ by at most one
    block, so that no epoch ends in a window of a few blocks with a few materials. `rows`: rows of the data set, at
    least 1.
    """

    def __init__(self, rows: int, config: BlockShuffleConfig, seed: int):
        if rows < 1:
            raise TomatError("the data set has no rows; tokenize at least one patch.")
        self.rows = rows
        self.config = config
        self.seed = seed
        self._block_rows = config.io_block_size
        self._blocks = -(-rows // self._block_rows)
        self._missing = self._blocks * self._block_rows - rows
        windows = -(-self._blocks // config.window_blocks)
        self._window_slots = np.arange(windows + 1, dtype=np.int64) * self._blocks // windows
        # Levanter asks for positions in order, so two epochs and a few windows are all that is ever live. The rows of a
        # window are kept as a table, 8 bytes a row beside 16 KiB of tokens: 9 ms for 65,536 rows once, where permuting
        # each batch of 128 by itself took 2.8 us a row in NumPy calls.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._window_rows = lru_cache(maxsize=4)(self._make_window_rows)
        self._full_order = lru_cache(maxsize=2)(self._make_full_order)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Rows at the given positions: int64 of the same shape, in [0, rows).

        Args:
            positions: integers >= 0, any shape.
        """
        positions = np.asarray(positions, dtype=np.int64)
        if positions.size and int(positions.min()) < 0:
            raise IndexError(f"positions in a run are >= 0, got {int(positions.min())}")
        epochs, offsets = np.divmod(positions, self.rows)
        if self.config.perm_type == "none":
            return offsets
        out = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            if self.config.perm_type == "full":
                out[here] = self._full_order(epoch)(offsets[here])
            else:
                out[here] = self._epoch_rows(epoch, offsets[here])
        return out

    def window_at(self, position: int) -> tuple[int, int]:
        """The positions [start, stop) that draw on the same window of blocks as `position`.

        The window of `none` is a stretch of `IN_ORDER_WINDOW_BLOCKS` blocks, that of `full` the epoch.
        """
        epoch, offset = divmod(position, self.rows)
        if self.config.perm_type == "full":
            start, stop = 0, self.rows
        elif self.config.perm_type == "none":
            stretch = IN_ORDER_WINDOW_BLOCKS * self._block_rows
            start = offset // stretch * stretch
            stop = min(start + stretch, self.rows)
        else:
            bounds = self._epoch(epoch).window_rows
            window = int(np.searchsorted(bounds, offset, side="right")) - 1
            start, stop = int(bounds[window]), int(bounds[window + 1])
        return epoch * self.rows + start, epoch * self.rows + stop

    def _epoch_rows(self, epoch: int, offsets: np.ndarray) -> np.ndarray:
        """Rows at offsets int64[k] of one epoch of the block shuffle."""
        bounds = self._epoch(epoch).window_rows
        windows = np.searchsorted(bounds, offsets, side="right") - 1
        rows = np.empty_like(offsets)
        for window in np.unique(windows).tolist():
            here = windows == window
            rows[here] = self._window_rows(epoch, window)[offsets[here] - bounds[window]]
        return rows

    def _make_window_rows(self, epoch: int, window: int) -> np.ndarray:
        """Rows int64 of one window, in the order of their positions."""
        order = self._epoch(epoch)
        size = int(order.window_rows[window + 1] - order.window_rows[window])
        places = KeyedPermutation(size, derive_key(self.seed, "window", epoch, window))(np.arange(size))
        # Number the rows as if the short block were whole: a row behind it moves up by what the block lacks.
        first_slot = self._window_slots[window]
        if order.tail_slot >= first_slot:
            tail_end = (order.tail_slot - first_slot + 1) * self._block_rows - self._missing
            places += np.where(places >= tail_end, self._missing, 0)
        slots, rows_in_block = np.divmod(places, self._block_rows)
        return order.block_order(slots + first_slot) * self._block_rows + rows_in_block

    def _make_epoch(self, epoch: int) -> _Epoch:
        block_order = KeyedPermutation(self._blocks, derive_key(self.seed, "blocks", epoch))
        bounds = self._window_slots * self._block_rows
        tail_slot = self._blocks
        if self._missing:
            tail_slot = int(block_order.inverse(np.array([self._blocks - 1]))[0])
            bounds = bounds - np.where(self._window_slots > tail_slot, self._missing, 0)
        return _Epoch(block_order, tail_slot, bounds)

    def _make_full_order(self, epoch: int) -> KeyedPermutation:
        return KeyedPermutation(self.rows, derive_key(self.seed, "full", epoch))
