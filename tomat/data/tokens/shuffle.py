"""The order in which a run reads the rows of a shard set: a function of seed and position, with no state, so that a run
resumes at any step. Blocks of rows are permuted over the epoch, and the rows of a window of blocks among themselves
(`train/loader.py` says why).

Permutations of [0, n) are keyed and computed where they are asked for. Two constructions, chosen by n alone, both from
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. Up to `TABLE_SIZE`, where Feistel networks
are weakest, a table ("prefix cipher"): positions sorted by 64 random bits each, a uniformly random permutation (two
equal words have probability below n^2 / 2^65 = 3e-14). Beyond, an alternating Feistel network on [0, a) x [0, b) with
a = ceil(sqrt n), b = ceil(n / a) and modular addition ("generalised-Feistel cipher"), walked along its cycle until it
lands below n ("cycle-walking cipher"): fewer than one walk in sqrt(n) takes a second step, since a * b - n < a. The
round function is the SplitMix64 finaliser (Steele, Lea, Flood, OOPSLA 2014; constants of Stafford's variant 13) of the
other half and a 64-bit round key.

Only what NumPy guarantees to be stable is used (the raw words of Philox, integer arithmetic), so a run resumed under
another NumPy sees the same data; `Generator.permutation` gives no such guarantee (NEP 19).
"""

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.tokens.layouts import BlockShuffleConfig

TABLE_SIZE = 1024
"""Largest n that is served from a table: 8 KiB and about 0.1 ms to build."""

N_ROUNDS = 10
"""Feistel rounds, as in FF1 (NIST SP 800-38G)."""

_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFT_30, _SHIFT_27, _SHIFT_32 = np.uint64(30), np.uint64(27), np.uint64(32)

_STRIP = 8192
"""Elements worked on at a time, so that the temporaries of a round (64 KiB each) stay in the second-level cache."""


def derive_key(seed: int, *context: str | int) -> int:
    """A key in [0, 2**128) for one purpose of one run: BLAKE2b of the JSON of `[seed, *context]`."""
    text = json.dumps([int(seed), *context], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


class KeyedPermutation:
    """A bijection of [0, n) chosen by a key. ValueError: n or key out of range; IndexError: an index outside [0, n)."""

    def __init__(self, n: int, key: int):
        if not 1 <= n < 2**63:
            raise ValueError(f"a permutation needs 1 <= n < 2**63, got n = {n}")
        if not 0 <= key < 2**128:
            raise ValueError(f"a permutation key is an integer in [0, 2**128), got {key}; make one with derive_key")
        self.n = n
        words = np.random.Philox(key=key)
        self._table: np.ndarray | None = None
        self._inverse_table: np.ndarray | None = None
        if n <= TABLE_SIZE:
            self._table = np.argsort(np.asarray(words.random_raw(n)), kind="stable").astype(np.int64)
            self._inverse_table = np.argsort(self._table, kind="stable").astype(np.int64)
            return
        root = math.isqrt(n - 1) + 1
        self._left_size = np.uint64(root)
        self._right_size = np.uint64(-(-n // root))
        self._round_keys = np.asarray(words.random_raw(N_ROUNDS), dtype=np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Image of every index: int64 of the same shape. `indices`: integers in [0, n), any shape."""
        return self._map(indices, self._table, inverse=False)

    def inverse(self, images: np.ndarray) -> np.ndarray:
        """The indices that `__call__` sends to `images`: `p.inverse(p(i)) == i`. Same arguments, errors and cost."""
        return self._map(images, self._inverse_table, inverse=True)

    def _map(self, indices: np.ndarray, table: np.ndarray | None, inverse: bool) -> np.ndarray:
        indices = np.asarray(indices)
        if indices.size and (int(indices.min()) < 0 or int(indices.max()) >= self.n):
            found = f"{int(indices.min())} to {int(indices.max())}"
            raise IndexError(f"indices of this permutation lie in [0, {self.n}), got {found}")
        if table is not None:
            return table[indices.astype(np.int64)]
        flat = indices.astype(np.uint64).ravel()
        tables = self._round_tables if flat.size > int(self._left_size) else None
        out = np.empty(flat.shape, dtype=np.int64)
        for start in range(0, flat.size, _STRIP):
            strip = flat[start : start + _STRIP]
            image = self._network(strip, inverse, tables)
            outside = np.flatnonzero(image >= np.uint64(self.n))
            while outside.size:
                image[outside] = self._network(image[outside], inverse, tables)
                outside = outside[image[outside] >= np.uint64(self.n)]
            out[start : start + _STRIP] = image
        return out.reshape(indices.shape)

    @cached_property
    def _round_tables(self) -> list[np.ndarray]:
        """The function of each round at all of its some sqrt(n) arguments, uint64. For more indices than that, a round
        is one look-up per index (in 11 KiB for n of 2 million) in place of eight operations."""
        tables = []
        for r, key in enumerate(self._round_keys):
            size, values = (self._left_size, self._right_size)[:: 1 if r % 2 == 0 else -1]
            table = np.arange(values, dtype=np.uint64)
            _round_function(table.copy(), key, size, table, np.empty_like(table))
            tables.append(table)
        return tables

    def _network(self, x: np.ndarray, inverse: bool, tables: list[np.ndarray] | None) -> np.ndarray:
        """One pass of the network over uint64[k] in [0, a * b); the result lies there too."""
        halves = list(np.divmod(x, self._right_size))
        sizes = (self._left_size, self._right_size)
        mixed, wrapped = np.empty_like(x), np.empty_like(x)
        for r in reversed(range(N_ROUNDS)) if inverse else range(N_ROUNDS):
            target, other, size = halves[r % 2], halves[1 - r % 2], sizes[r % 2]
            if tables is None:
                _round_function(other, self._round_keys[r], size, mixed, wrapped)
            else:
                np.take(tables[r], other.view(np.int64), out=mixed, mode="wrap")
            # One of the sum (difference) and the same moved by size lies in [0, size). It is the smaller one: the other
            # has wrapped past 2**64 or is too large by size.
            if inverse:
                np.subtract(target, mixed, out=target)
                np.add(target, size, out=wrapped)
            else:
                np.add(target, mixed, out=target)
                np.subtract(target, size, out=wrapped)
            np.minimum(target, wrapped, out=target)
        left, right = halves
        left *= self._right_size
        left += right
        return left


def _round_function(half: np.ndarray, key: np.uint64, size: np.uint64, out: np.ndarray, scratch: np.ndarray) -> None:
    """Write a pseudo-random function of `half` and `key`, uniform on [0, size), to `out`: the top 32 bits h of the
    mixed word give h * size >> 32 (Lemire, "Fast Random Integer Generation in an Interval", 2019). size <= 2**32, so
    the product fits 64 bits; its bias is below size / 2**32."""
    np.bitwise_xor(half, key, out=out)
    np.right_shift(out, _SHIFT_30, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MIX_1, out=out)
    np.right_shift(out, _SHIFT_27, out=scratch)
    np.bitwise_xor(out, scratch, out=out)
    np.multiply(out, _MIX_2, out=out)
    # SplitMix64's last step, z ^= z >> 31, is left out: of the 32 bits used here it would change the lowest alone.
    np.right_shift(out, _SHIFT_32, out=out)
    np.multiply(out, size, out=out)
    np.right_shift(out, _SHIFT_32, out=out)


IN_ORDER_WINDOW_BLOCKS = 16
"""Blocks in a window when nothing is shuffled: only how far to read ahead. 16 MiB of 8,192-token rows."""


@dataclass(frozen=True)
class _Epoch:
    block_order: KeyedPermutation
    """Slot in the epoch -> block."""
    tail_slot: int
    """Slot of the block that has fewer rows than the others; one past the last slot if there is none."""
    window_rows: np.ndarray
    """int64 [windows + 1]: offset in the epoch at which each window begins; ends with the number of rows."""


class ShuffledIndex:
    """The row at every position of a run. Positions count rows since the start of the first epoch, without end.

    Each epoch is a bijection of [0, rows) with permutations of its own. With `feistel`, the blocks are dealt to
    ceil(blocks / window_blocks) windows whose sizes differ by at most one block, so that none has only a few materials.
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
        # Levanter asks for positions in order, so only two epochs and a few windows are ever live. The rows of a window
        # are kept as a table, 8 bytes per row beside 16 KiB of tokens. It takes 9 ms for 65,536 rows once; permuting
        # each batch of 128 by itself took 2.8 us per row in NumPy calls.
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._window_rows = lru_cache(maxsize=4)(self._make_window_rows)
        self._full_order = lru_cache(maxsize=2)(lambda epoch: KeyedPermutation(rows, derive_key(seed, "full", epoch)))

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Rows at the given positions: int64 of the same shape, in [0, rows)."""
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
        """The positions [start, stop) that draw on the same window of blocks as `position`; with `full` the epoch's."""
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
