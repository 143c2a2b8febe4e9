"""Measures one reader of `loader_readers.py` in its own process."""

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import haliax as hax
import jax
import numpy as np
import psutil
import tensorstore as ts
from levanter.data.dataset import AsyncDataset, ListAsyncDataset
from levanter.data.loader import DataLoader

from tomat.base.memory import peak_memory_bytes
from tomat.base.progress import progress
from tomat.data.tokens.shards import ShardSet, open_shards
from tomat.data.tokens.shuffle import BlockShuffleConfig, ShuffledIndex
from tomat.train.loader import ShardDataset, TokenExample, token_loader

INDEX_POSITIONS = 65_536
"""Number of positions over which the cost of an index is averaged."""


class Reader:
    """The rows of a shard set in one of three orders, through Levanter's loader.

    Args:
        order: `block_shuffle` and `in_order` are tomat's; `levanter_block_shuffle` is Levanter's, with the same blocks
            and windows, over rows that TensorStore reads with a cache as large as tomat's.
        folder: Folder of the shard set.
        batch_rows: Rows of a batch.
        io_block_size: Rows of a block.
        window_blocks: Blocks of a window.
    """

    def __init__(self, order: str, folder: Path, batch_rows: int, io_block_size: int, window_blocks: int):
        # The loader uses a CPU device. A random key would otherwise start every other installed platform.
        jax.config.update("jax_platforms", "cpu")
        # It warns about slow batches, which the report has as `slowest_later_batch_s`.
        logging.getLogger("levanter.data.loader").setLevel(logging.ERROR)
        self.shards = open_shards(folder)
        self.batch_rows = batch_rows
        self.by_levanter = order == "levanter_block_shuffle"
        self.shuffle = BlockShuffleConfig(io_block_size, window_blocks, "none" if order == "in_order" else "feistel")

    def measure(self, name: str) -> dict[str, Any]:
        """Time and memory for reading every row once. `name` is shown beside the progress."""
        # This starts JAX before memory and time are measured.
        index_us = self._index_cost_us()
        rss_before = psutil.Process().memory_info().rss
        figures = self._throughput(name)
        memory = {"rss_before_bytes": rss_before, "peak_rss_bytes": peak_memory_bytes()}
        return {**figures, "index_us": index_us, **memory}

    def first_batch_s(self, step: int) -> float:
        """Seconds from an open shard set to the first batch of a run that resumes at `step`."""
        dataset = self._dataset()
        start = time.perf_counter()
        iterator = self._loader(dataset).iter_from_step(step)
        jax.block_until_ready(next(iterator).tokens.array)
        seconds = time.perf_counter() - start
        iterator.close()
        # Levanter caches a method with the loader as its key, which would keep the blocks of each repeat in memory.
        DataLoader.compute_local_device_indices_for_bs.cache_clear()
        return seconds

    def _throughput(self, name: str) -> dict[str, float]:
        """Read all rows in batches, from the first position, and time that."""
        dataset = self._dataset()
        n_batches = self.shards.rows // self.batch_rows
        first_s = slowest_s = 0.0
        with progress(rate="{task.fields[rate]}") as bar:
            task = bar.add_task(name, total=self.shards.rows, rate="")
            start, cpu_start = time.perf_counter(), time.process_time()
            iterator = iter(self._loader(dataset))
            for k in range(n_batches):
                before = time.perf_counter()
                jax.block_until_ready(next(iterator).tokens.array)
                now = time.perf_counter()
                first_s = first_s or now - start
                slowest_s = max(slowest_s, now - before) if k else 0.0
                done = (k + 1) * self.batch_rows
                bar.update(task, completed=done, rate=f"{done / (now - start):,.0f} rows/s")
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        iterator.close()
        rows = n_batches * self.batch_rows
        return {
            "cpu_us_per_row": cpu_seconds / rows * 1e6,
            "first_batch_s": first_s,
            "rows_per_s": rows / seconds,
            "slowest_later_batch_s": slowest_s,
        }

    def _index_cost_us(self) -> float:
        """Microseconds to find the row at a position, without reading it, in calls of one batch."""
        rows, batch_rows = self.shards.rows, self.batch_rows
        index = ShuffledIndex(rows, self.shuffle, seed=0)
        levanter = self._levanter_shuffled(ListAsyncDataset(cast(list[int], range(rows))))
        calls = [
            np.arange(start, start + batch_rows)
            for start in range(0, max(min(rows, INDEX_POSITIONS) - batch_rows, 0) + 1, batch_rows)
        ]

        async def ask() -> None:
            for positions in calls:
                if self.by_levanter:
                    await levanter.get_batch(positions.tolist())
                else:
                    index(positions)

        start = time.perf_counter()
        asyncio.run(ask())
        return (time.perf_counter() - start) / (len(calls) * batch_rows) * 1e6

    def _dataset(self) -> AsyncDataset:
        dataset = ShardDataset(self.shards, self.shuffle)
        if self.by_levanter:
            return self._levanter_shuffled(_TensorstoreRows(self.shards, dataset.cache_bytes))
        return dataset

    def _levanter_shuffled(self, dataset: AsyncDataset) -> AsyncDataset:
        blocks, windows = self.shuffle.io_block_size, self.shuffle.window_blocks
        return dataset.block_shuffle(io_block_size=blocks, window_blocks=windows, key=jax.random.PRNGKey(0))

    def _loader(self, dataset: AsyncDataset) -> DataLoader[TokenExample]:
        """A loader on one CPU device, even if there are accelerators."""
        mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
        return token_loader(dataset, self.batch_rows, mesh=mesh, axis_resources={"batch": "data"})


class _TensorstoreRows(ListAsyncDataset[TokenExample]):
    """The rows of a set, each read separately through TensorStore's cache of decoded chunks."""

    def __init__(self, shards: ShardSet, cache_bytes: int):
        super().__init__(cast(list[TokenExample], range(shards.rows)))
        context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
        self._array = ts.open(shards.array.spec(), context=context, open=True, recheck_cached_data=False).result()
        self._position = hax.Axis("position", shards.context)

    async def get_batch(self, indices: Sequence[int]) -> Sequence[TokenExample]:
        rows = await asyncio.gather(*(self._array[i].read() for i in indices))
        return [TokenExample(hax.NamedArray(cast(jax.Array, row.astype(np.int32)), (self._position,))) for row in rows]
