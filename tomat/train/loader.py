"""Shuffled rows of a shard set, for Levanter's `DataLoader`, with no cache to build and no state but the step number.

Rows of one material lie together on disk. Reading in order would fill a batch with one or two materials, and reading
rows at random would decode a whole block of rows for each. The block shuffle stands between: it permutes blocks of rows
over the epoch, and rows within a *window* of blocks. Every row is a function of its position in the run
(`ShuffledIndex`), so a run resumes anywhere at once. Blocks are read once an epoch, ahead of use, and the blocks of two
windows are kept: the one being consumed and the one being read.
"""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import tensorstore as ts
from haliax.partitioning import ResourceMapping
from jax.sharding import Mesh
from levanter.data.dataset import AsyncDataset
from levanter.data.loader import DataLoader

from tomat.base.errors import TomatError
from tomat.data.tokens.layouts import BlockShuffleConfig
from tomat.data.tokens.shuffle import IN_ORDER_WINDOW_BLOCKS, ShuffledIndex
from tomat.model.nearby_atoms import NearbyAtoms
from tomat.train.settings.schema import BUFFERED_BATCHES

if TYPE_CHECKING:
    from levanter.trainer import Trainer

    from tomat.data.tokens.shards import ShardSet
    from tomat.train.settings.config import TrainConfig

READ_AHEAD_BLOCKS = 32
"""Blocks being read ahead at one time, besides those that a batch waits for."""


class TokenExample(eqx.Module):
    """One sequence, or a batch of them along a leading axis."""

    tokens: hax.NamedArray
    """int32 [position]; `DataLoader` adds `batch`, and fills a short last batch with id 0, which is padding."""
    atoms: NearbyAtoms | None = None
    """The atoms near the row's voxels, for a model that reads them: `PatchAtoms`, or `ScatteredAtoms` by the layout."""


class ShardDataset(AsyncDataset[TokenExample]):
    """The rows of a shard set in shuffled order, epoch after epoch, as `TokenExample`s.

    The dataset keeps blocks, never a position: two datasets with equal arguments give equal rows at equal positions,
    whatever was read before. With several hosts, every process asks for its own rows of each batch.

    Args:
        seq_len: tokens of each row that are used, from its start; None: all of the set's context.
        epochs: passes over the set; None: without end.
        atoms: gives the atoms near a row's voxels, and the order of its tokens (None: as stored); None: the model reads
            no atoms.
    """

    def __init__(
        self,
        shards: "ShardSet",
        shuffle: BlockShuffleConfig,
        *,
        seed: int = 0,
        seq_len: int | None = None,
        epochs: int | None = None,
        verify_checksums: bool = True,
        in_memory: bool = False,
        atoms: Callable[[int], tuple[NearbyAtoms, np.ndarray | None]] | None = None,
    ):
        super().__init__()
        if shuffle.perm_type == "feistel" and shuffle.io_block_size % shards.block_rows:
            raise TomatError(
                f"shuffle.io_block_size is {shuffle.io_block_size}, but this shard set is stored in chunks of "
                f"{shards.block_rows} rows; set shuffle.io_block_size to a multiple of {shards.block_rows}."
            )
        self.index = ShuffledIndex(shards.rows, shuffle, seed)
        self.position_axis = hax.Axis("position", seq_len if seq_len is not None else shards.context)
        self.epochs = epochs
        self._atoms = atoms
        self._block_rows = shards.block_rows
        # With `full` the next blocks lie all over the set: nothing is worth reading before it is asked for.
        self._reads_ahead = shuffle.perm_type != "full"
        window_blocks = IN_ORDER_WINDOW_BLOCKS if shuffle.perm_type == "none" else shuffle.window_blocks
        chunks = -(-shards.rows // shards.block_rows)
        # Where windows do not begin with a chunk (`none`, any block size), each touches one chunk more.
        windows = 2 * (window_blocks * shuffle.io_block_size // shards.block_rows + 1)
        self._capacity_blocks = chunks if in_memory else min(chunks, windows)
        self.cache_bytes = self._capacity_blocks * shards.block_rows * shards.context * 2
        """Bytes of decoded blocks kept at most."""
        self.blocks_read = 0
        """Blocks whose reading has been started, repeats included."""
        self._read = partial(shards.read_block, verify=verify_checksums)
        self._blocks: OrderedDict[int, ts.Future] = OrderedDict()
        # Levanter reads the first example in one thread and the batches in another.
        self._lock = threading.Lock()
        self._window: tuple[int, int] | None = None
        self._rest, self._upcoming = deque[int](), deque[int]()
        self._in_flight: list[ts.Future] = []
        self._upcoming_blocks = 0

    def is_finite(self) -> bool:
        return self.epochs is not None

    async def async_len(self) -> int:
        if self.epochs is None:
            raise ValueError("this dataset repeats without end and has no length; set epochs for one that ends")
        return self.epochs * self.index.rows

    async def getitem_async(self, index: int) -> TokenExample:
        # `DataLoader` reads example 0 to learn its shape, wherever the run resumes: read nothing ahead for that.
        return (await self._examples([index], read_ahead=False))[0]

    async def get_batch(self, indices: Sequence[int]) -> Sequence[TokenExample]:
        """Examples at the given positions of the run. A position below 0 or beyond the last epoch is an IndexError."""
        return await self._examples(indices, read_ahead=self._reads_ahead)

    async def _examples(self, indices: Sequence[int], read_ahead: bool) -> list[TokenExample]:
        positions = np.asarray(indices, dtype=np.int64)
        if positions.size == 0:
            return []
        if self.epochs is not None and int(positions.max()) >= self.epochs * self.index.rows:
            raise IndexError(f"position {int(positions.max())} is past the run of {self.epochs * self.index.rows} rows")
        set_rows = self.index(positions)
        blocks, rows = np.divmod(set_rows, self._block_rows)
        distinct, group = np.unique(blocks, return_inverse=True)
        wanted = np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
        tokens = np.empty((positions.size, self.position_axis.size), dtype=np.int32)
        # No more blocks at a time than the cache holds, so that the limit on memory holds for any batch.
        for first in range(0, distinct.size, self._capacity_blocks):
            last = min(first + self._capacity_blocks, distinct.size)
            with self._lock:
                reads = [self._block(block) for block in distinct[first:last].tolist()]
            for block, read, group in zip(distinct[first:last].tolist(), reads, wanted[first:last], strict=True):
                try:
                    block_tokens = read.result() if read.done() else await read
                except BaseException:
                    with self._lock:
                        self._blocks.pop(block, None)  # read anew when it is next asked for
                    raise
                tokens[group] = block_tokens[rows[group], : tokens.shape[1]]
        if read_ahead:
            with self._lock:
                self._start_reading_ahead(int(positions.max()))
        # The rows stay NumPy arrays, which Levanter stacks on the host: a device array for each would cost a transfer.
        return [self._example(ids, row) for ids, row in zip(tokens, set_rows.tolist(), strict=True)]

    def _example(self, ids: np.ndarray, row: int) -> TokenExample:
        atoms, order = (None, None) if self._atoms is None else self._atoms(row)
        ids = ids if order is None else ids[order]
        return TokenExample(hax.NamedArray(cast(jax.Array, ids), (self.position_axis,)), atoms)

    def _block(self, block: int) -> ts.Future:
        """The block's rows, uint16 [block_rows, context]; reading starts now unless it has been started before."""
        if block not in self._blocks:
            self._blocks[block] = self._read(block)
            self.blocks_read += 1
            if len(self._blocks) > self._capacity_blocks:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(block)
        return self._blocks[block]

    def _start_reading_ahead(self, position: int) -> None:
        """Start reading what the rows after `position` need: the rest of their window and a share of the next one."""
        start, stop = self.index.window_at(position)
        if self._window != (start, stop):
            self._window = (start, stop)
            self._rest = deque(self._blocks_in_order_of_use(position + 1, stop))
            self._upcoming.clear()
            if self.epochs is None or stop < self.epochs * self.index.rows:
                self._upcoming.extend(self._blocks_in_order_of_use(stop, self.index.window_at(stop)[1]))
            self._upcoming_blocks = len(self._upcoming)
        # The next window comes in step with the consumption of this one: no burst, and whole when its first row is due.
        left = self._upcoming_blocks * (stop - 1 - position) // (stop - start)
        # After a start or a resume much is missing at once. It goes out a few blocks at a time, or the next batch's own
        # reads would queue behind all of it. In a run's normal course the rest of the window is cached.
        self._in_flight = [read for read in self._in_flight if not read.done()]
        for queue, left_in_queue in ((self._rest, 0), (self._upcoming, left)):
            while len(queue) > left_in_queue and len(self._in_flight) < READ_AHEAD_BLOCKS:
                read = self._block(queue.popleft())
                if not read.done():
                    self._in_flight.append(read)

    def _blocks_in_order_of_use(self, start: int, stop: int) -> list[int]:
        """Blocks that hold the rows at positions [start, stop), each once, the one needed first in front."""
        blocks = self.index(np.arange(start, stop)) // self._block_rows
        distinct, first_use = np.unique(blocks, return_index=True)
        return distinct[np.argsort(first_use)].tolist()


def token_loader(
    dataset: AsyncDataset[TokenExample],
    batch_size: int,
    *,
    mesh: Mesh,
    axis_resources: ResourceMapping,
    buffered_batches: int = BUFFERED_BATCHES,
) -> DataLoader[TokenExample]:
    """Levanter's `DataLoader` over a `ShardDataset` or a view of one; `iter_from_step(step)` begins at any step.

    `Trainer.data_loader` asks the dataset for 32 batches at once: the first batch after a start or a resume would wait
    for 32, which draw on nearly every block of a window. Here it waits for the blocks of one batch. Make a loader once
    and iterate it again: Levanter keeps every `DataLoader`, and with it the dataset's blocks, until the process ends.

    `batch_size` is in sequences a step over all processes, `axis_resources` is the trainer's `compute_axis_mapping`,
    and `buffered_batches` are made ahead of the step that uses them (4 MiB each for 128 x 8,192 tokens). A batch that
    the devices cannot share evenly is a ValueError.
    """
    make = partial(DataLoader, dataset, batch_size, max_buffered_batches=buffered_batches, fetch_batch_size=1)
    return make(mesh=mesh, axis_resources=axis_resources)


def training_loader(
    config: "TrainConfig", trainer: "Trainer", rows: AsyncDataset[TokenExample]
) -> DataLoader[TokenExample]:
    return token_loader(
        rows,
        config.batch_size,
        mesh=trainer.device_mesh,
        axis_resources=trainer.compute_axis_mapping,
        buffered_batches=config.data.prefetch_batches,
    )
