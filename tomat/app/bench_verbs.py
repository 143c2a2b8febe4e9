"""`tomat bench`: measurements that need no accelerator, and those of the accelerator that is there (`chip`)."""

import argparse
import datetime
import importlib
from pathlib import Path
from typing import Any

from tomat.base.arguments import (
    Parser,
    config_file,
    count,
    output_file,
    positive_float,
    positive_int,
    report_file,
    run_folder,
)
from tomat.loss.config import LOSS_KINDS, LossConfig
from tomat.loss.tiles import NAMES

type Benches = argparse._SubParsersAction[Parser]

MODULES = {
    "tokenise": "tomat.bench.tokenise",
    "loader": "tomat.bench.loader",
    "loss": "tomat.bench.loss",
    "preemption": "tomat.bench.preemption",
    "loss-tiles": "tomat.bench.loss_tiles",
    "attention-tiles": "tomat.bench.attention_tiles",
    "chip": "tomat.bench.chip",
    "numerics": "tomat.bench.numerics.bench",
    "decode": "tomat.bench.decode",
    "levanter": "tomat.bench.levanter",
    "scf-savings": "tomat.bench.scf_savings",
}
"""Benchmark -> the module whose `run(args)` measures, prints, writes the figures to `args.json`; returns a status."""

STUDIES = {
    "profile": "profiling/parse_speed.py",
}
"""Benchmark of before -> the study that it has become."""

DEFAULT_TILES = ("4096,256,512,32", "4096,512,512,32", "4096,256,1024,32", "4096,512,1024,32", "4096,512,512,16")
"""Candidates where none are given, as `LossTiles` orders its sizes. 4,096 resident rows keep the traffic of the head's
gradient under the matmuls' time at widths up to 2,048 within 128 MiB of VMEM."""

DEFAULT_ATTENTION_TILES = ("1024,512,1024,512", "1024,256,1024,256", "2048,512,2048,512", "2048,256,1024,512")
"""Candidates where none are given: sizes of `model.whole_head`."""


def register(subparsers: Benches) -> None:
    """Add `tomat bench`."""
    parser = subparsers.add_parser("bench", help="measure parts of tomat on this machine")
    benches = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True, dest="benchmark")
    parser.moved = {name: f"`python {script}` in a checkout of tomat" for name, script in STUDIES.items()}
    flags = (
        _add_tokenise,
        _add_loader,
        _add_loss,
        _add_preemption,
        _add_loss_tiles,
        _add_attention_tiles,
        _add_chip,
        _add_numerics,
        _add_decode,
        _add_levanter,
        _add_scf_savings,
    )
    for add in flags:
        add(benches)
    for bench in benches.choices.values():
        bench.add_argument("--json", type=report_file, metavar="FILE", help="write the figures to FILE")
        bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out one benchmark."""
    return importlib.import_module(MODULES[args.benchmark]).run(args)


def _flag(parser: argparse.ArgumentParser, name: str, default: Any, text: str, **options: Any) -> None:
    """Add a flag whose help ends with its default; `options` are those of `add_argument`."""
    parser.add_argument(name, default=default, help=f"{text} (default: %(default)s)", **options)


def _add_tokenise(benches: Benches) -> None:
    parser = benches.add_parser(
        "tokenise",
        help="speed, memory and restarts of re-tokenising",
        description="Patches and voxels a second of re-tokenising, by one worker and by two, the memory of a worker, "
        "and whether killed runs end with the same bytes.",
    )
    _flag(parser, "--materials", 24, "grids of 100^3", type=count)
    _flag(parser, "--rounds", 4, "turns of one worker and of two", type=positive_int)
    parser.add_argument("--largest", action="store_true", help="also the memory of a worker on 448 x 448 x 110")
    _flag(parser, "--kill_runs", 0, "runs killed at random moments", type=count, metavar="N")
    _flag(parser, "--seed", 0, "of the moments", type=count)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")


def _add_loader(benches: Benches) -> None:
    parser = benches.add_parser(
        "loader",
        help="shuffled loading: rows/s, microseconds an index, memory, resuming",
        description="What a shuffled row costs, in time and memory, against reading in order and against Levanter's "
        "shuffle, each in a process of its own. Nothing is trained.",
    )
    _flag(parser, "--rows", 131_072, "rows of 8,192 tokens, 16 KiB each", type=positive_int)
    _flag(parser, "--batch", 128, "rows of a batch", type=positive_int)
    _flag(parser, "--io_block_size", 64, "rows of a block", type=positive_int)
    _flag(parser, "--window_blocks", 1024, "blocks of a window", type=positive_int)
    parser.add_argument("--data", type=Path, help="keep the data set in this folder, and use it if it is there")


def _add_loss(benches: Benches) -> None:
    parser = benches.add_parser(
        "loss",
        help="compiled memory of the blocked loss against the plain formulas",
        description="Compile value and gradient of the loss for this machine's JAX backend, without running them, and "
        "report the temporary memory of the blocked loss and of the plain formulas.",
    )
    _add_loss_shape(parser, "emd")
    _flag(parser, "--block_positions", LossConfig().block_positions, "positions of a block", type=positive_int)


def _add_loss_shape(parser: argparse.ArgumentParser, kind: str) -> None:
    """Add what decides the arrays of a loss and its formula, which is `kind` by default."""
    _flag(parser, "--kind", kind, "the formula", choices=LOSS_KINDS)
    _flag(parser, "--batch", 8, "sequences on one device", type=positive_int)
    _flag(parser, "--positions", 8192, "tokens per sequence", type=positive_int)
    _flag(parser, "--hidden_dim", 1024, "width of the model", type=positive_int)
    _flag(parser, "--density_tokens", 16384, "density bins", type=positive_int)
    _flag(parser, "--dtype", "bfloat16", "compute type", choices=["bfloat16", "float32"])


def _add_preemption(benches: Benches) -> None:
    parser = benches.add_parser(
        "preemption",
        help="kill a run at random moments; weights and log against an unbroken run",
        description="Kill a small run at random and at chosen moments, start it again each time, and compare weights "
        "and log of every round with those of a run that nothing interrupted.",
    )
    _flag(parser, "--kills", 30, "kills that must hit", type=positive_int)
    _flag(parser, "--seed", 0, "of the moments", type=count)
    parser.add_argument("--folder", type=Path, help="keep everything here; the same command goes on where it stopped")


def _add_loss_tiles(benches: Benches) -> None:
    parser = benches.add_parser(
        "loss-tiles",
        help="tune the tiles of the Pallas loss with the TPU compiler",
        description="Compile value and gradients of the loss for one chip of a slice, as XLA's loss in blocks and as "
        "the Pallas loss with different tiles, and compare the times that the compiler's schedules give. Needs "
        "libtpu, no TPU; one or more minutes a candidate. What was compiled is kept, and found again.",
    )
    _flag(parser, "--slice", "v6e-1", "one chip of it")
    _add_loss_shape(parser, "cross_entropy")
    _flag(parser, "--vocabulary", "full", "ids of the softmax", choices=["density", "full"])
    parser.add_argument(
        "--tiles",
        action="append",
        metavar=",".join(NAMES),
        help=f"a candidate; may be repeated (default: {' '.join(DEFAULT_TILES)})",
    )
    parser.set_defaults(default_tiles=DEFAULT_TILES)  # as the default of --tiles, it would be added to
    blocks = "blocks of XLA's loss to compare with"
    _flag(parser, "--block_positions", [64, 128, 256, 512], blocks, type=positive_int, nargs="*")
    _add_compiling(parser, "loss-tiles")


def _add_compiling(parser: argparse.ArgumentParser, name: str) -> None:
    """Cache and limits of the candidates of a tuning, and whether its best goes into the table."""
    parser.add_argument("--cache_dir", type=Path, help=f"what was compiled before (default: ~/.cache/tomat/{name})")
    _flag(parser, "--time_limit_seconds", 1800.0, "longest compile", type=positive_float)
    _flag(parser, "--memory_limit_gib", 16.0, "most memory of this machine", type=positive_float)
    _flag(parser, "--cache_gib", 2.0, "what the cache may hold", type=positive_float)
    parser.add_argument("--write", action="store_true", help="put the best tiles into tomat's table")


def _add_attention_tiles(benches: Benches) -> None:
    parser = benches.add_parser(
        "attention-tiles",
        help="tune the sizes of the attention kernels with the TPU compiler",
        description="Compile one attention layer, forward and backward, for one chip of a slice, with JAX's splash "
        "kernels and with tomat's, which hold a head in VMEM, in different sizes, and compare the times that the "
        "compiler's schedules give. Needs libtpu, no TPU; one to three minutes a candidate. What was compiled is kept, "
        "and found again.",
    )
    _flag(parser, "--slice", "v6e-1", "one chip of it")
    _flag(parser, "--batch", 8, "sequences on the chip", type=positive_int)
    _flag(parser, "--positions", 8192, "tokens of a sequence", type=positive_int)
    _flag(parser, "--hidden_dim", 1024, "width of the model", type=positive_int)
    _flag(parser, "--num_heads", 4, "heads of the queries", type=positive_int)
    _flag(parser, "--num_kv_heads", 4, "heads of keys and values", type=positive_int)
    _flag(parser, "--dtype", "bfloat16", "compute type", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--tiles",
        action="append",
        metavar="BLOCK,ROWS,BLOCK_BWD,KEYS_BWD",
        help="a candidate of model.whole_head; may be repeated (default: " + " ".join(DEFAULT_ATTENTION_TILES) + ")",
    )
    parser.set_defaults(default_tiles=DEFAULT_ATTENTION_TILES)  # as the default of --tiles, it would be added to
    blocks = "tiles of the splash kernels to compare with"
    _flag(parser, "--splash_blocks", [1024], blocks, type=positive_int, nargs="*")
    _add_compiling(parser, "attention-tiles")


def _add_chip(benches: Benches) -> None:
    parser = benches.add_parser(
        "chip",
        help="kernels and collectives on the TPU or GPU that is here, as a record to calibrate plans on",
        description="Time matmuls, fusions, copies and attention kernels on one device and collectives over all, in "
        "about ten minutes. The kernels go into a CSV that `tomat plan --calibrate --kernels` takes, the rest into a "
        "JSON beside it. What the CSV has of this chip and these versions is not timed again: the same command goes on "
        "where it was stopped. On a slice of several hosts, start it on all of them.",
    )
    _flag(parser, "--output", Path("chip-timings.csv"), "the timed kernels", type=output_file, metavar="FILE.csv")
    _flag(parser, "--minutes", 10.0, "after these, no further kernel is begun", type=positive_float)
    parser.add_argument("--quick", action="store_true", help="small sizes only; on a CPU always")


def _add_numerics(benches: Benches) -> None:
    parser = benches.add_parser(
        "numerics",
        help="train variants of a configuration over seeds: which learn the same, what the others cost",
        description="Train every variant with every seed, each in a process of its own, and compare loss curves and "
        "held-out NMAE and NEMD with the unchanged configuration. Finished runs are not repeated: the same command "
        "goes on where it was stopped. Exit status 1 if a variant that is meant to be exact is not.",
    )
    text = "the configuration and its variants, a file or the name of one that ships"
    _flag(parser, "--variants", "demo", text, type=config_file("numerics"), metavar="FILE")
    _flag(parser, "--seeds", "0,1,2", "at least two", metavar="N,N[,N...]")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="of every run (default: the configuration's)")
    parser.add_argument("--only", metavar="NAME[,NAME...]", help="train these variants and the base")
    parser.add_argument("--compare_only", action="store_true", help="train nothing; compare what has ended")
    _flag(parser, "--output_dir", Path("runs/numerics"), "folder of the runs", type=Path, metavar="DIR")
    parser.add_argument("--docs", action="store_true", help="write the page into the tracking folder")
    _flag(parser, "--tracking_dir", Path("docs/tracking"), "tracking folder, for --docs", type=Path, metavar="DIR")


def _add_decode(benches: Benches) -> None:
    parser = benches.add_parser(
        "decode",
        help="autoregressive decoding with the cache against without; parallel against autoregressive",
        description="Tokens a second of the autoregressive decoder, from its cache and by a forward pass for each, "
        "in turn, and the seconds that a cell takes both decoders. Weights are fresh: speed does not depend on them.",
    )
    text = "of the model and its patches, with model.environment; a file or the name of one that ships"
    _flag(parser, "--config_path", "demo", text, type=config_file("train"), metavar="FILE")
    _flag(parser, "--batch", 1, "patches at a time, with the cache and without", type=positive_int)
    _flag(parser, "--grid", 28, "voxels along each side of the cell that both decoders predict", type=positive_int)
    _flag(parser, "--rounds", 5, "turns of each", type=positive_int)
    text = "decode beside it, in the same turns, with keys and values kept in this type"
    parser.add_argument("--kv_cache_dtype", choices=("int8",), help=text)


def _add_levanter(benches: Benches) -> None:
    parser = benches.add_parser(
        "levanter",
        help="tomat's step and loader against Levanter's own trainer and loader",
        description="Tokens a second of the same decoder on the same rows: tomat's loss, loader and loop, and those of "
        "Levanter, in turn. The atoms are left out, which Levanter's models do not read.",
    )
    text = "of the model, its data, batch and optimizer; a file or the name of one that ships"
    _flag(parser, "--config_path", "demo", text, type=config_file("train"), metavar="FILE")
    _flag(parser, "--steps", 10, "steps that are timed together", type=positive_int)
    _flag(parser, "--rounds", 6, "turns of each", type=positive_int)


def _add_scf_savings(benches: Benches) -> None:
    parser = benches.add_parser(
        "scf-savings",
        help="iterations that a predicted density saves Quantum ESPRESSO",
        description="Computes cells of the embedded set with pw.x from its own start, from free atoms, the "
        "promolecule, a run's prediction and the converged density. Needs pw.x and `uv sync --extra demo-data`. "
        "Started again, it does what --work lacks.",
    )
    text = "folder of the run that predicts"
    parser.add_argument("--run", dest="run_dir", required=True, type=run_folder, metavar="RUN", help=text)
    parser.add_argument("--materials", nargs="+", metavar="ID", help="cells (default: all of --split)")
    parser.add_argument("--split", choices=("train", "validation"), default="validation", help="of the embedded set")
    _flag(parser, "--rounds", 3, "runs of each start, in turn, for their times", type=positive_int)
    _flag(parser, "--work", Path("runs/scf-savings"), "folder that keeps the runs of pw.x", type=Path)
    _flag(parser, "--pw", "pw.x", "program")
    _flag(parser, "--limit_seconds", 3600.0, "of one run of pw.x", type=positive_float)
    parser.add_argument("--page", type=output_file, metavar="FILE", help="page to write or bring up to date")
    today = datetime.date.today().isoformat()
    parser.add_argument("--date", default=today, help="of the page (default: today)")
