"""The runs behind the comparison: each a `tomat train` in a process of its own, continued where it was stopped."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from tomat.base.checked_json import parse_checked
from tomat.base.documents import flatten, read_bytes
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, EVALUATION_FILE, STOPPED_STATUS
from tomat.measure.bench.numerics.variants import PlannedRun
from tomat.measure.bench.processes import end_of, started, tomat_command
from tomat.predict.evaluation.result import TeacherForcedResult
from tomat.train.runs.record import RunRecord, read_record

LOCK_FILE = "numerics.lock"
LOGS_DIR = "logs"
SETTLED_ELSEWHERE = ("output_dir", "tracking_dir", "purpose")
"""Keys of a configuration that say nothing about how a run computes."""
OF_THE_FOLDER = ("data.n_density_tokens", "model.environment.max_atoms", "model.environment.max_elements")
"""Keys that a run on a folder of densities sets by what it finds there (`app/workflow/folder_run.py`)."""


class RunFailed(TomatError):
    """A run that ended with an error of its own; starting it again would fail again."""


@dataclass(frozen=True)
class FinishedRun:
    """What one run left."""

    losses: np.ndarray
    """Training loss of every step, float64 [steps]."""
    held_out_nmae_median: float
    """Of the median decoder, teacher-forced, mean over the held-out materials; a fraction."""
    held_out_nemd: float
    """Mean over the held-out materials; a fraction."""
    devices: str
    """Such as `1 x cpu`."""
    train_seconds: float
    """Wall-clock of its steps, compilation and evaluation included."""


def read_finished(run: PlannedRun) -> FinishedRun | None:
    """The run's figures; None where it has not ended yet.

    Raises:
        TomatError: The folder holds a run of that name with other settings, or its files are damaged.
    """
    folder = Path(run.config.run_dir)
    if not (folder / CONFIG_FILE).exists():
        return None
    record = read_record(str(folder))
    _check_settings(run, record, folder)
    steps = run.config.trainer.num_train_steps
    if len(record.rows) < steps or not (folder / EVALUATION_FILE).exists():
        return None
    losses = {row["step"]: row.get("train/loss") for row in record.rows}
    missing = [step for step in range(steps) if losses.get(step) is None]
    if missing:
        raise TomatError(f"{folder} has no loss of step {missing[0]}; delete the folder and start again.")
    place = folder / EVALUATION_FILE
    evaluation = TeacherForcedResult.from_dict(
        parse_checked(read_bytes(place), str(place), "an evaluation", "Delete it and start again.")[0], place
    )
    started = [event for event in record.events if event["event"] in ("start", "resume")]
    return FinishedRun(
        losses=np.array([losses[step] for step in range(steps)], dtype=np.float64),
        held_out_nmae_median=evaluation.spread("teacher_forced_nmae_median").mean,
        held_out_nemd=evaluation.spread("teacher_forced_nemd").mean,
        devices=str(started[-1].get("devices", "")) if started else "",
        train_seconds=float(sum(row.get("wall_seconds") or 0.0 for row in record.rows)),
    )


def _check_settings(run: PlannedRun, record: RunRecord, folder: Path) -> None:
    from tomat.train.resume import plain_values
    from tomat.train.settings.config import config_from_dict

    # Read back once, as the recorded one has been: decoding settles 1 against 1.0.
    planned = flatten(plain_values(config_from_dict(run.config.to_dict())))
    recorded = flatten(plain_values(config_from_dict(record.config, str(folder / CONFIG_FILE))))
    left_out = {*SETTLED_ELSEWHERE, *(OF_THE_FOLDER if run.config.data.source == "folder" else ())}
    differing = sorted(
        key for key in planned.keys() | recorded.keys() if key not in left_out and planned.get(key) != recorded.get(key)
    )
    if differing:
        raise TomatError(
            f"{folder} holds a run with other settings ({', '.join(differing)}); name another --output_dir, or delete "
            "that folder."
        )


def train_all(runs: Sequence[PlannedRun], output_dir: Path, on_run: Callable[[PlannedRun, str], None]) -> None:
    """Train every run that has not ended, one after the other.

    Args:
        runs: In order.
        output_dir: Holds them; only one process trains in it at a time.
        on_run: Told of each run what becomes of it: `training`, then `done`.

    Raises:
        TomatError: A run that fails or is stopped, with the end of its log; what is done stays done.
    """
    with alone_in(output_dir) as lock:
        # Every folder is looked at before hours of work, so that one made otherwise is found first.
        for run in runs:
            read_finished(run)
        for run in runs:
            if read_finished(run) is None:
                on_run(run, "training")
                train_run(run, output_dir, lock)
            on_run(run, "done")


def train_run(run: PlannedRun, output_dir: Path, lock: IO[str]) -> None:
    """Train a run, or go on with it, in a process of its own.

    Args:
        run: What.
        output_dir: Holds it, and its log.
        lock: Of that folder.

    Raises:
        RunFailed: It ended with an error.
        TomatError: It was stopped, and has saved a checkpoint.
    """
    log = output_dir / LOGS_DIR / f"{run.name}.log"
    command = tomat_command("train", *run.words)
    # The child holds the lock too: killed alone, this process leaves a run that nobody else may touch yet. Stopped by
    # SIGTERM, the child saves a checkpoint.
    with started(command, log, end=subprocess.Popen.terminate, pass_fds=[lock.fileno()]) as process:
        status = process.wait()
    if status == STOPPED_STATUS:
        raise TomatError(f"run {run.name} was stopped and has saved a checkpoint; the same command goes on from there.")
    if status != 0:
        raise RunFailed(f"run {run.name} ended with status {status}; its log {log} ends:\n{end_of(log)}")
    if read_finished(run) is None:
        raise RunFailed(f"run {run.name} ended without all of its steps and its evaluation; see its log {log}.")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[IO[str]]:
    """The lock of a folder of runs, held while the context is open.

    Raises:
        TomatError: Another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise TomatError(
                f"another process trains in {folder} (it holds {LOCK_FILE}); wait for it, or name another --output_dir."
            ) from None
        yield file
