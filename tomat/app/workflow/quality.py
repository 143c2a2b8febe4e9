"""A study of quality trained, and `tomat bench numerics`: one whose rows are said to be exact or not, judged by the
embedded densities that are held out."""

import argparse
from collections.abc import Sequence

from tomat.base.errors import TomatError
from tomat.base.progress import Stages
from tomat.base.report.terminal import show
from tomat.base.reporting import console, write_json, write_report
from tomat.measure.lab.numerics import numerics_report
from tomat.measure.lab.quality import Quality, seeds_of
from tomat.measure.lab.record import record_path
from tomat.perf.tuning.sweep_config import load_variants
from tomat.report.pages.quality_page import page_path, quality_table, write_quality_page


def run(args: argparse.Namespace) -> int:
    """Carry out `tomat bench numerics`."""
    sweep, only = load_variants(args.variants), args.only.split(",") if args.only else []
    trained = [row.name for row in sweep.with_rows(only).rows]
    record_file = record_path(args.output_dir, page_path(args.tracking_dir, sweep.name).stem)
    study = Quality(sweep, seeds_of(args.seeds), args.output_dir, record_file, steps=args.steps, share=None)
    if args.compare_only:
        study.read()
    else:
        train_study(study, trained)
    if failed := [why for row in study.rows.values() for why in row.failed.values()]:
        raise TomatError(failed[0])
    record, report = study.record(), numerics_report(study)
    show(quality_table(record))
    write_report(args.json, report)
    if args.docs:
        page = write_quality_page(record, args.tracking_dir, args.tracking_dir / f"{sweep.name}.md")
        write_json(page.with_suffix(".json"), report)
        console.print(f"page: {page}")
    return 0 if report["exact_variants_are_the_same"] else 1


def train_study(study: Quality, only: Sequence[str] = ()) -> None:
    """Train what a study lacks, or of it the rows `only`, saying what each run does."""
    name = study.sweep.name
    with Stages() as stages:

        def on_run(run: str, stage: str) -> None:
            stages.done(name)
            if stage == "training":
                stages.show(run, stage)
            else:
                stages.done(run)
                stages.say(f"{run}: {stage}")

        study.on_run = on_run
        stages.show(name, "importing JAX and reading the configurations")
        study.run(only)
