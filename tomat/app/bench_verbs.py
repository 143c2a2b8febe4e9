"""`tomat bench`: measurements that need no accelerator, and measurements of this machine's accelerator (`chip`)."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from tomat.base.arguments import add_flag, add_report, output_file, positive_float, positive_int
from tomat.model.loss.config import LOSS_KINDS
from tomat.model.tiles import LOSS_NAMES

MODULES = {
    "loss-tiles": "tomat.measure.bench.tiles",
    "attention-tiles": "tomat.measure.bench.tiles",
    "chip": "tomat.measure.bench.chip",
}
"""Benchmark -> its module. `run(args)` measures, prints, writes figures to `args.json` and returns an exit status."""

STUDIES = {
    "tokenize": "profiling/tokenize_speed.py",
    "tokenise": "profiling/tokenize_speed.py",
    "decode": "profiling/decode_speed.py",
    "numerics": "profiling/numerics.py",
    "profile": "profiling/parse_speed.py",
    "loader": "profiling/loader_readers.py",
    "loss": "profiling/loss_memory.py",
    "preemption": "profiling/preemption_soak.py",
    "levanter": "profiling/beside_levanter.py",
    "scf-savings": "profiling/scf_savings.py",
}
"""Former benchmark -> the script that replaces it."""

DEFAULT_TILES = ("4096,256,512,32", "4096,512,512,32", "4096,256,1024,32", "4096,512,1024,32", "4096,512,512,16")
"""Default candidates, with sizes in the order of `LossTiles`. With 4,096 resident rows, the traffic of the head's
gradient takes less time than the matmuls, at widths up to 2,048 within 128 MiB of VMEM."""

DEFAULT_ATTENTION_TILES = ("1024,512,1024,512", "1024,256,1024,256", "2048,512,2048,512", "2048,256,1024,512")
"""Default candidates: sizes of `model.whole_head`."""


def register(subparsers: argparse._SubParsersAction) -> None:
    whole = subparsers.add_parser("bench", help="measure parts of tomat on this machine")
    whole.moved = {name: f"`python {script}` in a checkout of tomat" for name, script in STUDIES.items()}
    benches = whole.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True, dest="benchmark")

    parser = benches.add_parser(
        "loss-tiles",
        help="tune the tiles of the Pallas loss with the TPU compiler",
        description="Compile value and gradients of the loss for one chip of a slice, as XLA's loss in blocks and as "
        "the Pallas loss with different tiles, and compare the times that the compiler's schedules give. Needs "
        "libtpu but no TPU; takes a minute or more per candidate. Compiled programs are cached.",
    )
    add_flag(parser, "--kind", "cross_entropy", "formula of the loss", choices=LOSS_KINDS)
    add_flag(parser, "--density_tokens", 16384, "density bins", type=positive_int)
    add_flag(parser, "--vocabulary", "full", "ids of the softmax", choices=["density", "full"])
    blocks = "blocks of XLA's loss to compare with"
    add_flag(parser, "--block_positions", [64, 128, 256, 512], blocks, type=positive_int, nargs="*")
    _add_tuning(parser, "loss-tiles", DEFAULT_TILES, ",".join(LOSS_NAMES))

    parser = benches.add_parser(
        "attention-tiles",
        help="tune the sizes of the attention kernels with the TPU compiler",
        description="Compile one attention layer, forward and backward, for one chip of a slice, with JAX's splash "
        "kernels and with different sizes of tomat's kernels, which hold a head in VMEM, and compare the times that "
        "the compiler's schedules give. Needs libtpu but no TPU; takes one to three minutes per candidate. Compiled "
        "programs are cached.",
    )
    add_flag(parser, "--num_heads", 4, "heads of the queries", type=positive_int)
    add_flag(parser, "--num_kv_heads", 4, "heads of keys and values", type=positive_int)
    blocks = "tiles of the splash kernels to compare with"
    add_flag(parser, "--splash_blocks", [1024], blocks, type=positive_int, nargs="*")
    _add_tuning(parser, "attention-tiles", DEFAULT_ATTENTION_TILES, "BLOCK,ROWS,BLOCK_BWD,KEYS_BWD")

    parser = benches.add_parser(
        "chip",
        help="time kernels and collectives on this machine's TPU or GPU, as a record to calibrate plans with",
        description="Time matmuls, fusions, copies and attention kernels on one device and collectives over all, in "
        "about ten minutes. The kernels go into a CSV that `tomat plan --calibrate --kernels` takes, the rest into a "
        "JSON beside it. Kernels that the CSV already has for this chip and these versions are not timed again: the "
        "same command goes on where it was stopped. On a slice of several hosts, start it on all of them.",
    )
    add_flag(parser, "--output", Path("chip-timings.csv"), "the timed kernels", type=output_file, metavar="FILE.csv")
    add_flag(parser, "--minutes", 10.0, "begin no further kernel after this many minutes", type=positive_float)
    parser.add_argument("--quick", action="store_true", help="small sizes only (always on a CPU)")

    for bench in benches.choices.values():
        add_report(bench, "write the figures to FILE", run=run)


def run(args: argparse.Namespace) -> int:
    return importlib.import_module(MODULES[args.benchmark]).run(args)


def _add_tuning(parser: argparse.ArgumentParser, name: str, tiles: Sequence[str], sizes: str) -> None:
    add_flag(parser, "--slice", "v6e-1", "compile for one chip of it")
    add_flag(parser, "--batch", 8, "sequences on the chip", type=positive_int)
    add_flag(parser, "--positions", 8192, "tokens of a sequence", type=positive_int)
    add_flag(parser, "--hidden_dim", 1024, "width of the model", type=positive_int)
    add_flag(parser, "--dtype", "bfloat16", "compute type", choices=["bfloat16", "float32"])
    text = f"a candidate; may be repeated (default: {' '.join(tiles)})"
    parser.add_argument("--tiles", action="append", metavar=sizes, help=text)
    parser.set_defaults(default_tiles=tiles)  # "append" would add given tiles to a default of --tiles
    parser.add_argument("--cache_dir", type=Path, help=f"folder of compiled programs (default: ~/.cache/tomat/{name})")
    add_flag(parser, "--time_limit_seconds", 1800.0, "longest compile", type=positive_float)
    add_flag(parser, "--memory_limit_gib", 16.0, "most memory to use on this machine", type=positive_float)
    add_flag(parser, "--cache_gib", 2.0, "largest size of the cache", type=positive_float)
    parser.add_argument("--write", action="store_true", help="put the best tiles into tomat's table")
