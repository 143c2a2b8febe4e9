"""`tomat bench numerics`: trains variants of a configuration over seeds, and says which learn the same."""

import argparse

from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.reporting import console, write_report
from tomat.measure.bench.numerics.record import make_record
from tomat.measure.bench.numerics.runs import PlannedRun, read_finished, train_all
from tomat.measure.bench.numerics.variants import BASE, load_variants, plan_runs
from tomat.report.pages.numerics_page import report_table, write_page


def run(args: argparse.Namespace) -> int:
    """Carry out `tomat bench numerics`."""
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
