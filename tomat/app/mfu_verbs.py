"""`tomat mfu`: what share of the chips' peak a step or a run has reached, by every convention at once."""

import argparse
from typing import Any

from tomat.base.arguments import add_report, add_verb, config_file, positive_float, positive_int, run_folder
from tomat.base.errors import refuse
from tomat.base.report.model import Column, Table
from tomat.base.report.terminal import show
from tomat.base.reporting import console, counted, write_report


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add `tomat mfu`."""
    parser = add_verb(subparsers, "mfu", "FLOPs utilisation of a step time, or of a run", _run_mfu)
    parser.add_argument("--config_path", type=config_file("train"), help="a training configuration")
    parser.add_argument("--run", type=run_folder, dest="run_dir", help="a run's folder, such as runs/demo")
    text = "accelerator type, such as v6e-16 or h100x8; default: the configuration's, and of a run the devices that "
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
    from tomat.app.public import mfu
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
    from tomat.hardware.mfu import UTILISATIONS

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
    spread = ""
    if "n_steps" in result:
        spread = (
            f" (median of {counted(result['n_steady_steps'], 'steady step')} of {result['n_steps']}; p10 "
            f"{result['step_seconds_p10']:.3f} s, p90 {result['step_seconds_p90']:.3f} s)"
        )
    rate = result["tokens_per_second_per_chip"]
    console.print(
        f"step {result['step_seconds']:.3f} s{spread}, {result['tokens_per_second']:,.0f} tokens/s"
        + (f", {rate:,.0f} a chip" if rate is not None else "")
    )
    show(*(f"note: {note}." for note in result.get("notes", ())))
    if where is None and result.get("devices_that_ran"):
        show(f"It ran on {result['devices_that_ran']}, whose peak is not known, so there is no MFU.")
    elif where is None:
        show("The slice is not known, so there is no MFU; give --slice.")
    else:
        peaks = ", ".join(
            f"{peak / 1e12:,.0f} TFLOP/s {operand}"
            for operand, peak in result["peak_flops_per_second_per_chip_by_operand"].items()
        )
        console.print(f"{where}: {result['n_chips']} chips {result['chip']} of {peaks}")
        in_run = "n_steps" in result
        steps = ("step", "p10", "p90", "wall clock") if in_run else ("step",)
        columns = [Column("utilisation"), *(Column(name, right=True) for name in steps), Column("what it counts")]
        rows = []
        for one in UTILISATIONS:
            key, counts = one.key, f"{one.counts}: {one.source}" if one.source else one.counts
            keys = (key, f"{key}_p10", f"{key}_p90", f"wall_{key}") if in_run else (key,)
            rows.append((one.name, *(f"{100 * result[k]:.2f} %" for k in keys), counts))
        show(Table("", columns, rows))
        if result["hfu"] > 1:
            least = result["hfu"] * result["step_seconds"]
            console.print(
                f"HFU is over 100 %: what the program is counted to multiply takes {where} at least {least:.3g} s at "
                "its peaks. The step was shorter, or its program is another one."
            )
    if "wall_seconds_by_part" not in result:
        return
    wall = result["wall_seconds"]
    lost = result.get("wall_mfu_full_lost", {})
    headings = ("seconds", "share", "MFU lost, points") if lost else ("seconds", "share")
    rows = []
    for part, seconds in result["wall_seconds_by_part"].items():
        cells = [part.replace("_", " "), f"{seconds:,.2f}", f"{100 * seconds / wall:.1f} %"]
        if lost:
            cells.append(f"{100 * lost[part]:.2f}" if part in lost else "")
        rows.append(cells)
    columns = [Column("part"), *(Column(heading, right=True) for heading in headings)]
    show(Table(f"{wall:,.1f} s of wall-clock time", columns, rows))
