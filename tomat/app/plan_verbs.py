"""`tomat plan`: memory and time of a training step or a prediction on a TPU slice, without the slice."""

import argparse
import hashlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tomat.base.arguments import (
    add_verb,
    config_file,
    count,
    existing_file,
    output_file,
    percent,
    positive_float,
    positive_int,
    report_file,
    run_folder,
)
from tomat.base.errors import TomatError, refuse
from tomat.base.layout import CONFIG_FILE
from tomat.base.progress import Stages
from tomat.base.reporting import chosen, console, write_report

if TYPE_CHECKING:
    from tomat.perf.plan.calibration import CalibrationRow

EPILOG = """\
forms:
  tomat plan --config_path CONFIG [--slice v6e-16] [--a.b VALUE ...]   one step: memory, cycles, MFU
  tomat plan --like RUN [--a.b VALUE ...]                              the step of an existing run
  tomat plan --config_path CONFIG --max_batch [--policies full,off]   the largest batch that fits
  tomat plan --config_path CONFIG --decode --grid NX NY NZ --atoms N   both decoders: patches at a time, seconds a cell
  tomat plan --sweep configs/sweeps/mfu-200m.yaml                      many steps, ranked, with a page
  tomat plan --runs FILE                                               plans beside the runs that others published
  tomat plan --calibrate | --record RUN                                plan and measurement side by side
  tomat plan --calibrate --kernels FILE                                kernels that chips have timed, beside estimates
  tomat plan compare A B       two plans, profiles or breakdowns; exit status 1 if B's step grew

Plans are cached in ~/.cache/tomat/plan, by the lowered program, the compiler and its flags; beyond --cache_gib the
least recently used are removed. No environment variable changes the step: the configuration alone decides it.
"""

DEFAULT_TRACKING_DIR = Path("docs/tracking")
OF_A_CELL = ("grid", "atoms", "structure", "rounds", "kv_cache_dtype")
"""Flags that go with `--decode` alone."""
OF_A_STEP = ("sweep", "runs", "max_batch", "calibrate", "record", "docs", "emit", "executable", "codec")
"""Flags that do not go with `--decode`."""
OF_ONE_STEP = ("config_path", "like", "slice", "max_batch", "no_search", "docs", "emit", "executable", "codec")
"""Flags that do not go with rows of a file."""
OF_A_PLAN = (*OF_ONE_STEP, *OF_A_CELL, "sweep", "runs", "row", "policies", "decode", "calibrate", "record", "kernels",
             "chip", "tracking_dir", "cache_dir")  # fmt: skip
"""Flags that do not go with `compare`."""


def register(subparsers: argparse._SubParsersAction) -> None:
    text = "compile the training step for a TPU slice, which need not be there: memory, cycles, MFU"
    form = argparse.RawDescriptionHelpFormatter
    parser = add_verb(subparsers, "plan", text, _run_plan, epilog=EPILOG, formatter_class=form)
    what = parser.add_argument_group("what to plan")
    text = "a training configuration, a file or the name of one that ships; overrides (--a.b VALUE) follow"
    what.add_argument("--config_path", type=config_file("train"), help=text)
    what.add_argument("--like", type=run_folder, metavar="RUN", help="a run's folder, whose configuration is used")
    what.add_argument("--slice", help="accelerator type, such as v6e-16; default: the configuration's")
    text = "codec.json, for the densities in --executable"
    what.add_argument("--codec", type=existing_file, metavar="FILE", help=text)
    what.add_argument("--sweep", type=config_file("sweeps"), metavar="FILE", help="plan every row of a sweep")
    text = "a table of Levanter runs (CSV): plan each row's step, and write the page that compares them"
    what.add_argument("--runs", type=existing_file, metavar="FILE", help=text)
    text = "with --sweep or --runs: only this row; repeatable"
    what.add_argument("--row", action="append", default=[], metavar="NAME", help=text)
    text = "rows of a sweep, or kernels, to plan at once (default 1: a row uses two cores, a kernel hardly over one)"
    what.add_argument("--workers", type=positive_int, default=1, help=text)
    what.add_argument("--max_batch", action="store_true", help="find the largest batch that fits")
    what.add_argument("--policies", default="", help="with --max_batch: checkpoint policies, comma-separated")
    text = "plan the prediction of a cell instead of a step, by one decoder or both"
    what.add_argument("--decode", nargs="?", const="both", choices=("parallel", "autoregressive", "both"), help=text)
    text = "with --decode: voxels along a, b, c"
    what.add_argument("--grid", type=positive_int, nargs=3, metavar=("NX", "NY", "NZ"), help=text)
    what.add_argument("--atoms", type=positive_int, metavar="N", help="with --decode: atoms of the cell")
    text = "with --decode: the cell, instead of --atoms"
    what.add_argument("--structure", type=existing_file, metavar="FILE", help=text)
    what.add_argument("--rounds", type=positive_int, metavar="R", help="with --decode: parallel passes (default: 1)")
    text = "with --decode: type of the autoregressive decoder's keys and values (default: compute, the model's)"
    what.add_argument("--kv_cache_dtype", choices=("compute", "int8"), help=text)
    what.add_argument("--no_search", action="store_true", help="do not look for changes that make the step fit")
    what.add_argument("--calibrate", action="store_true", help="plan every measured step again, and write the page")
    text = "with --calibrate: judge the models by these kernel timings"
    what.add_argument("--kernels", type=existing_file, metavar="FILE", help=text)
    text = "with --kernels: only rows of this chip; repeatable"
    what.add_argument("--chip", action="append", default=[], metavar="NAME", help=text)
    text = "add a measured run, or a record of the lab (.json), to the calibration"
    what.add_argument("--record", type=Path, metavar="RUN", help=text)
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=report_file, metavar="FILE", help="write the plan, in bytes, seconds and fractions")
    out.add_argument("--top", type=count, default=12, help="operations and buffers to print (default 12)")
    out.add_argument("--docs", action="store_true", help="write the plan's page into the tracking folder")
    out.add_argument("--tracking_dir", type=Path, help=f"tracking folder (default: {DEFAULT_TRACKING_DIR})")
    text = "write the planned configuration, ready for the pod"
    out.add_argument("--emit", type=output_file, metavar="FILE", help=text)
    out.add_argument("--executable", type=output_file, metavar="FILE", help="write the serialised executable")
    limits = parser.add_argument_group("limits of a compile")
    text = "longest compile (default: 1800)"
    limits.add_argument("--time_limit_seconds", type=positive_float, default=1800.0, help=text)
    text = "most memory to use on this machine (default: 16)"
    limits.add_argument("--memory_limit_gib", type=positive_float, default=16.0, help=text)
    limits.add_argument("--cache_dir", type=Path, help="folder of the cache (default: ~/.cache/tomat/plan)")
    limits.add_argument("--cache_gib", type=positive_float, default=2.0, help="largest size of the cache (default 2)")
    parser.add_argument("--warn_percent", type=percent, default=2.0, help="compare: warn if the step grew by so much")
    parser.add_argument("--fail_percent", type=percent, default=5.0, help="compare: fail if the step grew by so much")
    parser.set_defaults(takes_overrides=True, device_kind=None)


def _run_plan(args: argparse.Namespace) -> int:
    """Compile the training step for a TPU slice on a machine without one, and say whether it fits, where its cycles go
    and which MFU to expect."""
    overrides = list(args.overrides)
    # As a positional argument, argparse would take the values of overrides, whose flags it does not know.
    if overrides[:1] == ["compare"]:
        from tomat.app.profile_verbs import compare_targets

        words = overrides[1:]
        if len(words) != 2:
            raise TomatError(f"compare takes two plans, profiles or breakdowns, got {len(words)}: {' '.join(words)}.")
        if given := next((name for name in OF_A_PLAN if getattr(args, name)), None):
            raise TomatError(f"--{given} does not go with compare, which plans nothing; leave it out.")
        return compare_targets(args, *words)
    decodes = args.decode is not None
    of_cell = next((name for name in OF_A_CELL if getattr(args, name)), None)
    of_step = next((name for name in OF_A_STEP if getattr(args, name)), None)
    output = next((name for name in ("docs", "emit", "executable") if getattr(args, name)), None)
    row, chip = (next(iter(names), None) for names in (args.row, args.chip))
    refuse(
        (
            args.row and args.sweep is None and args.runs is None,
            f"--row {row} is a row of --sweep or --runs; give its file.",
        ),
        (
            sum([args.sweep is not None, args.runs is not None, args.calibrate or args.record is not None]) > 1,
            "--sweep, --runs and --calibrate or --record each plan rows of their own; give one of them.",
        ),
        (args.kernels is not None and not args.calibrate, "--kernels is for --calibrate; give both."),
        (args.chip and args.kernels is None, f"--chip {chip} chooses rows of --kernels; give its file."),
        (
            args.workers > 1 and not (args.sweep or args.runs or args.kernels),
            "--workers is for rows of --sweep or --runs, or for --kernels; leave it out.",
        ),
        (args.policies and not args.max_batch, "--policies is for --max_batch; give both."),
        (args.max_batch and output, f"--max_batch writes no --{output}; plan the batch that it finds, with that flag."),
        (of_cell and not decodes, f"--{of_cell} is for --decode; give both."),
        (decodes and of_step, f"--decode plans a prediction, which has no --{of_step}; leave one of them out."),
        (decodes and args.grid is None, "--decode needs the voxels of the cell; give --grid NX NY NZ."),
        (
            decodes and (args.atoms is None) == (args.structure is None),
            "--decode needs the atoms of the cell; give --atoms N, or --structure FILE.",
        ),
        (args.rounds and args.decode == "autoregressive", "--rounds is for the parallel decoder; leave it out."),
        (
            args.kv_cache_dtype and args.decode == "parallel",
            "--kv_cache_dtype is for the autoregressive decoder, which has a cache; leave it out.",
        ),
    )
    forms = {"--sweep": (args.sweep, _sweep), "--runs": (args.runs, _published)}
    forms["--calibrate"] = (args.calibrate or args.record, _calibrate)
    form, run = next(((name, run) for name, (asked, run) in forms.items() if asked), ("", None))
    if run is None:
        return _plan(args, overrides)
    if overrides:
        raise TomatError(f"{form} takes no overrides; got {' '.join(overrides)}. Set them in the file that it reads.")
    if given := next((name for name in OF_ONE_STEP if getattr(args, name)), None):
        raise TomatError(f"{form} plans rows of its own, which --{given} does not change; leave it out.")
    _say_withheld()
    return run(args)


def _sweep(args: argparse.Namespace) -> int:
    from tomat.app.plan_step import compile_arguments
    from tomat.base.report.terminal import show
    from tomat.perf.tuning.sweep import record_path, run_sweep
    from tomat.perf.tuning.sweep_config import load_sweep
    from tomat.perf.tuning.sweep_record import rows_on_record
    from tomat.perf.tuning.sweep_rows import FAILED, RowRecord
    from tomat.report.pages.sweep_pages import write_sweep_page
    from tomat.report.sweep import planned_ranking

    tracking_dir = args.tracking_dir or DEFAULT_TRACKING_DIR
    record = run_sweep(
        load_sweep(args.sweep), tracking_dir, workers=args.workers, **compile_arguments(args), only=args.row
    )
    rows = rows_on_record(record_path(tracking_dir, record["sweep"]), RowRecord)
    show(planned_ranking(list(rows.values())))
    page = write_sweep_page(record, tracking_dir)
    write_report(args.json, record)
    console.print(f"wrote {page}", highlight=False)
    return 1 if any(row["status"] == FAILED for row in record["rows"]) else 0


def _published(args: argparse.Namespace) -> int:
    from tomat.app.plan_step import compile_arguments
    from tomat.base.report.model import Table
    from tomat.base.report.terminal import show
    from tomat.perf.tuning.published_runs import keep_runs, published_sweep, read_published_runs
    from tomat.perf.tuning.sweep import run_sweep
    from tomat.perf.tuning.sweep_rows import FAILED
    from tomat.report.pages.sweep_pages import write_published_page

    runs, wrong = read_published_runs(args.runs)
    for line in wrong:
        console.print(f"left out: {line}", soft_wrap=True, highlight=False)
    tracking_dir = args.tracking_dir or DEFAULT_TRACKING_DIR
    keep_runs(tracking_dir, runs)
    how = compile_arguments(args)
    record = run_sweep(published_sweep(runs), tracking_dir, workers=args.workers, **how, only=args.row)
    page, report = write_published_page(tracking_dir)
    show(*(part for part in report.sections[1].parts if isinstance(part, Table)))
    write_report(args.json, {**report.figures, "left_out": wrong})
    console.print(f"wrote {page}", highlight=False)
    return 1 if any(row["status"] == FAILED for row in record["rows"]) else 0


def _calibrate(args: argparse.Namespace) -> int:
    from tomat.app.plan_step import compile_arguments
    from tomat.report.pages.calibration_page import calibrate, calibrate_kernels

    tracking_dir = args.tracking_dir or DEFAULT_TRACKING_DIR
    how = compile_arguments(args)
    if args.kernels is not None:
        record = calibrate_kernels(args.kernels, tracking_dir, chips=args.chip, workers=args.workers, **how)
    else:
        added = [] if args.record is None else _measurements(args.record)
        with Stages() as stages:
            record = calibrate(tracking_dir, added=added, only_new=not args.calibrate, on_stage=stages.show, **how)
        from tomat.perf.tuning.published_runs import RUNS_FILE
        from tomat.report.pages.sweep_pages import write_published_page

        if (tracking_dir / RUNS_FILE).is_file():
            console.print(f"wrote {write_published_page(tracking_dir)[0]}", highlight=False)
    write_report(args.json, record)
    return 0


def _measurements(path: Path) -> "list[CalibrationRow]":
    """The measurements of a run's folder, or of a record of the lab."""
    from tomat.measure.lab.measurements import measured_steps
    from tomat.perf.plan.calibration import row_of_run

    if path.suffix != ".json":
        return [row_of_run(path)]
    rows, refused = measured_steps(path)
    for name, why in refused.items():
        console.print(f"left out: {name}: {why}", soft_wrap=True, highlight=False)
    return rows


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
    from tomat.train.settings.keys import check_words

    if (args.config_path is None) == (args.like is None):
        raise TomatError("give --config_path with a training configuration, or --like with a run's folder.")
    path = args.config_path if args.like is None else args.like / CONFIG_FILE
    # Checked before JAX and Levanter are imported, which takes seconds.
    check_words(path, overrides)
    _say_withheld()

    from tomat.base.report.terminal import show
    from tomat.perf.plan.plan_cache import default_cache_dir, find_report, keep_report
    from tomat.report.plan import trials_part
    from tomat.report.terminal import print_decoders, print_plan

    if args.tracking_dir is not None:
        overrides = [*overrides, "--tracking_dir", str(args.tracking_dir)]
    if args.max_batch:
        from tomat.app.plan_step import max_batch

        return max_batch(args, path, overrides)
    cache, key = args.cache_dir or default_cache_dir(), _question(args, path, overrides)
    writes = args.docs or args.emit is not None or args.executable is not None
    report = find_report(cache, key) if key is not None and not writes else None
    plan = None
    if args.decode is not None:
        if report is None:
            from tomat.app.plan_step import compile_decoders

            report = compile_decoders(args, path, overrides)
        else:
            for one in report["decoders"].values():
                one["cached"] = True
        print_decoders(report, args.top)
    else:
        if report is None:
            from tomat.app.plan_step import compile_plan

            plan, report = compile_plan(args, path, overrides)
        else:
            report["cached"] = True
        print_plan(report, args.top)
        if not report["fits"] and not args.no_search:
            if "nearest_fits" not in report:
                from tomat.app.plan_step import search

                report["nearest_fits"] = search(args, path, overrides)
            show(trials_part(report["nearest_fits"]))
    if key is not None:
        keep_report(cache, key, report)
    write_report(args.json, report)
    if plan is not None:
        from tomat.app.plan_step import write_outputs

        write_outputs(args, plan)
    return 0 if report["fits"] else 1


def _question(args: argparse.Namespace, path: Path, overrides: list[str]) -> str | None:
    """The cache key of what was asked; None if the compiler is missing, so that the compile reports that."""
    from tomat.base.overrides import parse_overrides, read_yaml
    from tomat.perf.cost.chip_model import record_digest
    from tomat.perf.plan.calibration import Calibration
    from tomat.perf.plan.plan_cache import question_key

    if importlib.util.find_spec("libtpu") is None:
        return None
    files = (args.structure, args.codec)
    structure, codec = (one and hashlib.sha256(one.read_bytes()).hexdigest() for one in files)
    question = {
        "config": read_yaml(path, "train"),
        "overrides": parse_overrides(overrides),
        "slice": args.slice,
        "decode": [args.decode, args.grid, args.atoms, structure, args.rounds, args.kv_cache_dtype],
        "calibration": repr(Calibration.load(args.tracking_dir or DEFAULT_TRACKING_DIR)),
        "timed_kernels": record_digest(args.tracking_dir or DEFAULT_TRACKING_DIR),
        "codec": codec,
    }
    return question_key(question)


def _say_withheld() -> None:
    """List the environment variables that would affect a run here but not a plan. Called before JAX sets its own."""
    from tomat.perf.plan.compile.topology import withheld_variables

    if not chosen.quiet and (names := withheld_variables()):
        what = f"environment variables that the compile does not see: {', '.join(names)}"
        where = "set what changes a step in the configuration (compiler.*, trainer.jax_config)"
        print(f"note: {what}; {where}", file=sys.stderr)
