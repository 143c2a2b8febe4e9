"""From densities to an evaluated model: trains, evaluates held-out materials, draws them, and writes the run's page."""

import datetime
import math
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.base.layout import EVALUATION_FILE, HTML_FILE, PROFILER_FOLDER, TRACKING_FOLDER, WEIGHTS_FOLDER
from tomat.base.reporting import console, to_jsonable, warn, write_json

if TYPE_CHECKING:  # imported only when a run needs them
    from tomat.train.loop import TrainResult
    from tomat.train.origins import Continuation
    from tomat.train.preemption import StopRequest
    from tomat.train.runs.run_log import Asked
    from tomat.train.settings.config import TrainConfig


def train_and_report(
    config: "TrainConfig",
    started: float,
    continuation: "Continuation | None" = None,
    stop: "StopRequest | None" = None,
    asked: "Asked | None" = None,
) -> dict[str, Any]:
    """Train, evaluate, draw and write the page. Returns the run's figures, with units in the keys. `started` is
    `time.monotonic()` when the user's command began, for `total_seconds`. `stop` listens to SIGTERM (None: only the
    training does). `asked` tells the log of the output folder how the run was started (None: from Python)."""
    import jax

    from tomat.app.workflow.folder_run import prepared
    from tomat.app.workflow.held_out import evaluate_held_out, held_out_materials
    from tomat.app.workflow.run_page import write_training_page
    from tomat.app.workflow.wandb_page import keep_pages
    from tomat.base.documents import with_checksum
    from tomat.base.report.terminal import show
    from tomat.base.storage import is_remote
    from tomat.predict.evaluation.result import MOST_SHOWN
    from tomat.report.html.document import write_page
    from tomat.report.html.run import run_page
    from tomat.train.folder import PAGE_FILES, RunFolder, publish
    from tomat.train.run import train

    config, data = prepared(config)
    open_subject = None
    if config.distillation is not None:
        from tomat.predict.distillation.subject import open_subject
    result = train(config, continuation, stop, asked, open_subject)
    if config.distillation is not None and not result.preempted and jax.process_index() == 0:
        from tomat.predict.distillation.subject import write_distilled
        from tomat.predict.weights.record import is_weights_folder, read_weights_record

        weights = result.run_dir / WEIGHTS_FOLDER
        # A run that was continued with more steps has the weights of its earlier end.
        if not is_weights_folder(weights) or read_weights_record(weights).step != result.steps - 1:
            shutil.rmtree(weights, ignore_errors=True)
            write_distilled(result.run_dir, weights)
        console.print(f"weights: {weights}", soft_wrap=True)
    # After SIGTERM the steps are saved, and the rest of the grace period is for the pages.
    profile_page = write_profile_page(config, result)
    evaluation = free_running = None
    held = None if result.preempted else held_out_materials(config, data)
    if held is not None:
        evaluation, free_running = evaluate_held_out(config, result.run_dir, held)
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
        write_json(result.run_dir / EVALUATION_FILE, with_checksum(to_jsonable(found)))
        RunFolder.of(config).log_end()
    if jax.process_index() == 0:
        page = write_training_page(config, result, evaluation, free_running)
        if not result.preempted:  # for a long log it takes half a minute, too long for a grace period
            try:
                write_page(result.run_dir / HTML_FILE, run_page(str(result.run_dir), config.run_dir))
            except TomatError as error:  # the run is complete without this page
                warn(f"no {HTML_FILE}: {error}")
        if is_remote(config.output_dir):
            publish(config.run_dir, result.run_dir, PAGE_FILES)
            if profile_page is not None:
                # The names of its record and its figures also begin with the run's name.
                RunFolder.of(config).publish_tree(Path(config.tracking_dir), TRACKING_FOLDER, f"**/{config.run_name}*")
        if not result.preempted:
            keep_pages(config, result.run_dir)
        for each in filter(None, (evaluation, free_running)):
            show(each.table(MOST_SHOWN), each.summary())
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
    """` (2.3 times lower)` or ` (1.1 % higher)`; empty if the losses are equal or have no meaningful ratio."""
    if not (math.isfinite(first) and math.isfinite(last) and first > 0 and last > 0):
        return ""
    if first >= 1.5 * last:
        return f" ({first / last:.1f} times lower)"
    percent = 100 * abs(last / first - 1)
    if percent < 0.05:
        return ""
    return f" ({percent:.1f} % {'lower' if last < first else 'higher'})"


def mfu_if_known(run_dir: Path) -> dict[str, Any] | None:
    """The figures for the page of a run's profile; None, with a warning, if there are none."""
    from tomat.app.workflow.public import mfu

    try:
        return mfu(run_dir)
    except TomatError as error:
        warn(f"the page of the profile has no MFU: {error}")
        return None


def write_profile_page(config: "TrainConfig", result: "TrainResult") -> Path | None:
    """Write the tracking page of a profiled run: where the time of a step went, and the MFU by every convention."""
    import jax

    from tomat.base.shipped import commit
    from tomat.perf.profile.load import load_breakdown
    from tomat.report.pages.report import write_run_page
    from tomat.train.settings.config import config_hash

    if jax.process_index() != 0 or not any((result.run_dir / PROFILER_FOLDER).rglob("*.xplane.pb")):
        return None
    try:
        breakdown = load_breakdown(str(result.run_dir))
        return write_run_page(
            result.run_dir,
            Path(config.tracking_dir),
            breakdown,
            mfu_if_known(result.run_dir),
            run_name=config.run_name,
            baseline=config.baseline,
            commit=commit(),
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            config_hash=config_hash(config),
        )
    except TomatError as error:
        # The run itself is complete. A trace that cannot be read must not make it look failed.
        warn(f"no profile page: {error}")
        return None
