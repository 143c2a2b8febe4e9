"""Compares the time and memory of reading shuffled rows with reading in order and with Levanter's shuffle.

Each reader runs in its own process, so that its peak memory is its own, and reads the same rows through Levanter's
`DataLoader`. Nothing is trained: the figures are an upper bound for the rate of a training process.
"""

import argparse
import os
import statistics
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from own_process import in_own_process
from rich.table import Table

from tomat.app.cli import main
from tomat.base.arguments import Parser, add_flag, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_report
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.ratios import fit_codec
from tomat.data.density.demo.embedded import demo_materials, load_demo
from tomat.data.tokens.layouts import LAYOUTS
from tomat.data.tokens.pipeline.driver import write_shards

LAYOUT_NAME = "v3-p19"
N_MATERIALS = 32
RESUME_STEPS = (10**3, 10**6, 10**9)
RESUME_REPEATS = 3

READERS = {
    "block_shuffle": "tomat shuffled",
    "in_order": "tomat in order",
    "levanter_block_shuffle": "Levanter shuffled",
}
"""Key in the report -> name in the table."""


def build_parser() -> Parser:
    """The argument parser of this script."""
    parser = Parser(
        description="What a shuffled row costs, in time and memory, against reading in order and against Levanter's "
        "shuffle, each in a process of its own. Nothing is trained.",
    )
    add_flag(parser, "--rows", 131_072, "rows of 8,192 tokens, 16 KiB each", type=positive_int)
    add_flag(parser, "--batch", 128, "rows of a batch", type=positive_int)
    add_flag(parser, "--io_block_size", 64, "rows of a block", type=positive_int)
    add_flag(parser, "--window_blocks", 1024, "blocks of a window", type=positive_int)
    parser.add_argument("--data", type=Path, help="keep the data set in this folder, and use it if it is there")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the data set if it is missing, run every reader, print and write the figures.

    Raises:
        TomatError: the rows are not a whole number of patches of each material, or fewer than a batch.
    """
    if args.rows % N_MATERIALS or args.rows < args.batch:
        raise TomatError(
            f"--rows is {args.rows}; expected a multiple of {N_MATERIALS} (patches of that many materials), and at "
            f"least one batch of {args.batch}."
        )
    place = tempfile.TemporaryDirectory(prefix="tomat-bench-") if args.data is None else nullcontext(args.data)
    with place as name:
        folder = Path(name)
        write_bench_shards(args.rows, folder)
        stored_bytes = sum(path.stat().st_size for path in (folder / "tokens.zarr").rglob("*") if path.is_file())
        readers = {}
        for key, reader in READERS.items():
            measured = partial(_measure, key, folder, args.batch, args.io_block_size, args.window_blocks)
            readers[key] = in_own_process(measured, f"the reader '{reader}'", "lower --window_blocks")
    resume = readers["block_shuffle"].pop("resume")
    report = {
        "batch_rows": args.batch,
        "context_tokens": LAYOUTS[LAYOUT_NAME].context,
        "cpu_count": os.cpu_count(),
        "io_block_size_rows": args.io_block_size,
        "layout": LAYOUT_NAME,
        "readers": readers,
        "resume": resume,
        "rows": args.rows,
        "stored_bytes": stored_bytes,
        "window_blocks": args.window_blocks,
    }
    console.print(report_table(report))
    resumes = ", ".join(f"{r['first_batch_s']:.2f} s at step {r['step']:,}" for r in resume)
    console.print(f"First batch after a resume (median of {RESUME_REPEATS}): {resumes}.")
    write_report(args.json, report)
    return 0


def report_table(report: dict[str, Any]) -> Table:
    """The report's readers as a Rich table."""
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


def write_bench_shards(rows: int, folder: Path) -> None:
    """Tokenise `rows` patches of embedded densities.

    Raises:
        TomatError: the folder holds another data set.
    """
    names = [material.material_id for material in demo_materials("train")[:N_MATERIALS]]
    histogram = DensityHistogram()
    for name in names:
        histogram.add(load_demo(name).rho)
    write_shards(
        folder,
        names,
        load_demo,
        layout=LAYOUTS[LAYOUT_NAME],
        codec=fit_codec(histogram),
        patches_per_material=rows // N_MATERIALS,
        seed=0,
        split="bench",
    )


def _measure(key: str, folder: Path, batch_rows: int, io_block_size: int, window_blocks: int) -> dict[str, Any]:
    """All figures of one reader, measured in this process."""
    from loader_readers_measure import Reader  # imports JAX and Levanter, which the parent process does not need

    reader = Reader(key, folder, batch_rows, io_block_size, window_blocks)
    figures = reader.measure(READERS[key])
    if key == "block_shuffle":
        figures["resume"] = [
            {
                "step": step,
                "first_batch_s": statistics.median(reader.first_batch_s(step) for _ in range(RESUME_REPEATS)),
            }
            for step in RESUME_STEPS
        ]
    return figures


if __name__ == "__main__":
    sys.exit(main(parser=build_parser()))
