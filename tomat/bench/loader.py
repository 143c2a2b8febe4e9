"""`tomat bench loader`: what a shuffled row costs, in time and memory, against reading in order and Levanter's shuffle.

Each reader runs in a process of its own, so that its peak of memory is its own, and reads the same rows through
Levanter's `DataLoader`. Nothing is trained: the figures are the most a training process could draw.
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tomat.base.arguments import positive_int, report_file
from tomat.base.errors import TomatError

if TYPE_CHECKING:
    from levanter.data.dataset import AsyncDataset

    from tomat.tokens.shards import ShardSet
    from tomat.training.loader import BlockShuffleConfig

LAYOUT_NAME = "v3-p19"
N_MATERIALS = 32
RESUME_STEPS = (10**3, 10**6, 10**9)
RESUME_REPEATS = 3
INDEX_POSITIONS = 65_536
"""Positions that the cost of an index is averaged over."""

READERS = {
    "block_shuffle": "tomat shuffled",
    "in_order": "tomat in order",
    "levanter_block_shuffle": "Levanter shuffled",
}
"""Key in the report -> name in the table."""


@dataclass(frozen=True)
class LoaderBench:
    """What is measured."""

    rows: int
    """Rows of the data set, each read once."""
    batch_rows: int
    """Rows of a batch."""
    io_block_size: int
    """Rows of a block."""
    window_blocks: int
    """Blocks of a window."""

    def __post_init__(self) -> None:
        if self.rows % N_MATERIALS or self.rows < self.batch_rows:
            raise TomatError(
                f"--rows is {self.rows}; expected a multiple of {N_MATERIALS} (patches of that many materials), and at "
                f"least one batch of {self.batch_rows}."
            )

    def shuffle(self, key: str) -> "BlockShuffleConfig":
        """How the reader `key` of tomat's own orders the rows."""
        from tomat.training.loader import BlockShuffleConfig

        return BlockShuffleConfig(self.io_block_size, self.window_blocks, "none" if key == "in_order" else "feistel")

    def levanter_shuffled(self, dataset: "AsyncDataset") -> "AsyncDataset":
        """`dataset` in the order of Levanter's shuffle, with the same blocks and windows."""
        import jax

        return dataset.block_shuffle(
            io_block_size=self.io_block_size, window_blocks=self.window_blocks, key=jax.random.PRNGKey(0)
        )


def register_bench(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `tomat bench loader`."""
    parser = subparsers.add_parser(
        "loader",
        help="shuffled loading: rows/s, microseconds an index, memory, resuming",
        description="What a shuffled row costs, in time and memory, against reading in order and against Levanter's "
        "shuffle, each in a process of its own. Nothing is trained.",
    )
    parser.add_argument(
        "--rows", type=positive_int, default=131_072, help="rows of 8,192 tokens (default 131072, 2 GiB raw)"
    )
    parser.add_argument("--batch", type=positive_int, default=128, help="rows of a batch (default 128)")
    parser.add_argument("--io_block_size", type=positive_int, default=64, help="rows of a block (default 64)")
    parser.add_argument("--window_blocks", type=positive_int, default=1024, help="blocks of a window (default 1024)")
    parser.add_argument("--data", type=Path, help="keep the data set in this folder, and use it if it is there")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `tomat bench loader`."""
    from tomat.base.reporting import console, write_report

    bench = LoaderBench(args.rows, args.batch, args.io_block_size, args.window_blocks)
    place = tempfile.TemporaryDirectory(prefix="tomat-bench-") if args.data is None else nullcontext(args.data)
    with place as folder:
        report = run_bench(bench, Path(folder))
    console.print(report_table(report))
    resumes = ", ".join(f"{r['first_batch_s']:.2f} s at step {r['step']:,}" for r in report["resume"])
    console.print(f"First batch after a resume (median of {RESUME_REPEATS}): {resumes}.")
    write_report(args.json, report)
    return 0


def run_bench(bench: LoaderBench, folder: Path) -> dict[str, Any]:
    """Write the data set to `folder` where it is not there yet, run every reader, and return the report."""
    from tomat.base.reporting import progress

    write_bench_shards(bench, folder)
    stored_bytes = sum(path.stat().st_size for path in (folder / "tokens.zarr").rglob("*") if path.is_file())
    readers: dict[str, dict[str, Any]] = {}
    with progress(rate="{task.fields[rate]}") as bar:
        for key, name in READERS.items():
            task = bar.add_task(name, total=bench.rows, rate="")

            def on_rows(rows: int, seconds: float, task=task) -> None:
                bar.update(task, completed=rows, rate=f"{rows / seconds:,.0f} rows/s")

            readers[key] = _in_own_process(key, bench, folder, on_rows)
    resume = readers["block_shuffle"].pop("resume")
    return {
        "batch_rows": bench.batch_rows,
        "context_tokens": 8192,
        "cpu_count": os.cpu_count(),
        "io_block_size_rows": bench.io_block_size,
        "layout": LAYOUT_NAME,
        "readers": readers,
        "resume": resume,
        "rows": bench.rows,
        "stored_bytes": stored_bytes,
        "window_blocks": bench.window_blocks,
    }


def report_table(report: dict[str, Any]) -> Any:
    """The report's readers as a Rich table."""
    from rich.table import Table

    table = Table(
        title=f"{report['rows']:,} rows of 8,192 tokens ({report['stored_bytes'] / 2**30:.2f} GiB stored)\n"
        f"blocks of {report['io_block_size_rows']} rows, windows of {report['window_blocks']:,} blocks, batches of "
        f"{report['batch_rows']}, {report['cpu_count']} cores"
    )
    table.add_column("")
    for name in READERS.values():
        table.add_column(name, justify="right")
    for label, figure in (
        ("rows/s", lambda r: f"{r['rows_per_s']:,.0f}"),
        ("CPU us a row", lambda r: f"{r['cpu_us_per_row']:.0f}"),
        ("us an index", lambda r: f"{r['index_us']:.2f}"),
        ("first batch, s", lambda r: f"{r['first_batch_s']:.2f}"),
        ("slowest later, s", lambda r: f"{r['slowest_later_batch_s']:.2f}"),
        ("memory, GiB", lambda r: f"{(r['peak_rss_bytes'] - r['rss_before_bytes']) / 2**30:.2f}"),
        ("peak RSS, GiB", lambda r: f"{r['peak_rss_bytes'] / 2**30:.2f}"),
    ):
        table.add_row(label, *(figure(report["readers"][key]) for key in READERS))
    return table


def write_bench_shards(bench: LoaderBench, folder: Path) -> None:
    """Tokenise patches of made-up crystals: exponential atoms at the spacing and range of values of real densities.

    Raises:
        TomatError: the folder holds another data set.
    """
    import numpy as np

    from tomat.codec.histogram import DensityHistogram
    from tomat.codec.lloyd_max import fit_lloyd_max
    from tomat.density.grid import DensityGrid
    from tomat.tokens.layouts import LAYOUTS
    from tomat.tokens.writer import write_shards

    side, spacing_a = 64, 0.065  # token-format.md: the Materials Project's grids have a spacing of about 0.064 A

    def crystal(material_id: str) -> DensityGrid:
        rng = np.random.default_rng(int(material_id.split("-")[1]))
        axis = np.arange(side) / side
        rho = np.full((side, side, side), 1e-3)
        atoms = rng.random((4, 3))
        for atom in atoms:
            nearest = [np.abs((axis - x + 0.5) % 1 - 0.5) * side * spacing_a for x in atom]
            distance_a = np.sqrt(sum(d**2 for d in np.meshgrid(*nearest, indexing="ij", sparse=True)))
            rho += rng.uniform(1, 40) * np.exp(-distance_a / rng.uniform(0.1, 0.4))
        return DensityGrid(rho, np.eye(3) * side * spacing_a, rng.integers(1, 90, 4), atoms, material_id)

    names = [f"bench-{i}" for i in range(N_MATERIALS)]
    histogram = DensityHistogram()
    for name in names:
        histogram.add(crystal(name).rho)
    write_shards(
        folder,
        names,
        crystal,
        layout=LAYOUTS[LAYOUT_NAME],
        codec=fit_lloyd_max(histogram),
        patches_per_material=bench.rows // N_MATERIALS,
        seed=0,
        split="bench",
    )


def _in_own_process(
    key: str, bench: LoaderBench, folder: Path, on_rows: Callable[[int, float], None]
) -> dict[str, Any]:
    """Run one reader in a new process; `on_rows(rows, seconds)` follows it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_reader_process, args=(key, bench, folder, there))
    process.start()
    there.close()
    try:
        while True:
            kind, content = here.recv()
            if kind == "rows":
                on_rows(*content)
            elif kind == "error":
                raise TomatError(f"the reader '{READERS[key]}' failed: {content}")
            else:
                return content
    except EOFError:
        process.join()
        raise TomatError(
            f"the reader '{READERS[key]}' ended with status {process.exitcode}; if it was killed, memory ran out: "
            "lower --window_blocks."
        ) from None
    finally:
        process.terminate()
        process.join()


def _reader_process(key: str, bench: LoaderBench, folder: Path, connection: Connection) -> None:
    try:
        connection.send(("result", _measure(key, bench, folder, connection)))
    except Exception as error:  # whatever it is, the parent reports it
        connection.send(("error", f"{type(error).__name__}: {error}"))


def _measure(key: str, bench: LoaderBench, folder: Path, connection: Connection) -> dict[str, Any]:
    """All figures of one reader."""
    import logging

    import jax

    from tomat.tokens.shards import open_shards

    # `_loader` takes a CPU device; a random key would wake every other platform that is installed.
    jax.config.update("jax_platforms", "cpu")
    # Its warnings about slow batches are the `slowest_later_batch_s` of the report.
    logging.getLogger("levanter.data.loader").setLevel(logging.ERROR)
    shards = open_shards(folder)
    # This imports everything and wakes JAX, before memory and time are looked at.
    index_us = _index_cost_us(key, bench, shards.rows)
    rss_before = _resident_bytes("VmRSS")
    figures: dict[str, Any] = dict(_throughput(bench, _dataset(key, bench, shards), connection))
    figures |= {"index_us": index_us, "rss_before_bytes": rss_before, "peak_rss_bytes": _resident_bytes("VmHWM")}
    if key == "block_shuffle":
        figures["resume"] = [
            {
                "step": step,
                "first_batch_s": statistics.median(
                    _first_batch_s(bench, _dataset(key, bench, shards), step) for _ in range(RESUME_REPEATS)
                ),
            }
            for step in RESUME_STEPS
        ]
    return figures


def _dataset(key: str, bench: LoaderBench, shards: "ShardSet") -> "AsyncDataset":
    """What a reader reads through. Levanter's shuffle stands on TensorStore with a cache as large as tomat's."""
    from tomat.training.loader import ShardDataset

    dataset = ShardDataset(shards, bench.shuffle(key))
    if key == "levanter_block_shuffle":
        return bench.levanter_shuffled(_tensorstore_rows(shards, dataset.cache_bytes))
    return dataset


def _tensorstore_rows(shards: "ShardSet", cache_bytes: int) -> "AsyncDataset":
    """The rows of the set, each read by itself through TensorStore's cache of decoded chunks."""
    import asyncio

    import haliax as hax
    import jax
    import numpy as np
    import tensorstore as ts

    from tomat.training.loader import TokenExample

    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    array = ts.open(shards.array.spec(), context=context, open=True, recheck_cached_data=False).result()
    position = hax.Axis("position", shards.context)

    async def read(indices: Sequence[int]) -> list[TokenExample]:
        rows = await asyncio.gather(*(array[i].read() for i in indices))
        return [TokenExample(hax.NamedArray(cast(jax.Array, row.astype(np.int32)), (position,))) for row in rows]

    return _dataset_of(shards.rows, read)


def _dataset_of(rows: int, read: Callable[[Sequence[int]], Awaitable[Sequence[Any]]]) -> "AsyncDataset":
    """A finite dataset whose examples come from `read(indices)`."""
    from levanter.data.dataset import AsyncDataset

    class Rows(AsyncDataset):
        def is_finite(self) -> bool:
            return True

        async def async_len(self) -> int:
            return rows

        async def get_batch(self, indices: Sequence[int]) -> Sequence[Any]:
            return await read(indices)

    return Rows()


def _loader(bench: LoaderBench, dataset: "AsyncDataset"):
    """Levanter's loader, alike for every reader, on one CPU device whatever accelerators there are."""
    import jax
    import numpy as np

    from tomat.training.loader import token_loader

    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("data",))
    return token_loader(dataset, bench.batch_rows, mesh=mesh, axis_resources={"batch": "data"})


def _throughput(bench: LoaderBench, dataset: "AsyncDataset", connection: Connection) -> dict[str, float]:
    """Read `bench.rows` rows in batches, from the first position on."""
    import jax

    start, cpu_start = time.perf_counter(), time.process_time()
    iterator = iter(_loader(bench, dataset))
    n_batches = bench.rows // bench.batch_rows
    first_s = slowest_s = last_report = 0.0
    for k in range(n_batches):
        before = time.perf_counter()
        jax.block_until_ready(next(iterator).tokens.array)
        now = time.perf_counter()
        first_s = first_s or now - start
        slowest_s = max(slowest_s, now - before) if k else 0.0
        if now - last_report > 0.2 or k == n_batches - 1:
            connection.send(("rows", ((k + 1) * bench.batch_rows, now - start)))
            last_report = now
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    iterator.close()
    rows = n_batches * bench.batch_rows
    return {
        "cpu_us_per_row": cpu_seconds / rows * 1e6,
        "first_batch_s": first_s,
        "rows_per_s": rows / seconds,
        "slowest_later_batch_s": slowest_s,
    }


def _first_batch_s(bench: LoaderBench, dataset: "AsyncDataset", step: int) -> float:
    """Seconds from an open shard set to the first batch of a run that resumes at `step`."""
    import jax
    from levanter.data.loader import DataLoader

    start = time.perf_counter()
    iterator = _loader(bench, dataset).iter_from_step(step)
    jax.block_until_ready(next(iterator).tokens.array)
    seconds = time.perf_counter() - start
    iterator.close()
    # Levanter caches a method of every loader by the loader itself, and so would keep the blocks of each repeat.
    DataLoader.compute_local_device_indices_for_bs.cache_clear()
    return seconds


def _index_cost_us(key: str, bench: LoaderBench, rows: int) -> float:
    """Microseconds to find the row at a position, in calls of one batch, without reading any."""
    import asyncio

    import numpy as np

    from tomat.training.loader import ShuffledIndex

    async def row_numbers(indices: Sequence[int]) -> Sequence[int]:
        return indices

    index = ShuffledIndex(rows, bench.shuffle(key), seed=0)
    levanter = bench.levanter_shuffled(_dataset_of(rows, row_numbers))
    calls = [
        np.arange(start, start + bench.batch_rows)
        for start in range(0, min(rows, INDEX_POSITIONS) - bench.batch_rows + 1, bench.batch_rows)
    ]

    async def ask_levanter() -> None:
        for positions in calls:
            await levanter.get_batch(positions.tolist())

    start = time.perf_counter()
    if key == "levanter_block_shuffle":
        asyncio.run(ask_levanter())
    else:
        for positions in calls:
            index(positions)
    return (time.perf_counter() - start) / (len(calls) * bench.batch_rows) * 1e6


def _resident_bytes(field: str) -> int:
    """Memory of this process from Linux's /proc: `VmRSS` now, `VmHWM` at its highest.

    Raises:
        TomatError: on a system without /proc.
    """
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise TomatError("tomat bench loader reads its memory from /proc/self/status, which only Linux has.") from None
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
