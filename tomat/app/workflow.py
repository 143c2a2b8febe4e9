"""From densities to an evaluated model: train, evaluate what was held out, draw it, and write the run's page.

The one module that knows all rooms; the rooms know only those before them.
"""

import argparse
import datetime
import math
import shlex
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.arguments import config_file, count, report_file
from tomat.base.layout import EVALUATION_FILE, METRICS_FILE, PROFILER_FOLDER

if TYPE_CHECKING:  # the verb pays for these only when it runs
    from tomat.training.config import TrainConfig
    from tomat.training.loop import TrainResult
    from tomat.training.origins import Continuation
    from tomat.training.preemption import StopRequest

DEFAULT_CONFIG = Path("configs/train/demo.yaml")


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the verb `train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a model, evaluate it on held-out materials, write the run's page",
        description="Train a model, evaluate it on held-out materials and write the run's page. The same run_name "
        "continues the same run, from its newest whole checkpoint. Any setting of the configuration can follow as "
        "--a.b VALUE.",
        epilog="Settings: tomat/training/config.py documents every field.",
    )
    parser.add_argument(
        "--config_path",
        type=config_file("configs/train/"),
        metavar="FILE",
        help=f"configuration (default: {DEFAULT_CONFIG} of a checkout)",
    )
    parser.add_argument("--json", type=report_file, metavar="FILE", help="write the figures of the run")
    parser.add_argument(
        "--allow_change",
        default="",
        metavar="KEY[,KEY...]",
        help="settings, such as optimizer.learning_rate, that may differ from those the run began with; recorded",
    )
    parser.add_argument(
        "--fork",
        metavar="NEW_NAME",
        help="begin run NEW_NAME with model, optimizer state and step of a checkpoint of the run that run_name names",
    )
    parser.add_argument(
        "--fork_step", type=count, metavar="N", help="fork checkpoint step-N (default: the newest whole one)"
    )
    parser.add_argument(
        "--warm_start",
        metavar="RUN_OR_CHECKPOINT",
        help="begin a new run with the weights alone of another one: fresh optimizer, step 0, its own warm-up",
    )
    parser.add_argument(
        "--plan_first",
        action="store_true",
        help="compile the step for the configured TPU slice first, and do not start a run that cannot fit",
    )
    parser.set_defaults(run=run_train, takes_overrides=True)


def run_train(args: argparse.Namespace) -> int:
    """Load the configuration and run the workflow."""
    from tomat.app.config_keys import check_words
    from tomat.base.errors import TomatError
    from tomat.workflow.folder_run import folder_words

    path = args.config_path or DEFAULT_CONFIG
    if args.config_path is None and not path.exists():
        raise TomatError(f"{DEFAULT_CONFIG} is not here; name a configuration with --config_path.")
    started = time.monotonic()
    if args.fork_step is not None and args.fork is None:
        raise TomatError("--fork_step needs --fork NEW_NAME.")
    # Before the seconds that importing JAX and Levanter takes.
    check_words(path, args.overrides)
    overrides = folder_words(path, args.overrides)

    from tomat.base.reporting import console, write_report
    from tomat.training.config import load_config
    from tomat.training.origins import Continuation
    from tomat.training.preemption import StopRequest

    config = load_config(path, overrides)
    fork_of = None
    if args.fork is not None:
        fork_of = config.run_name
        config = load_config(path, [*overrides, "--run_name", args.fork])
    if args.plan_first:
        refuse_what_cannot_fit(config)
    allow = tuple(key for key in args.allow_change.split(",") if key)
    continuation = Continuation(allow, fork_of, args.fork_step, args.warm_start)
    stop = StopRequest(config.preemption.grace_seconds)
    try:
        with stop.listening():
            figures = train_and_report(config, started, continuation, stop)
            write_report(args.json, figures)
        return stop.status if figures["training"]["preempted"] else 0
    finally:
        if stop.asked:
            said = f"the same command continues the run: {shlex.join(['tomat', *args.words])}"
            console.print(said, soft_wrap=True, markup=False, highlight=False)


def refuse_what_cannot_fit(config: "TrainConfig") -> None:
    """Plan the run's step for its slice (`tomat plan`), on the machine that is about to run it or another.

    Raises:
        TomatError: The step needs more memory than a chip has, or cannot be planned.
    """
    from tomat.base.errors import TomatError
    from tomat.base.reporting import console
    from tomat.base.stages import Stages
    from tomat.planning.compile.compiler import compile_step
    from tomat.planning.compile.topology import planned_slice

    slice_ = planned_slice(config, None)
    what = f"planning {config.run_name} on {slice_.name}"
    with Stages() as stages:
        step = compile_step(config, slice_, memory_only=True, on_stage=lambda stage: stages.show(what, stage))
    memory = step.memory
    said = f"{memory.required_bytes / 2**30:.2f} of {memory.capacity_bytes / 2**30:.2f} GiB of each device"
    if not step.fits:
        raise TomatError(
            f"run '{config.run_name}' does not fit {slice_.name}: it needs {said}. "
            "`tomat plan` with the same arguments looks for the nearest changes that do."
        )
    console.print(f"planned: needs {said}")


def train_and_report(
    config: "TrainConfig",
    started: float,
    continuation: "Continuation | None" = None,
    stop: "StopRequest | None" = None,
) -> dict[str, Any]:
    """Train, evaluate, draw, write the page.

    Args:
        config: The run.
        started: `time.monotonic()` when the user's command began, for `total_seconds`.
        continuation: Allowed changes, a fork, a warm start; None: none of them.
        stop: Listening to SIGTERM; None: only the training does.

    Returns:
        The run's figures, units in the keys.
    """
    import jax

    from tomat.base.reporting import console, write_json
    from tomat.runs.published import PAGE_FILES, is_remote, publish
    from tomat.training.run import train
    from tomat.workflow.folder_run import prepared
    from tomat.workflow.held_out import evaluate_held_out, held_out_materials
    from tomat.workflow.run_page import write_training_page

    config, data = prepared(config)
    result = train(config, continuation, stop)
    # After SIGTERM what is left of the grace is for the pages: the steps are saved.
    profile_page = write_profile_page(config, result)
    evaluation = free_running = None
    held = None if result.preempted else held_out_materials(config, data)
    if held is not None:
        evaluation, free_running = evaluate_held_out(config, result, held)
    figures: dict[str, Any] = {
        "run": config.run_name,
        "training": {key: value for key, value in asdict(result).items() if key != "run_dir"},
        "total_seconds": time.monotonic() - started,
    }
    found = {} if evaluation is None else evaluation.to_dict()
    if free_running is not None:
        found["free_running"] = free_running.to_dict()
    if found:
        figures["evaluation"] = found
        write_json(result.run_dir / EVALUATION_FILE, found)
    if jax.process_index() == 0:
        page = write_training_page(config, result, evaluation, free_running)
        if is_remote(config.output_dir):
            publish(config.run_dir, result.run_dir, PAGE_FILES)
        if evaluation is not None:
            console.print(evaluation.table())
        if free_running is not None:
            console.print(free_running.table())
        if result.first_step < result.steps:
            console.print(
                f"loss {result.first_loss:.4f} -> {result.last_loss:.4f}"
                f"{loss_change(result.first_loss, result.last_loss)} in {result.train_seconds:.0f} s of training"
                + (f" from step {result.first_step}" if result.first_step else "")
                + f"; {figures['total_seconds']:.0f} s since the command began."
            )
        console.print(f"page: {page}" + (f", profile: {profile_page}" if profile_page is not None else ""))
    return figures


def loss_change(first: float, last: float) -> str:
    """` (2.3 times lower)`, ` (1.1 % higher)`; nothing where the two are equal or a ratio says nothing."""
    if not (math.isfinite(first) and math.isfinite(last) and first > 0 and last > 0):
        return ""
    if first >= 1.5 * last:
        return f" ({first / last:.1f} times lower)"
    percent = 100 * abs(last / first - 1)
    if percent < 0.05:
        return ""
    return f" ({percent:.1f} % {'lower' if last < first else 'higher'})"


def write_profile_page(config: "TrainConfig", result: "TrainResult") -> Path | None:
    """The tracking page of a run that was profiled: where each cycle of a step went, and the MFU by every convention.

    Returns:
        The page; None where nothing was profiled, or on a process that is not the first.
    """
    import jax

    from tomat.app.profile_verbs import load_breakdown
    from tomat.base.errors import TomatError
    from tomat.base.reporting import console
    from tomat.hardware.chips import slice_named
    from tomat.hardware.mfu import RunTimes, run_report
    from tomat.runs.log_lines import read_metrics
    from tomat.tracking.report import write_run_page
    from tomat.training.config import config_hash
    from tomat.training.mfu import step_work

    if jax.process_index() != 0 or not any((result.run_dir / PROFILER_FOLDER).rglob("*.xplane.pb")):
        return None
    work = step_work(config, jax.devices()[0].platform)
    times = RunTimes.from_rows(read_metrics(result.run_dir / METRICS_FILE))
    mfu = run_report(work, times, slice_named(config.slice) if config.slice is not None else None)
    try:
        breakdown = load_breakdown(str(result.run_dir))
        return write_run_page(
            result.run_dir,
            Path(config.tracking_dir),
            breakdown,
            mfu,
            run_name=config.run_name,
            baseline=config.baseline,
            commit=_commit(),
            date=datetime.date.today().isoformat(),
            config_hash=config_hash(config),
        )
    except TomatError as error:
        # The run itself is whole; a trace that cannot be read must not make it look failed.
        console.print(f"[yellow]warning:[/yellow] no profile page: {error}")
        return None


def _commit() -> str:
    """The commit of the code that runs, `-dirty` with local changes; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
