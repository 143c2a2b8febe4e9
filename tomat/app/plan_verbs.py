"""`tomat plan`: what a training step needs on a TPU slice, without the slice."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import (
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
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tomat.hardware.chips import Slice
    from tomat.planning.compile.process import Limits
    from tomat.planning.plan import Plan
    from tomat.training.config import TrainConfig
    from tomat.tuning.search import Compile

EPILOG = """\
forms:
  tomat plan --config_path CONFIG [--slice v6e-16] [--a.b VALUE ...]   one step: memory, cycles, MFU
  tomat plan --like RUN [--a.b VALUE ...]                              the step of an existing run
  tomat plan --config_path CONFIG --max_batch [--policies full,off]   the largest batch that fits
  tomat plan --sweep configs/sweeps/mfu-200m.yaml                      many steps, ranked, with a page
  tomat plan --calibrate | --record RUN                                plan and measurement side by side
  tomat plan compare A B       two plans, profiles or breakdowns; exit status 1 if B's step grew

Plans are cached in ~/.cache/tomat/plan, by the lowered program, the compiler and its flags; beyond --cache_gib the
least recently used are removed. No variable of this environment decides the step: the configuration does.
"""

DEFAULT_TRACKING_DIR = Path("docs/tracking")


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add `tomat plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="compile the training step for a TPU slice without one: memory, cycles, MFU",
        description="Compile the training step for a TPU slice on a machine without one, and say whether it fits, "
        "where its cycles go and which MFU to expect.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's arguments, for the launcher as well."""
    what = parser.add_argument_group("what to plan")
    what.add_argument(
        "--config_path",
        type=config_file("configs/train/"),
        help="a training configuration; overrides (--a.b VALUE) follow",
    )
    what.add_argument("--like", type=run_folder, metavar="RUN", help="a run's folder: its configuration")
    what.add_argument("--slice", help="accelerator type, such as v6e-16; default: the configuration's")
    what.add_argument(
        "--codec", type=existing_file, metavar="FILE", help="codec.json, for the densities in --executable"
    )
    what.add_argument("--sweep", type=existing_file, metavar="FILE", help="plan every row of a sweep")
    what.add_argument(
        "--row", action="append", default=[], metavar="NAME", help="of --sweep: only this row; repeatable"
    )
    what.add_argument(
        "--workers", type=positive_int, default=1, help="rows of a sweep at once (default 1: one uses two cores)"
    )
    what.add_argument("--max_batch", action="store_true", help="find the largest batch that fits")
    what.add_argument("--policies", default="", help="with --max_batch: checkpoint policies, comma-separated")
    what.add_argument("--no_search", action="store_true", help="if it does not fit, do not look for what would")
    what.add_argument("--calibrate", action="store_true", help="plan every measured step again, and write the page")
    what.add_argument("--record", type=Path, metavar="RUN", help="add a measured run to the calibration")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=report_file, metavar="FILE", help="write the plan; bytes, seconds, fractions")
    out.add_argument("--top", type=count, default=12, help="operations and buffers to print (default 12)")
    out.add_argument("--docs", action="store_true", help="write the plan's page into the tracking folder")
    out.add_argument("--tracking_dir", type=Path, help=f"tracking folder (default: {DEFAULT_TRACKING_DIR})")
    out.add_argument(
        "--emit", type=output_file, metavar="FILE", help="write the planned configuration, ready for the pod"
    )
    out.add_argument("--executable", type=output_file, metavar="FILE", help="write the serialised executable")
    limits = parser.add_argument_group("limits of a compile")
    limits.add_argument(
        "--time_limit_seconds", type=positive_float, default=1800.0, help="longest compile (default: 1800)"
    )
    limits.add_argument(
        "--memory_limit_gib", type=positive_float, default=16.0, help="most memory of this machine (default: 16)"
    )
    limits.add_argument("--cache_dir", type=Path, help="what was planned before (default: ~/.cache/tomat/plan)")
    limits.add_argument("--cache_gib", type=positive_float, default=2.0, help="what the cache may hold (default 2)")
    parser.add_argument("--warn_percent", type=percent, default=2.0, help="compare: growth of A's step that warns")
    parser.add_argument("--fail_percent", type=percent, default=5.0, help="compare: growth of A's step that fails")
    parser.set_defaults(run=run_plan, takes_overrides=True, device_kind=None)


def run_plan(args: argparse.Namespace) -> int:
    """Dispatch the forms."""
    overrides = list(getattr(args, "overrides", []))
    # A positional argument would swallow the values of overrides, which argparse does not know.
    if overrides[:1] == ["compare"]:
        return _compare(args, overrides[1:])
    if args.row and args.sweep is None:
        raise TomatError(f"--row {args.row[0]} is a row of a sweep; give its file with --sweep.")
    if args.sweep is not None:
        return _sweep(args, overrides)
    if args.calibrate or args.record is not None:
        return _calibrate(args, overrides)
    return _plan(args, overrides)


def _limits(args: argparse.Namespace) -> Limits:
    from tomat.planning.compile.process import Limits
    from tomat.planning.plan_cache import GIB

    return Limits(args.time_limit_seconds, int(args.memory_limit_gib * GIB), int(args.cache_gib * GIB))


def _refuse_overrides(overrides: list[str], form: str) -> None:
    if overrides:
        raise TomatError(f"{form} takes no overrides; got {' '.join(overrides)}.")


def _compare(args: argparse.Namespace, words: list[str]) -> int:
    from tomat.app.profile_verbs import compare_targets

    if len(words) != 2:
        raise TomatError(f"compare takes two plans, profiles or breakdowns, got {len(words)}: {' '.join(words)}.")
    return compare_targets(args, words[0], words[1])


def _sweep(args: argparse.Namespace, overrides: list[str]) -> int:
    from tomat.tuning.sweep import run_sweep

    _refuse_overrides(overrides, "--sweep")
    _say_withheld()
    return run_sweep(
        args.sweep,
        args.tracking_dir or DEFAULT_TRACKING_DIR,
        workers=args.workers,
        cache_dir=args.cache_dir,
        limits=_limits(args),
        json=args.json,
        only=args.row,
    )


def _calibrate(args: argparse.Namespace, overrides: list[str]) -> int:
    from tomat.base.reporting import write_json
    from tomat.base.stages import Stages
    from tomat.planning.calibration_page import calibrate

    _refuse_overrides(overrides, "--calibrate")
    _say_withheld()
    with Stages() as stages:
        record = calibrate(
            args.tracking_dir or DEFAULT_TRACKING_DIR,
            run_dir=args.record,
            only_new=not args.calibrate,
            cache_dir=args.cache_dir,
            limits=_limits(args),
            on_stage=stages.show,
        )
    if args.json is not None:
        write_json(args.json, record)
    return 0


def _config_file(args: argparse.Namespace) -> Path:
    if (args.config_path is None) == (args.like is None):
        raise TomatError("give --config_path with a training configuration, or --like with a run's folder.")
    if args.config_path is not None:
        return args.config_path
    path = args.like / CONFIG_FILE
    if not path.is_file():
        raise TomatError(f"{path} does not exist; expected the folder of a run that `tomat train` made.")
    return path


def _load(path: Path, overrides: list[str], slice_name: str | None) -> tuple[TrainConfig, Slice]:
    from tomat.planning.compile.topology import planned_slice
    from tomat.training.config import load_config

    config = load_config(path, overrides)
    return config, planned_slice(config, slice_name)


def _plan(args: argparse.Namespace, overrides: list[str]) -> int:
    from tomat.app.config_keys import check_words

    path = _config_file(args)
    # Before the seconds that importing JAX and Levanter takes.
    check_words(path, overrides)
    _say_withheld()

    from tomat.app.plan_tables import print_plan, print_trials
    from tomat.base.reporting import write_json
    from tomat.planning.compile.compiler import default_cache_dir
    from tomat.planning.plan_cache import find_report, keep_report

    if args.tracking_dir is not None:
        overrides = [*overrides, "--tracking_dir", str(args.tracking_dir)]
    if args.max_batch:
        return _max_batch(args, path, overrides)
    cache, key = args.cache_dir or default_cache_dir(), _question(args, path, overrides)
    writes = args.docs or args.emit is not None or args.executable is not None
    report = find_report(cache, key) if key is not None and not writes else None
    plan = None
    if report is None or "fits" not in report:
        plan, report = _compile_plan(args, path, overrides)
    else:
        report["cached"] = True
    print_plan(report, args.top)
    if not report["fits"] and not args.no_search:
        if "nearest_fits" not in report:
            report["nearest_fits"] = _search(args, path, overrides)
        print_trials(report["nearest_fits"])
    if key is not None:
        keep_report(cache, key, report)
    if args.json is not None:
        write_json(args.json, report)
    if plan is not None:
        _write(args, plan)
    return 0 if report["fits"] else 1


def _question(args: argparse.Namespace, path: Path, overrides: list[str]) -> str | None:
    """Names what is asked; None where the compiler is missing, so that the compile says so."""
    import hashlib
    import importlib.util

    from tomat.base.overrides import parse_overrides, read_yaml
    from tomat.planning.calibration import Calibration
    from tomat.planning.sources import question_key

    if importlib.util.find_spec("libtpu") is None:
        return None
    return question_key(
        {
            "config": read_yaml(path, "configs/train/"),
            "overrides": parse_overrides(overrides),
            "slice": args.slice,
            "calibration": repr(Calibration.load(args.tracking_dir or DEFAULT_TRACKING_DIR)),
            "codec": hashlib.sha256(args.codec.read_bytes()).hexdigest() if args.codec is not None else None,
        }
    )


def _compile_plan(args: argparse.Namespace, path: Path, overrides: list[str]) -> tuple[Plan, dict[str, Any]]:
    """The plan and its report."""
    from tomat.base.stages import Stages

    limits = _limits(args)
    with Stages() as stages:
        stages.show("plan", "importing JAX and reading the configuration")
        from tomat.planning.plan import make_plan

        config, slice_ = _load(path, overrides, args.slice)
        table = None
        if args.codec is not None:
            from tomat.codec.files import load_codec
            from tomat.training.datasets import value_table

            table = value_table(load_codec(str(args.codec)))
        stages.done("plan")
        what = f"{config.run_name} on {slice_.name}"
        stages.show(what, "looking into the cache, else starting the compiler")
        plan = make_plan(
            config,
            slice_,
            cache_dir=args.cache_dir,
            limits=limits,
            value_table=table,
            executable=args.executable is not None,
            on_stage=lambda stage: stages.show(what, stage),
        )
        stages.show(what, "estimating")
        return plan, plan.to_dict()


def _say_withheld() -> None:
    """Say which variables of this environment a run here would obey, and a plan does not; before JAX sets its own."""
    from rich.console import Console

    from tomat.planning.compile.topology import withheld_variables

    names = withheld_variables()
    if names:
        Console(stderr=True).print(
            f"note: set in this environment and kept from the compile: {', '.join(names)}; what decides a step is in "
            "the configuration (compiler.*, trainer.jax_config)",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _search(args: argparse.Namespace, path: Path, overrides: list[str]) -> list[dict[str, Any]]:
    from tomat.base.stages import Stages
    from tomat.planning.compile.compiler import compile_step
    from tomat.tuning.search import nearest_fits

    what = "looking for what fits"
    with Stages() as stages:
        config, slice_ = _load(path, overrides, args.slice)
        on_stage = partial(stages.show, what)
        trials = nearest_fits(
            config,
            slice_,
            _compile_memory(args, on_stage),
            lambda overrides: stages.show(what, " ".join(f"{k}={v}" for k, v in overrides.items())),
            compile_whole=partial(compile_step, cache_dir=args.cache_dir, limits=_limits(args), on_stage=on_stage),
        )
    return [trial.to_dict() for trial in trials]


def _compile_memory(args: argparse.Namespace, on_stage: Callable[[str], None]) -> Compile:
    """What the searches compile with: until the memory is known."""
    from tomat.planning.compile.compiler import compile_step

    return partial(compile_step, cache_dir=args.cache_dir, limits=_limits(args), memory_only=True, on_stage=on_stage)


def _max_batch(args: argparse.Namespace, path: Path, overrides: list[str]) -> int:
    from tomat.app.plan_tables import print_largest
    from tomat.base.reporting import write_json
    from tomat.base.stages import Stages
    from tomat.tuning.search import largest_batch

    words = [word for word in args.policies.split(",") if word]
    policies = [{"true": True, "false": False}.get(word, word) for word in words] or None
    with Stages() as stages:
        stages.show("largest batch", "importing JAX and reading the configuration")
        config, slice_ = _load(path, overrides, args.slice)
        found = largest_batch(
            config,
            slice_,
            _compile_memory(args, partial(stages.show, "largest batch")),
            policies,
            lambda overrides: stages.show("largest batch", " ".join(f"{k}={v}" for k, v in overrides.items())),
        )
    print_largest(found)
    if args.json is not None:
        write_json(args.json, {"slice": slice_.name, "largest_batches": [one.to_dict() for one in found]})
    return 0 if all(one.fits is not None for one in found) else 1


def _write_page(plan: Plan) -> Path:
    """The plan's page in the tracking folder, `<run_name>-plan.md`."""
    import tempfile

    import yaml

    from tomat.base.reporting import write_text
    from tomat.tracking.report import write_run_page
    from tomat.training.config import config_hash

    figures = None
    if plan.step_seconds is not None:
        utilisation = {key: value.estimate for key, value in plan.utilisation.items()}
        tokens = plan.work.tokens / plan.step_seconds.estimate
        figures = {
            **plan.work.to_dict(),
            **utilisation,
            "slice": plan.slice_.name,
            "step_seconds": plan.step_seconds.estimate,
            "tokens_per_second_per_chip": tokens / plan.slice_.n_chips,
        }
    with tempfile.TemporaryDirectory() as folder:
        write_text(Path(folder) / CONFIG_FILE, yaml.safe_dump(plan.config.to_dict(), sort_keys=False))
        return write_run_page(
            Path(folder),
            Path(plan.config.tracking_dir),
            plan.breakdown,
            figures,
            run_name=f"{plan.config.run_name}-plan",
            baseline=plan.config.baseline,
            config_hash=config_hash(plan.config),
            kind="predicted",
        )


def _write(args: argparse.Namespace, plan: Plan) -> None:
    """Write the page, the configuration and the executable that were asked for."""
    import shutil

    import yaml

    from tomat.base.reporting import console, write_text

    if args.docs:
        console.print(f"wrote {_write_page(plan)}", highlight=False)
    if args.emit is None and args.executable is None:
        return
    seconds, memory = plan.step_seconds, plan.compiled.memory
    if seconds is None:
        raise TomatError("the step does not fit; nothing was emitted. The changes above would.")
    if args.emit is not None:
        head = (
            f"# Planned for {plan.slice_.name} with {plan.compiled.compiler}: "
            f"{memory.required_bytes / 2**30:.2f} of {memory.capacity_bytes / 2**30:.2f} GiB, "
            f"step {seconds.estimate:.3f} s ({seconds.low:.3f} to {seconds.high:.3f}), program {plan.compiled.key}.\n"
        )
        values = {**plan.config.to_dict(), "slice": plan.slice_.name}
        write_text(args.emit, head + yaml.safe_dump(values, sort_keys=False))
        console.print(f"wrote {args.emit}", highlight=False)
    if args.executable is not None:
        args.executable.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(plan.compiled.executable_file, args.executable)
        console.print(f"wrote {args.executable}", highlight=False)
