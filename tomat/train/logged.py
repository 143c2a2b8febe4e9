"""A run in the log of its output folder (`train/runs/run_log.py`): its start, and its end however it comes."""

import contextlib
import time
from collections.abc import Iterator

import jax

from tomat.base.errors import TomatError
from tomat.base.reporting import warn
from tomat.model.devices import found_devices
from tomat.train.folder import RunFolder
from tomat.train.runs.checkpoints import survey
from tomat.train.runs.devices import devices_details
from tomat.train.runs.figures import read_evaluation, run_figures
from tomat.train.runs.history import read_events
from tomat.train.runs.record import read_record
from tomat.train.runs.run_log import END, RESUME, RUN, START, Asked, append_line, machine
from tomat.train.runs.summary import summarise
from tomat.train.settings.config import config_hash


@contextlib.contextmanager
def logged(folder: RunFolder, asked: Asked, first_step: int) -> Iterator[None]:
    """Write that the run begins, or goes on, and while the context is left, how it ended; for the first process.

    Args:
        folder: Of the run, held by this process; its history does not have this start yet.
        asked: How the run was asked for.
        first_step: Steps done before.

    Raises:
        TomatError: The log cannot be written as the run begins. At its end that is a warning: its steps are saved.
    """
    config = folder.config
    before = any(event["event"] in (START, RESUME) for event in read_events(folder.path))
    append_line(
        config.output_dir,
        RUN,
        config.run_name,
        RESUME if before else START,
        step=first_step,
        command=asked.command,
        recipe=asked.recipe,
        settings=asked.settings,
        purpose=" ".join(config.purpose.split()),
        **devices_details(found_devices(), config.slice),
        configuration=config_hash(config),
        **machine(),
    )
    try:
        yield
    finally:
        log_end(folder)


def log_end(folder: RunFolder) -> None:
    """Write what the run has come to so far, as its folder says it; on the first process alone."""
    if jax.process_index() != 0:
        return
    config = folder.config
    try:
        record = read_record(str(folder.path))
        whole, partial = survey(config.run_dir, config.temporary_checkpoints)
        summary = summarise(record, whole, len(partial), time.time())
        figures = {"steps_done": summary.steps_done, "steps_total": summary.steps_total}
        figures |= run_figures(record.rows, read_evaluation(str(folder.path)), record.ran.rows)
        append_line(
            config.output_dir,
            RUN,
            config.run_name,
            END,
            step=summary.steps_done,
            status=summary.state,
            reason=summary.state_detail,
            figures=figures,
        )
    except TomatError as error:
        warn(f"the log of {config.output_dir} does not have this end: {error}")
