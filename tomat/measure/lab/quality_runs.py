"""The runs of a study of quality: each a `tomat train` in a process of its own, continued where it was stopped. They
train on training compounds alone, of which some are set aside to judge by."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tomat.base.documents import flatten
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, EVALUATION_FILE, STOPPED_STATUS
from tomat.base.reporting import writing
from tomat.measure.bench.processes import end_of, started, tomat_command
from tomat.train.runs.record import RunRecord, read_record
from tomat.train.runs.summary import read_evaluation, run_figures

if TYPE_CHECKING:
    from tomat.train.settings.config import TrainConfig

OF_THE_FOLDER = ("data.n_density_tokens", "model.environment.max_atoms", "model.environment.max_elements")
"""Keys that a run on a folder of densities sets by what it finds there (`app/workflow/folder_run.py`)."""
DATA_FOLDER = "data"
"""Of a run's folder."""
TRAINING_COMPOUNDS = "training-compounds"
"""Folder of the work folder: the embedded densities of the training compounds."""
MADE_FILE = "folder.json"
"""In it, once it is known what the data are (`data/dataset/folder.py`)."""


class RunFailed(TomatError):
    """A run that ended with an error of its own; starting it again would fail again."""


@dataclass(frozen=True)
class PlannedRun:
    seed: int
    words: tuple[str, ...]
    """Of the command line of `tomat train`."""
    config: TrainConfig

    @property
    def name(self) -> str:
        return self.config.run_name


@dataclass(frozen=True)
class FinishedRun:
    losses: np.ndarray
    """Training loss of every step, float64 [steps]."""
    figures: Mapping[str, Any]
    """Of `run_figures`."""
    materials: tuple[str, ...]
    devices: str


def read_finished(run: PlannedRun) -> FinishedRun | None:
    """The run's figures; None where it has not ended yet."""
    folder = Path(run.config.run_dir)
    if not (folder / CONFIG_FILE).exists():
        return None
    record = read_record(str(folder))
    _check_settings(run, record, folder)
    steps = run.config.trainer.num_train_steps
    if len(record.rows) < steps or not (folder / EVALUATION_FILE).exists():
        return None
    losses = {row["step"]: row.get("train/loss") for row in record.rows}
    missing = [step for step in range(steps) if step not in losses]
    if missing:
        raise TomatError(f"{folder} has no loss of step {missing[0]}; delete the folder and start again.")
    evaluation = read_evaluation(str(folder))
    begun = [event for event in record.events if event["event"] in ("start", "resume")]
    return FinishedRun(
        losses=np.array([losses[step] for step in range(steps)], dtype=np.float64),  # one that is not finite is null
        figures=run_figures(record.rows, evaluation, record.ran.rows),
        materials=tuple(sorted(one["material_id"] for one in evaluation.get("materials", ()))),
        devices=str(begun[-1].get("devices", "")) if begun else "",
    )


def _check_settings(run: PlannedRun, record: RunRecord, folder: Path) -> None:
    from tomat.train.settings.config import config_from_dict
    from tomat.train.settings.meanings import said_of

    # Read back once, as the recorded one has been: decoding settles 1 against 1.0.
    planned = flatten(config_from_dict(run.config.to_dict()).to_dict())
    recorded = flatten(config_from_dict(record.config, str(folder / CONFIG_FILE)).to_dict())
    left_out = OF_THE_FOLDER if run.config.data.source == "folder" else ()
    keys = {key for key in planned.keys() | recorded.keys() if key not in left_out and said_of(key).free != "label"}
    differing = sorted(key for key in keys if planned.get(key) != recorded.get(key))
    if differing:
        said = f"{folder} holds a run with other settings ({', '.join(differing)})"
        raise TomatError(f"{said}; name another --output_dir, or delete that folder.")


def train_run(run: PlannedRun, output_dir: Path, lock: IO[str]) -> None:
    """Train a run, or go on with it, in a process of its own; `lock` is that of the folder, which has its log. A run
    that ended with an error is a `RunFailed`; one that was stopped, and has saved a checkpoint, another TomatError."""
    log = output_dir / "logs" / f"{run.name}.log"
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


def check_judged(config: TrainConfig, sources: Sequence[str]) -> None:
    """Hold a configuration to data with densities to be judged by, from one of these sources."""
    asked = config.evaluation
    if config.data.source not in sources or asked.patches_per_material < 1:
        raise TomatError(
            f"data.source is {config.data.source} and evaluation.patches_per_material {asked.patches_per_material}; "
            f"expected {' or '.join(sources)}, and at least 1: settings are compared by what they say of materials."
        )


def tuning_overrides(config: TrainConfig, work_dir: Path, share: float, split_seed: int) -> dict[str, Any]:
    """Settings by which a configuration is judged on compounds of its training set that are set aside: a share of the
    densities, whole compositions. `work_dir` gets a folder of the training compounds, without those held out.
    """
    from tomat.data.density.demo.embedded import demo_materials, load_stored
    from tomat.data.density.outputs import write_density

    if config.data.source == "folder":
        return {}
    folder = work_dir / TRAINING_COMPOUNDS
    with writing(folder, "Make room, or give another --work_dir."):
        folder.mkdir(parents=True, exist_ok=True)
        for material in demo_materials("train", config.data.groups):
            place = folder / f"{material.material_id}.zarr"
            if place.is_symlink():  # to the densities of an earlier tomat, which were files of this layout
                place.unlink()
            if not place.is_dir():
                write_density(load_stored(material.material_id), place, "zarr")
    data = {"source": "folder", "input": str(folder), "validation_share": share, "split_seed": split_seed}
    return {f"data.{key}": value for key, value in data.items()}


def share_data(made: Path, run: Path, config: TrainConfig, other: TrainConfig) -> None:
    """Give the folder `run` the data that the run in `made` has, as links, where both ask for the same."""
    same = dataclasses.asdict(config.data) == dataclasses.asdict(other.data)
    source, target = made / DATA_FOLDER, run / DATA_FOLDER
    if same and not target.exists() and (source / MADE_FILE).exists():
        # Files are replaced, not written to, once they are whole; a link to one is as good as a copy.
        with writing(target):
            shutil.copytree(source, target, copy_function=os.link, ignore=shutil.ignore_patterns("*.lock"))
