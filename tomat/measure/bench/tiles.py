"""`tomat bench loss-tiles` and `attention-tiles`: compare kernel tiles with each other, and with XLA's loss or JAX's
splash kernels, by the compiler's own schedule."""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.base.report.model import Column, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import console, write_report
from tomat.model.loss.config import LossConfig
from tomat.model.tiles import HEAD_NAMES, LOSS_NAMES, LossTiles, WholeHeadConfig
from tomat.perf.plan.compile.process import Limits
from tomat.perf.plan.plan_cache import GIB
from tomat.perf.tuning.tile_tuning import (
    AttentionShape,
    Candidate,
    LossShape,
    sizes_text,
    table_entry,
    tune,
    write_entry,
)


def parse_tiles(text: str, names: Sequence[str]) -> dict[str, int]:
    """Parse `4096,256,512,32` as sizes, one for each of `names`."""
    words = text.split(",")
    sizes = [int(word) for word in words if word.strip().isdecimal()]
    if not len(sizes) == len(words) == len(names) or min(sizes) < 1:
        raise TomatError(f"--tiles {text}: expected {len(names)} positive numbers, {','.join(names)}.")
    return dict(zip(names, sizes, strict=True))


def run(args: argparse.Namespace) -> int:
    """Plan the candidates, print them and the reasons why some were refused, and write the requested outputs."""
    shape, candidates, caption, headings, figures = (_loss if args.benchmark == "loss-tiles" else _attention)(args)
    cache_dir = args.cache_dir or Path.home() / ".cache" / "tomat" / args.benchmark
    limits = Limits(args.time_limit_seconds, int(args.memory_limit_gib * GIB), int(args.cache_gib * GIB))
    rows = tune(shape, candidates, cache_dir, limits)
    # With `--write`, `table_entry` raises an error if there is no tuned candidate to write.
    entry = table_entry(shape, rows) if args.write or any(row["kernel"] == shape.KERNEL for row in rows) else None
    made = []
    for row in rows:
        cells = ["does not compile", *[""] * (len(headings) - 2)]
        if "refused" not in row:
            cells = [*figures(row), f"{row['temporary_bytes'] / GIB:.2f}"]
        made.append([row["kernel"], sizes_text(row), *cells])
    columns = [Column(name, right=place > 1) for place, name in enumerate((*headings, "temporaries, GiB"))]
    show(Table(f"{caption}, {args.dtype}, one chip of {args.slice}: planned", columns, made))
    for reason in sorted({row["refused"] for row in rows if "refused" in row}):
        console.print(reason, style="dim", soft_wrap=True)
    write_report(args.json, {"shape": vars(shape), "candidates": rows})
    if args.write and entry is not None:
        write_entry(shape, entry)
        show(f"The table of {args.benchmark.replace('-', ' ')} now has the fastest.")
    return 0


type Question = tuple[
    LossShape | AttentionShape, list[Candidate], str, Sequence[str], Callable[[Mapping[str, Any]], Iterable[str]]
]
"""What is planned (shape, candidates), and its table: caption, first headings, and the cells of a row below them."""


def _loss(args: argparse.Namespace) -> Question:
    sizes = args.slice, args.batch, args.positions, args.hidden_dim, args.density_tokens
    shape = LossShape(*sizes, args.dtype, args.kind, args.vocabulary)
    candidates: list[Candidate] = [{"kernel": "xla", "block_positions": block} for block in args.block_positions]
    for text in args.tiles or args.default_tiles:
        tiles = parse_tiles(text, LOSS_NAMES)
        # Raises an error for tiles that the loss refuses, before they cost a compile.
        LossConfig(kind=args.kind, vocabulary=args.vocabulary, kernel="pallas", tiles=LossTiles(**tiles))
        candidates.append({"kernel": "pallas", "tiles": tiles})

    def figures(row: Mapping[str, Any]) -> Iterable[str]:
        mxu = sum(kernel.get("mxu_seconds", 0.0) for kernel in row["kernels"])
        return f"{1e3 * row['seconds']:.2f}", f"{100 * mxu / row['seconds']:.0f} %"

    caption = f"{args.kind} over {shape.ids:,} ids, value and gradients, {args.batch} x {args.positions} positions"
    headings = "loss", "blocks", "ms", "matrix units busy"
    return shape, candidates, f"{caption}, width {args.hidden_dim}", headings, figures


def _attention(args: argparse.Namespace) -> Question:
    if args.hidden_dim % args.num_heads or args.num_heads % args.num_kv_heads:
        raise TomatError(
            f"--hidden_dim {args.hidden_dim} --num_heads {args.num_heads} --num_kv_heads {args.num_kv_heads}: expected "
            "--hidden_dim to be a multiple of --num_heads, and --num_heads of --num_kv_heads."
        )
    sizes = args.slice, args.batch, args.positions, args.hidden_dim, args.num_heads, args.num_kv_heads
    shape = AttentionShape(*sizes, args.dtype)
    candidates: list[Candidate] = [{"kernel": "splash", "tiles": {"block": block}} for block in args.splash_blocks]
    for text in args.tiles or args.default_tiles:
        tiles = parse_tiles(text, HEAD_NAMES)
        block, rows, block_bwd, keys_bwd = tiles.values()
        WholeHeadConfig(block, rows, block_bwd, keys_bwd)  # refuses bad sizes before they cost a compile
        candidates.append({"kernel": "whole_head", "tiles": tiles})

    def figures(row: Mapping[str, Any]) -> Iterable[str]:
        passes = [row["categories"].get(f"attention {name}", 0.0) for name in ("forward", "backward")]
        total = shape.seconds(row)
        return (f"{1e3 * value:.2f}" for value in (*passes, total - sum(passes), total))

    caption = f"{args.num_heads} heads of {shape.head_size}, {args.num_kv_heads} of keys, forward and backward"
    headings = "kernel", "sizes", "forward, ms", "backward, ms", "norms and rest, ms", "sum, ms"
    return shape, candidates, f"{caption}, {args.batch} x {args.positions} positions", headings, figures
