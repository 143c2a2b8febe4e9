"""`tomat lab`: measures settings of a training step on this machine's devices, each in a process of its own."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base.arguments import (
    add_flag,
    add_report,
    add_verb,
    add_verbs,
    config_file,
    count,
    positive_float,
    positive_int,
    share,
)
from tomat.base.errors import TomatError
from tomat.base.progress import Stages
from tomat.base.report.terminal import show
from tomat.base.reporting import console, write_report

if TYPE_CHECKING:
    from tomat.measure.lab.max_batch import Probe
    from tomat.measure.lab.messages import Limits
    from tomat.measure.lab.record import LabRow

DEFAULT_WORK_DIR = Path("runs/lab")
DEFAULT_QUALITY_DIR = Path("runs/quality")
OF_A_WINDOW = ("rounds", "repeats", "window_seconds", "steps", "warmup_steps", "minutes")
"""Flags that are passed to `LabConfig` unchanged."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verbs = add_verbs(subparsers, "lab", "measure settings of a step: sweeps, the largest batch, what they learn")
    run = add_verb(verbs, "run", "measure every row of a sweep beside its base", _run_lab)
    _add_sweep(run, "lab-demo", "only this row; repeatable")
    add_flag(run, "--rounds", 2, "starts of each row", type=positive_int)
    add_flag(run, "--repeats", 4, "timed windows of each start", type=positive_int)
    text = "sequences of an epoch (default: those of the training data)"
    run.add_argument("--epoch_rows", type=positive_int, metavar="N", help=text)
    run.add_argument("--again", action="store_true", help="measure the rows on record again")
    add_flag(run, "--window_seconds", 1.0, "length of a window, at least 2 steps", type=positive_float)
    add_flag(run, "--warmup_steps", 4, "steps after the one that compiles, not timed", type=positive_int)
    run.add_argument("--steps", type=positive_int, help="steps of a window, instead of --window_seconds")
    text = "begin no start that would end after this time; the same command goes on with the rest"
    run.add_argument("--minutes", type=positive_float, help=text)
    _add_limits(run, row_seconds=600.0)
    _add_output(run, DEFAULT_WORK_DIR)

    text = "Overrides of the configuration (--a.b VALUE) follow."
    largest = add_verb(verbs, "max_batch", "find the largest batch that runs", _run_max_batch, epilog=text)
    text = "the training configuration, a file or the name of one that ships"
    add_flag(largest, "--config_path", "demo", text, type=config_file("train"), metavar="FILE")
    largest.add_argument("--name", help="name of record and page (default: max-batch-CONFIGURATION)")
    text = "checkpoint policies (default: the configured one)"
    largest.add_argument("--policies", default="", metavar="P[,P...]", help=text)
    add_flag(largest, "--accumulations", "1", "microbatches of a step", metavar="N[,N...]")
    add_flag(largest, "--largest", 2**16, "largest batch to try", type=positive_int)
    add_flag(largest, "--steps", 2, "steps that are timed together", type=positive_int)
    _add_limits(largest, row_seconds=900.0)
    _add_output(largest, DEFAULT_WORK_DIR, takes_overrides=True)

    text = "train each row of a sweep with several seeds: speed, loss and held-out error"
    quality = add_verb(verbs, "quality", text, _run_quality)
    _add_sweep(quality, "lab-quality", "only this row and its base, and nothing else on the page; repeatable")
    add_flag(quality, "--seeds", "0,1,2", "seeds, one run of each row for each", metavar="N,N[,N...]")
    quality.add_argument("--steps", type=positive_int, metavar="N", help="steps a run (default: as configured)")
    add_flag(quality, "--share", 0.15, "share of the embedded training densities set aside", type=share)
    add_flag(quality, "--split_seed", 0, "seed that chooses the densities set aside", type=count, metavar="N")
    _add_output(quality, DEFAULT_QUALITY_DIR)


def _add_sweep(parser: argparse.ArgumentParser, example: str, row: str) -> None:
    text = f"such as configs/sweeps/{example}.yaml or {example}"
    parser.add_argument("sweep", type=config_file("sweeps"), metavar="SWEEP.yaml", help=text)
    parser.add_argument("--row", action="append", default=[], metavar="NAME", help=row)


def _add_limits(parser: argparse.ArgumentParser, row_seconds: float) -> None:
    add_flag(parser, "--row_seconds", row_seconds, "longest time that a start of a row may take", type=positive_float)
    text = "most memory of a device; on a CPU, of the process, which is ended if it uses more"
    parser.add_argument("--memory_limit_gib", type=positive_float, help=text)
    text = "folder of runs, or URL, whose log gets each row (`tomat runs log`)"
    add_flag(parser, "--log_dir", "runs", text, metavar="DIR")


def _add_output(parser: argparse.ArgumentParser, work_dir: Path, **defaults: bool) -> None:
    add_flag(parser, "--tracking_dir", Path("docs/tracking"), "folder for the record and the page", type=Path)
    text = f"folder for runs or data, compiled programs and logs (default: below {work_dir})"
    parser.add_argument("--work_dir", type=Path, help=text)
    add_report(parser, "also write the record here", **defaults)


def _limits(args: argparse.Namespace) -> "Limits":
    from tomat.measure.lab.messages import Limits

    return Limits(args.row_seconds, None if args.memory_limit_gib is None else round(args.memory_limit_gib * 2**30))


def _run_lab(args: argparse.Namespace) -> int:
    """Measure every row of a sweep (the format of `tomat plan --sweep`), each in a process of its own and beside its
    base: tokens a second, step time, compile time, memory, and whether a difference is noise. The same command goes on
    where it was stopped."""
    from tomat.measure.lab.log import log_row
    from tomat.measure.lab.run import Lab, LabConfig
    from tomat.perf.tuning.changes import override_words
    from tomat.perf.tuning.sweep_config import load_sweep
    from tomat.report.pages.sweep_pages import write_lab_page
    from tomat.report.sweep import measured_ranking, row_text
    from tomat.train.runs.run_log import Asked
    from tomat.train.settings.keys import check_words

    sweep = load_sweep(args.sweep)
    for row in sweep.rows:
        check_words(row.config_path, override_words(row.overrides), words_of=row.words_of)
    asked = {row.name: Asked.by_words(args.words, row.config_path, ()) for row in sweep.rows}
    with Stages() as stages:

        def say(row: "LabRow") -> None:
            stages.done(row.name)
            stages.say(f"{row.name}: {row_text(row)}")
            log_row(args.log_dir, sweep.name, sweep.title, row, asked[row.name])

        config = LabConfig(limits=_limits(args), **{name: getattr(args, name) for name in OF_A_WINDOW})
        work_dir = args.work_dir or DEFAULT_WORK_DIR / sweep.name
        lab = Lab(sweep, args.tracking_dir, work_dir, config, stages, say)
        try:
            lab.run(args.row, again=args.again)
        finally:
            # Also after an interruption, the measured rows are shown and kept.
            record = lab.record()
            if record["rows"]:
                show(*measured_ranking([row for row in lab.rows.values() if row.status], record["same_settings"]))
                page = write_lab_page(record, args.tracking_dir, args.epoch_rows)
                write_report(args.json, record)
                console.print(f"wrote {page}", highlight=False)
    chosen = [lab.rows[row.name].measured for row in sweep.rows if not args.row or row.name in args.row]
    return 0 if all(chosen) else 1


def _run_max_batch(args: argparse.Namespace) -> int:
    """Find the largest batch that takes real steps within the memory, for each checkpoint policy and number of
    accumulations. Every probe is a process of its own. The same command goes on where it was stopped."""
    from tomat.train.settings.keys import check_words

    check_words(args.config_path, args.overrides)  # before JAX is imported

    from tomat.base.report.model import Note
    from tomat.measure.lab.log import log_probe
    from tomat.measure.lab.max_batch import STATUS_WORDS, MaxBatch
    from tomat.measure.lab.run import LabConfig
    from tomat.report.pages.max_batch_page import probes_table, write_max_batch_page
    from tomat.train.runs.run_log import Asked

    try:
        accumulations = [int(word) for word in args.accumulations.split(",")]
    except ValueError:
        accumulations = []
    if not accumulations or min(accumulations) < 1 or len(set(accumulations)) != len(accumulations):
        raise TomatError(f"--accumulations is {args.accumulations!r}; expected distinct numbers from 1, as in 1,2,4.")
    words = [word for word in args.policies.split(",") if word]
    name = args.name or f"max-batch-{args.config_path.stem}"
    asked = Asked.by_words(args.words, args.config_path, args.overrides)
    with Stages() as stages:

        def say(what: str, probe: "Probe") -> None:
            stages.done(what)
            figures = f", {probe.tokens_per_second:,.0f} tokens/s" if probe.runs else f": {probe.reason}"
            stages.say(f"{what}: {STATUS_WORDS[probe.status]}{figures}")
            log_probe(args.log_dir, name, what, probe, asked, _limits(args), search.setup)

        search = MaxBatch(
            name=name,
            config_path=args.config_path,
            words=args.overrides,
            policies=[{"true": True, "false": False}.get(word, word) for word in words] or [None],
            accumulations=accumulations,
            tracking_dir=args.tracking_dir,
            work_dir=args.work_dir or DEFAULT_WORK_DIR / name,
            config=LabConfig(steps=args.steps, warmup_steps=0, limits=_limits(args)),
            most=args.largest,
            stages=stages,
            on_done=say,
        )
        try:
            search.run()
        finally:
            # Also after an interruption, the results are shown and kept.
            record = search.record()
            if record["searches"]:
                for one in search.searches:
                    if one.probes or one.stopped_by:
                        show(probes_table(one), *([Note(one.stopped_by)] if one.stopped_by else []))
                page = write_max_batch_page(record, args.tracking_dir)
                write_report(args.json, record)
                console.print(f"wrote {page}", highlight=False)
    return 0 if all(one.largest for one in search.searches) else 1


def _run_quality(args: argparse.Namespace) -> int:
    """Train every row of a sweep with every seed on the same data, and report by how much each is faster or slower,
    better or worse, with intervals. Of embedded data only training compounds are used, and some of them are set aside
    to judge by. The same command goes on where it was stopped."""
    from tomat.measure.lab.quality import Quality, seeds_of
    from tomat.measure.lab.record import record_path
    from tomat.perf.tuning.changes import override_words
    from tomat.perf.tuning.sweep_config import load_sweep
    from tomat.report.pages.quality_page import page_path, quality_table, write_quality_page
    from tomat.train.settings.keys import check_words

    seeds = seeds_of(args.seeds)
    sweep = load_sweep(args.sweep).with_rows(args.row)
    for row in sweep.rows:
        check_words(row.config_path, override_words(row.overrides), words_of=row.words_of)
    work_dir = args.work_dir or DEFAULT_QUALITY_DIR / sweep.name
    record_file = record_path(args.tracking_dir, page_path(args.tracking_dir, sweep.name).stem)
    of_a_run = {name: getattr(args, name) for name in ("steps", "share", "split_seed")}
    study = Quality(sweep, seeds, work_dir, record_file, **of_a_run)
    try:
        study.run()
    finally:
        # Also after an interruption, the results of the trained rows are shown and kept.
        record = study.record()
        if any(row["figures"] for row in record["rows"]):
            show(quality_table(record))
            write_report(args.json, record)
            console.print(f"wrote {write_quality_page(record, args.tracking_dir)}", highlight=False)
    return 1 if any(row["failed"] for row in record["rows"]) else 0
