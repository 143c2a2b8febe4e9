"""`tomat bench numerics`: trains variants of a configuration over seeds, and says which learn the same."""

import argparse
from pathlib import Path

from tomat.base.arguments import existing_file, positive_int, report_file
from tomat.base.errors import TomatError

DEFAULT_VARIANTS = Path("configs/numerics/demo.yaml")
DEFAULT_TRACKING_DIR = Path("docs/tracking")


def register_bench(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `tomat bench numerics`."""
    parser = subparsers.add_parser(
        "numerics",
        help="train variants of a configuration over seeds: which learn the same, what the others cost",
        description="Train every variant with every seed, each in a process of its own, and compare loss curves and "
        "held-out NMAE and NEMD with the unchanged configuration. Finished runs are not repeated: the same command "
        "goes on where it was stopped. Exit status 1 if a variant that is meant to be exact is not.",
    )
    parser.add_argument(
        "--variants",
        type=existing_file,
        default=DEFAULT_VARIANTS,
        metavar="FILE",
        help="the configuration and its variants (default: %(default)s)",
    )
    parser.add_argument("--seeds", default="0,1,2", metavar="N,N[,N...]", help="at least two (default: %(default)s)")
    parser.add_argument("--steps", type=positive_int, metavar="N", help="of every run (default: the configuration's)")
    parser.add_argument("--only", metavar="NAME[,NAME...]", help="train these variants and the base")
    parser.add_argument("--compare_only", action="store_true", help="train nothing; compare what has ended")
    parser.add_argument(
        "--output_dir",
        type=Path,
        default=Path("runs/numerics"),
        metavar="DIR",
        help="folder of the runs (default: %(default)s)",
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures")
    parser.add_argument("--docs", action="store_true", help="write the page into the tracking folder")
    parser.add_argument(
        "--tracking_dir",
        type=Path,
        default=DEFAULT_TRACKING_DIR,
        metavar="DIR",
        help="tracking folder, for --docs (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `tomat bench numerics`."""
    from tomat.base.reporting import console, progress, write_report
    from tomat.bench.numerics.page import report_table, write_page
    from tomat.bench.numerics.record import make_record
    from tomat.bench.numerics.runs import PlannedRun, read_finished, train_all
    from tomat.bench.numerics.variants import BASE, load_variants, plan_runs

    seeds = _seeds(args.seeds)
    numerics = load_variants(args.variants)
    runs = plan_runs(numerics, seeds, args.steps, args.output_dir)
    names = [BASE, *args.only.split(",")] if args.only else list(runs)
    unknown = sorted(set(names) - set(runs))
    if unknown:
        raise TomatError(f"--only names {unknown[0]!r}; {args.variants} has {', '.join(runs)}.")
    if not args.compare_only:
        wanted = [run for name in runs if name in names for run in runs[name]]
        with progress(stage="{task.fields[stage]}") as bar:
            task = bar.add_task("runs", total=len(wanted), stage="")

            def on_run(run: PlannedRun, stage: str) -> None:
                bar.update(task, advance=stage == "done", stage=f"{run.name}: {stage}")

            train_all(wanted, args.output_dir, on_run)
    every = [run for group in runs.values() for run in group]
    finished = {run.name: found for run in every if (found := read_finished(run)) is not None}
    record = make_record(numerics, runs, finished)
    console.print(report_table(record))
    write_report(args.json, record.to_dict())
    if args.docs:
        console.print(f"page: {write_page(record, args.tracking_dir)}")
    return 0 if record.exact_variants_are_the_same else 1


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in text.split(",")]
    except ValueError:
        raise TomatError(f"--seeds is {text!r}; expected numbers such as 0,1,2.") from None
    if len(set(seeds)) != len(seeds) or len(seeds) < 2 or min(seeds) < 0:
        raise TomatError(
            f"--seeds is {text!r}; expected at least two different ones from 0: the noise is their spread."
        )
    return seeds
