"""`tomat bench loss-tiles`: tiles of the Pallas loss by the compiler's own schedule, against XLA's loss in blocks."""

import argparse
from pathlib import Path

from tomat.base.arguments import positive_float, positive_int, report_file
from tomat.base.errors import TomatError
from tomat.bench.loss import add_shape
from tomat.loss.tiles import NAMES, LossTiles

DEFAULT_TILES = ("4096,256,512,32", "4096,512,512,32", "4096,256,1024,32", "4096,512,1024,32", "4096,512,512,16")
"""Candidates where none are given, as `LossTiles` orders its sizes. 4,096 resident rows keep the traffic of the head's
gradient under the matmuls' time at widths up to 2,048 within 128 MiB of VMEM."""
DEFAULT_BLOCKS = (64, 128, 256, 512)


def register_bench(subparsers: argparse._SubParsersAction) -> None:
    """Add `loss-tiles` to the verbs of `tomat bench`."""
    parser = subparsers.add_parser(
        "loss-tiles",
        help="tune the tiles of the Pallas loss with the TPU compiler",
        description="Compile value and gradients of the loss for one chip of a slice, as XLA's loss in blocks and as "
        "the Pallas loss with different tiles, and compare the times that the compiler's schedules give. Needs "
        "libtpu, no TPU; one or more minutes a candidate. What was compiled is kept, and found again.",
    )
    parser.add_argument("--slice", default="v6e-1", help="one chip of it (default: v6e-1)")
    add_shape(parser, "cross_entropy")
    parser.add_argument(
        "--vocabulary", default="full", choices=["density", "full"], help="ids of the softmax (default: full)"
    )
    parser.add_argument(
        "--tiles",
        action="append",
        metavar=",".join(NAMES),
        help=f"a candidate; may be repeated (default: {' '.join(DEFAULT_TILES)})",
    )
    parser.add_argument(
        "--block_positions",
        type=positive_int,
        nargs="*",
        default=list(DEFAULT_BLOCKS),
        help=f"blocks of XLA's loss to compare with (default: {' '.join(map(str, DEFAULT_BLOCKS))})",
    )
    parser.add_argument("--cache_dir", type=Path, help="what was compiled before (default: ~/.cache/tomat/loss-tiles)")
    parser.add_argument(
        "--time_limit_seconds", type=positive_float, default=1800.0, help="longest compile (default: 1800)"
    )
    parser.add_argument(
        "--memory_limit_gib", type=positive_float, default=16.0, help="most memory of this machine (default: 16)"
    )
    parser.add_argument("--cache_gib", type=positive_float, default=2.0, help="what the cache may hold (default 2)")
    parser.add_argument("--write", action="store_true", help="put the best tiles into tomat's table")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.set_defaults(run=run)


def parse_tiles(text: str) -> LossTiles:
    """`4096,256,512,32` as tiles.

    Raises:
        TomatError: It is not one positive number for each size, or they do not go together.
    """
    sizes = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if len(sizes) != len(NAMES):
        raise TomatError(f"--tiles {text}: expected {len(NAMES)} positive numbers, {','.join(NAMES)}.")
    return LossTiles(*sizes)


def run(args: argparse.Namespace) -> int:
    """Compile, print and write."""
    from rich.table import Table

    from tomat.base.reporting import console, progress, write_report
    from tomat.planning.compile.process import Limits
    from tomat.planning.plan_cache import GIB
    from tomat.tuning.loss_tuning import LossShape, check_tiles, table_entry, tune, write_entry

    shape = LossShape(
        args.slice,
        args.batch,
        args.positions,
        args.hidden_dim,
        args.density_tokens,
        args.dtype,
        args.kind,
        args.vocabulary,
    )
    candidates = [parse_tiles(text) for text in args.tiles or DEFAULT_TILES]
    for candidate in candidates:
        check_tiles(candidate, shape)
    cache_dir = args.cache_dir or Path.home() / ".cache" / "tomat" / "loss-tiles"
    limits = Limits(args.time_limit_seconds, int(args.memory_limit_gib * GIB), int(args.cache_gib * GIB))
    with progress() as bar:
        task = bar.add_task("compiling", total=len(candidates) + len(args.block_positions))
        started = 0

        def on_candidate(name: str) -> None:
            nonlocal started
            bar.update(task, description=name, completed=started)
            started += 1

        rows = tune(shape, candidates, args.block_positions, cache_dir, on_candidate, limits)
        bar.update(task, completed=started)
    entry = table_entry(shape, rows) if candidates else None

    table = Table(
        title=f"{args.kind} over {shape.ids:,} ids, {args.batch} x {args.positions} positions, width "
        f"{args.hidden_dim}, {args.dtype}, one chip of {args.slice}: planned, value and gradients"
    )
    for name in ("loss", "blocks", "ms", "matrix units busy", "temporaries, GiB"):
        table.add_column(name, justify="left" if name in ("loss", "blocks") else "right")
    for row in rows:
        blocks = row.get("tiles") or {"positions": row.get("block_positions")}
        words = " x ".join(str(size) for size in blocks.values())
        if "refused" in row:
            table.add_row(row["kernel"], words, "does not compile", "", "")
            continue
        mxu = sum(kernel.get("mxu_seconds", 0.0) for kernel in row["kernels"])
        table.add_row(
            row["kernel"],
            words,
            f"{1e3 * row['seconds']:.2f}",
            f"{100 * mxu / row['seconds']:.0f} %",
            f"{row['temporary_bytes'] / 2**30:.2f}",
        )
    console.print(table)
    for reason in sorted({row["refused"] for row in rows if "refused" in row}):
        console.print(f"[dim]{reason}[/dim]", soft_wrap=True)
    write_report(args.json, {"shape": vars(shape), "candidates": rows})
    if args.write and entry is not None:
        write_entry(entry)
        console.print("The table of tiles has the shortest.")
    return 0
