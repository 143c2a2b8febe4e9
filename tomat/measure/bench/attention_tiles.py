"""`tomat bench attention-tiles`: sizes of the attention kernels by the compiler's own schedule."""

import argparse

from rich.table import Table

from tomat.base.errors import TomatError
from tomat.measure.bench.tile_candidates import compiled, report
from tomat.model.attention_tiles import NAMES
from tomat.model.whole_head import WholeHeadConfig
from tomat.perf.tuning.attention_tuning import AttentionShape, attention_seconds, table_entry, tune, write_entry


def parse_sizes(text: str) -> list[int]:
    """`1024,512,1024,512` as sizes of the kernels that hold a head in VMEM.

    Raises:
        TomatError: It is not one positive number for each size.
    """
    sizes = [int(word) for word in text.split(",") if word.strip().isdigit()]
    if len(sizes) != len(NAMES) or min(sizes) < 1:
        raise TomatError(f"--tiles {text}: expected {len(NAMES)} positive numbers, {','.join(NAMES)}.")
    return sizes


def run(args: argparse.Namespace) -> int:
    """Compile, print and write."""
    if args.hidden_dim % args.num_heads or args.num_heads % args.num_kv_heads:
        raise TomatError(
            f"--hidden_dim {args.hidden_dim} --num_heads {args.num_heads} --num_kv_heads {args.num_kv_heads}: expected "
            "the width to be a multiple of the heads, and the heads of those of the keys."
        )
    shape = AttentionShape(
        args.slice, args.batch, args.positions, args.hidden_dim, args.num_heads, args.num_kv_heads, args.dtype
    )
    tiles = [parse_sizes(text) for text in args.tiles or args.default_tiles]
    for sizes in tiles:  # what the model refuses should not cost a compile
        block, rows, block_bwd, keys_bwd = sizes
        WholeHeadConfig(block, rows, block_bwd, keys_bwd)
    planned = compiled(
        args, len(tiles) + len(args.splash_blocks), lambda *more: tune(shape, args.splash_blocks, tiles, *more)
    )
    entry = table_entry(shape, planned) if tiles else None

    table = Table(
        title=f"{args.num_heads} heads of {shape.head_size}, {args.num_kv_heads} of keys, {args.batch} x "
        f"{args.positions} positions, {args.dtype}, one chip of {args.slice}: planned, forward and backward"
    )
    columns = ("kernel", "sizes", "forward, ms", "backward, ms", "norms and rest, ms", "sum, ms", "temporaries, GiB")
    for name in columns:
        table.add_column(name, justify="left" if name in columns[:2] else "right")
    for row in planned:
        words = " x ".join(str(size) for size in row["tiles"].values())
        if "refused" in row:
            table.add_row(row["kernel"], words, "does not compile", *[""] * 4)
            continue
        passes = [row["categories"].get(f"attention {name}", 0.0) for name in ("forward", "backward")]
        total = attention_seconds(row)
        seconds = (*passes, total - sum(passes), total)
        figures = (f"{1e3 * value:.2f}" for value in seconds)
        table.add_row(row["kernel"], words, *figures, f"{row['temporary_bytes'] / 2**30:.2f}")
    report(args, table, shape, planned, entry, write_entry)
    return 0
