"""`tomat bench loss-tiles`: tiles of the Pallas loss by the compiler's own schedule, against XLA's loss in blocks."""

import argparse

from rich.table import Table

from tomat.base.errors import TomatError
from tomat.measure.bench.tile_candidates import compiled, report
from tomat.model.loss.config import LossConfig
from tomat.model.loss.tiles import NAMES, LossTiles
from tomat.perf.tuning.loss_tuning import LossShape, table_entry, tune, write_entry


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
    candidates = [parse_tiles(text) for text in args.tiles or args.default_tiles]
    for candidate in candidates:  # what the loss refuses should not cost a compile
        LossConfig(kind=args.kind, vocabulary=args.vocabulary, kernel="pallas", tiles=candidate)
    rows = compiled(
        args,
        len(candidates) + len(args.block_positions),
        lambda *more: tune(shape, candidates, args.block_positions, *more),
    )
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
    report(args, table, shape, rows, entry, write_entry)
    return 0
