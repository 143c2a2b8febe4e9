"""`tomat lab`: settings of a training step measured on the devices that are here, each in a process of its own."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import count, existing_file, positive_float, positive_int, report_file

if TYPE_CHECKING:
    from tomat.lab.record import LabRow
    from tomat.lab.run import LabConfig

DEFAULT_TRACKING_DIR = Path("docs/tracking")
DEFAULT_WORK_DIR = Path("runs/lab")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verbs `lab run` and `lab max_batch`."""
    verbs = subparsers.add_parser("lab", help="measure settings of a training step: sweeps, the largest batch")
    verbs = verbs.add_subparsers(title="verbs", metavar="VERB", required=True)
    run = verbs.add_parser(
        "run",
        help="measure every row of a sweep beside its base",
        description="Measure every row of a sweep (the format of `tomat plan --sweep`), each in a process of its own "
        "and beside its base: tokens a second, step time, compile time, memory, and whether a difference is noise. "
        "The same command goes on where it was stopped.",
    )
    run.add_argument("sweep", type=existing_file, metavar="SWEEP.yaml", help="such as configs/sweeps/lab-demo.yaml")
    run.add_argument("--row", action="append", default=[], metavar="NAME", help="only this row; repeatable")
    run.add_argument("--rounds", type=positive_int, default=2, help="starts of each row (default 2)")
    run.add_argument("--repeats", type=positive_int, default=4, help="windows of each start (default 4)")
    run.add_argument(
        "--epoch_rows", type=positive_int, metavar="N", help="sequences of an epoch (default: of the data trained on)"
    )
    run.add_argument("--again", action="store_true", help="measure anew what is on record")
    _add_common(run, row_seconds=600.0)
    run.set_defaults(run=run_lab)


def _add_common(parser: argparse.ArgumentParser, row_seconds: float) -> None:
    parser.add_argument(
        "--window_seconds", type=positive_float, default=1.0, help="length of a window, at least 2 steps (default 1)"
    )
    parser.add_argument("--steps", type=positive_int, help="steps of a window, instead of --window_seconds")
    parser.add_argument("--warmup_steps", type=count, default=4, help="after the one that compiles (default 4)")
    parser.add_argument(
        "--row_seconds",
        type=positive_float,
        default=row_seconds,
        help=f"longest that a start of a row may take (default {row_seconds:.0f})",
    )
    parser.add_argument(
        "--memory_limit_gib",
        type=positive_float,
        help="most memory of a device; on a CPU of the process, which is ended beyond it",
    )
    parser.add_argument("--tracking_dir", type=Path, default=DEFAULT_TRACKING_DIR, help="gets the record and the page")
    parser.add_argument(
        "--work_dir", type=Path, help=f"data, compiled programs, logs (default: below {DEFAULT_WORK_DIR})"
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="also write the record here")


def _config(args: argparse.Namespace, **values: Any) -> "LabConfig":
    from tomat.lab.messages import Limits
    from tomat.lab.run import LabConfig

    memory = None if args.memory_limit_gib is None else round(args.memory_limit_gib * 2**30)
    return LabConfig(
        window_seconds=args.window_seconds,
        steps=args.steps,
        warmup_steps=args.warmup_steps,
        limits=Limits(args.row_seconds, memory),
        **values,
    )


def run_lab(args: argparse.Namespace) -> int:
    """Measure a sweep; status 1 if a row has no answer."""
    from tomat.app.config_keys import check_words
    from tomat.base.reporting import console, write_report
    from tomat.base.stages import Stages
    from tomat.lab.page import figures_text, print_ranking, write_lab_page
    from tomat.lab.record import record_path
    from tomat.lab.run import READY, Lab
    from tomat.tuning.changes import override_words
    from tomat.tuning.sweep_config import load_sweep

    sweep = load_sweep(args.sweep)
    for row in sweep.rows:
        check_words(row.config_path, override_words(row.overrides))
    if args.again:
        record_path(args.tracking_dir, sweep.name).unlink(missing_ok=True)
    with Stages() as stages:

        def show(name: str, stage: str) -> None:
            if stage == READY:
                stages.done(name)
            else:
                stages.show(name, stage)

        def say(row: "LabRow") -> None:
            stages.done(row.name)
            stages.say(f"{row.name}: {figures_text(row)}")

        lab = Lab(
            sweep,
            args.tracking_dir,
            args.work_dir or DEFAULT_WORK_DIR / sweep.name,
            _config(args, rounds=args.rounds, repeats=args.repeats),
            show,
            say,
        )
        try:
            lab.run(args.row)
        finally:
            # Stopped or not, what was measured is shown and kept.
            record = lab.record()
            if record["rows"]:
                print_ranking(record)
                page = write_lab_page(record, args.tracking_dir, args.epoch_rows)
                write_report(args.json, record)
                console.print(f"wrote {page}", highlight=False)
    return 0 if record["n_measured"] == record["n_rows"] else 1
