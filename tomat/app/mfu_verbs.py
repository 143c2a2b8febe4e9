"""`tomat mfu`: the share of the chips' peak that a step or a run reaches, by every convention at once."""

import argparse
from typing import Any

from tomat.base.arguments import add_report, add_verb, config_file, positive_float, positive_int, run_folder
from tomat.base.errors import refuse
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, write_report


def register(subparsers: argparse._SubParsersAction) -> None:
    parser = add_verb(subparsers, "mfu", "FLOPs utilisation of a step time, or of a run", _run_mfu)
    parser.add_argument("--config_path", type=config_file("train"), help="a training configuration")
    parser.add_argument("--run", type=run_folder, dest="run_dir", help="a run's folder, such as runs/demo")
    text = "accelerator type, such as v6e-16 or h100x8; default: the configuration's, or with --run the devices that "
    parser.add_argument("--slice", help=f"{text}it ran on, which this must not contradict")
    parser.add_argument("--step_seconds", type=positive_float, help="duration of a step (with --config_path)")
    parser.add_argument("--batch", type=positive_int, help="sequences per step; default: the configuration's")
    parser.add_argument("--seq_len", type=positive_int, help="tokens per sequence; default: the configuration's")
    text = "atoms of a typical material, for the useful tokens; default: 12"
    parser.add_argument("--atoms", type=positive_int, help=text)
    add_report(parser, "write the figures; MFUs are fractions", takes_overrides=True)


def _run_mfu(args: argparse.Namespace) -> int:
    """FLOPs utilisation of a step time on a slice, or of a run from its log. Overrides of the configuration (--a.b
    VALUE) are taken as `tomat train` takes them."""
    from tomat.app.workflow.public import mfu
    from tomat.hardware.chips import slice_named
    from tomat.train.settings.keys import check_words

    run, seconds = args.run_dir, args.step_seconds
    none_or_both = (args.config_path is None) == (run is None)
    refuse(
        (none_or_both, "give --config_path with --slice and --step_seconds, or --run with a run's folder."),
        (run and seconds, "--step_seconds does not go with --run, whose log has the step times."),
        (not run and not seconds, "--step_seconds is missing: the measured duration of a step, such as 2.08."),
    )
    words = list(args.overrides)
    words += [] if args.batch is None else ["--trainer.train_batch_size", str(args.batch)]
    words += [] if args.seq_len is None else ["--data.seq_len", str(args.seq_len)]
    # Before the seconds that importing JAX and Levanter takes.
    check_words(args.config_path, words)
    if args.slice is not None:
        slice_named(args.slice)
    result = mfu(run or args.config_path, args.slice, seconds, overrides=words, atoms=args.atoms)
    _print(result)
    write_report(args.json, result)
    return 0


def _print(result: dict[str, Any]) -> None:
    from tomat.report.mfu import mfu_parts

    model, where = result["model"], result["slice"]
    if "members" in model:  # a field model
        shape = (
            f"{counted(model['members'], 'member')} of {model['hidden_layers']} x {model['hidden_dim']} over "
            f"{model['invariants']} invariants, sums over {model['max_atoms']} atoms of "
            f"{model['max_elements']} elements"
        )
    else:
        shape = (
            f"{model['hidden_dim']} x {model['num_layers']}, {model['num_heads']} heads of {model['head_dim']}, "
            f"vocabulary {model['vocab_size']:,}"
        )
    console.print(
        f"{result['parameters_total'] / 1e6:,.1f} M parameters ({shape}), {result['batch_sequences']} "
        f"sequences of {result['sequence_tokens']:,} tokens, "
        f"{result['useful_tokens_per_sequence']:,} of them useful"
    )
    if where is not None:
        by_operand = result["peak_flops_per_second_per_chip_by_operand"].items()
        peaks = ", ".join(f"{peak / 1e12:,.0f} TFLOP/s {operand}" for operand, peak in by_operand)
        console.print(f"{where}: {result['n_chips']} chips {result['chip']} of {peaks}")
    show(*mfu_parts(result))
    if where is None and not result.get("devices_that_ran"):
        show("The slice is not known; give --slice.")
    elif where is not None and result["hfu"] > 1:
        least = result["hfu"] * result["step_seconds"]
        console.print(
            f"HFU is over 100 %: the products counted for the program take {where} at least {least:.3g} s at its "
            "peaks. The step was shorter, or its program is another one."
        )
