"""`tomat export` and `tomat compress`: write a run's model as a folder that can predict, in full or in few bits."""

import argparse
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base.arguments import add_flag, add_report, count, positive_int, run_folder
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE
from tomat.base.progress import progress
from tomat.base.report.terminal import show
from tomat.base.reporting import readable_bytes, tell, write_report

if TYPE_CHECKING:
    from tomat.predict.weights.folder import WrittenWeights

PARTS = ("mlp", "attention", "embedding", "environment")
"""The same as in `predict/weights/arrays.py`, which imports JAX."""


def register(subparsers: argparse._SubParsersAction) -> None:
    export = subparsers.add_parser(
        "export",
        help="write a run's model as safetensors, in a folder that predicts",
        description="Write the weights of a run with all that is needed to predict: safetensors, configuration, codec, "
        "promolecule and a card. `tomat predict --run` and `tomat eval --run` take the folder.",
    )
    compress = subparsers.add_parser(
        "compress",
        help="the same with the matrices in 8, 4, 3 or 2 bits per number",
        description="Write the weights of a run in few bits, with all that is needed to predict. `tomat predict --run` "
        "and `tomat eval --run` take the folder, and unpack the weights as they load it.",
    )
    compress.add_argument("--bits", type=positive_int, required=True, metavar="N", help="bits per number: 8, 4, 3 or 2")
    text = "affine (8, 4 bits) or lut, a table (4, 3, 2 bits; default below 8)"
    compress.add_argument("--scheme", choices=("affine", "lut"), help=text)
    add_flag(compress, "--group", 128, "numbers that share a scale", type=positive_int, metavar="N")
    text = f"matrices of {', '.join(PARTS)} (default: all), if need be with other bits: mlp=2,attention=4"
    compress.add_argument("--what", type=parts, default=dict.fromkeys(PARTS), metavar="PART[=BITS],...", help=text)
    text = "matrices at once (default: the processor's cores)"
    compress.add_argument("--workers", type=positive_int, metavar="N", help=text)
    for parser in (export, compress):
        parser.add_argument("--run", dest="run_dir", type=run_folder, required=True, metavar="DIR", help="the run")
        parser.add_argument("--step", type=count, help="checkpoint of the run (default: the newest)")
        parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="the folder to make")
        text = "form of the folder: safetensors (default), or huggingface, whose card the Hugging Face hub reads"
        parser.add_argument("--format", choices=("safetensors", "huggingface"), default="safetensors", help=text)
        parser.add_argument("--licence", metavar="TEXT", help="licence of the weights, for the card")
        add_report(parser, "write the sizes", run=_run_write)
    export.set_defaults(bits=None)


def parts(text: str) -> dict[str, int | None]:
    """An argparse type: `mlp=2,attention`, parts with their own bits or without."""
    found: dict[str, int | None] = {}
    for word in text.split(","):
        part, _, bits = word.strip().partition("=")
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"found '{part}', expected one of {', '.join(PARTS)}")
        if part in found:
            raise argparse.ArgumentTypeError(f"{part} is given twice")
        found[part] = positive_int(bits) if bits else None
    return found


def _run_write(args: argparse.Namespace) -> int:
    if args.output.exists():
        raise TomatError(f"--output {args.output} is there already; give another folder, or remove it.")
    compression = None
    if args.bits is not None:
        from tomat.predict.weights.folder import Compression

        # The flags are checked before the run is loaded.
        scheme = args.scheme or ("affine" if args.bits == 8 else "lut")
        bits = {part: args.bits if own is None else own for part, own in args.what.items()}
        compression = Compression(scheme, args.group, bits)
    tell(f"loading {args.run_dir}", highlight=False)

    for_hub = args.format == "huggingface"
    from tomat.predict.distillation.subject import write_distilled
    from tomat.predict.inference.trained import load_trained
    from tomat.predict.weights.arrays import check_compressible, named_arrays
    from tomat.predict.weights.folder import write_weights
    from tomat.predict.weights.record import is_weights_folder
    from tomat.train.settings.config import recorded_config

    if is_weights_folder(args.run_dir):
        raise TomatError(f"{args.run_dir} is a folder of weights already; give the run that it came from.")
    if recorded_config(args.run_dir / CONFIG_FILE).distillation is not None:
        if compression is not None:
            raise TomatError(f"{args.run_dir} trained a model in few bits already; `tomat export` writes it as it is.")
        # Writes codes, scales and tables of a checkpoint as they were trained.
        written, step = write_distilled(args.run_dir, args.output, args.step, args.licence, for_hub)
        _say(args, written, f", packed as trained, step {step}")
        return 0
    run = load_trained(args.run_dir, args.step)
    if compression is not None:
        check_compressible(run.config, str(args.run_dir))
    arrays = named_arrays(run.model)
    with progress() as bar:
        task = bar.add_task(f"Writing {args.output}", total=len(arrays))
        written = write_weights(
            args.run_dir,
            arrays,
            run.step,
            run.weights,
            args.output,
            compression=compression,
            licence=args.licence,
            for_hub=for_hub,
            workers=1 if compression is None else args.workers or len(os.sched_getaffinity(0)),
            on_array=lambda name: bar.advance(task),
        )
    _say(args, written, "" if compression is None else f", {compression}")
    return 0


def _say(args: argparse.Namespace, written: "WrittenWeights", more: str) -> None:
    share = written.weights_bytes / written.float32_bytes
    show(f"wrote {args.output}: {readable_bytes(written.weights_bytes)} of weights, {share:.3f} of float32{more}")
    write_report(args.json, {**asdict(written), "weights_over_float32": share})
