"""The runs of a quality study: each is a `tomat train` in its own process and continues where it was stopped. They use
only training compounds and set some of them aside for evaluation."""

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
"""Keys that a run on a folder of densities sets from the densities it finds (`app/workflow/folder_run.py`)."""
DATA_FOLDER = "data"
"""Folder of the data in a run's folder."""
TRAINING_COMPOUNDS = "training-compounds"
"""Folder in the work folder with the embedded densities of the training compounds."""
MADE_FILE = "folder.json"
"""File in the data folder that describes the finished data (`data/dataset/folder.py`)."""


class RunFailed(TomatError):
    """A run ended with its own error. Starting it again would fail again."""


@dataclass(frozen=True)
class PlannedRun:
    seed: int
    words: tuple[str, ...]
    """Arguments of `tomat train`."""
    config: TrainConfig

    @property
    def name(self) -> str:
        return self.config.run_name


@dataclass(frozen=True)
class FinishedRun:
    losses: np.ndarray
    """Training loss of every step, float64 [steps]."""
    figures: Mapping[str, Any]
    """The result of `run_figures`."""
    materials: tuple[str, ...]
    devices: str


def read_finished(run: PlannedRun) -> FinishedRun | None:
    """The figures of a run; None if it has not ended yet."""
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
        losses=np.array([losses[step] for step in range(steps)], dtype=np.float64),  # null (not finite) becomes NaN
        figures=run_figures(record.rows, evaluation, record.ran.rows),
        materials=tuple(sorted(one["material_id"] for one in evaluation.get("materials", ()))),
        devices=str(begun[-1].get("devices", "")) if begun else "",
    )


def _check_settings(run: PlannedRun, record: RunRecord, folder: Path) -> None:
    from tomat.train.settings.config import config_from_dict
    from tomat.train.settings.meanings import said_of

    # Decoded once, like the recorded one, so that 1 and 1.0 become the same.
    planned = flatten(config_from_dict(run.config.to_dict()).to_dict())
    recorded = flatten(config_from_dict(record.config, str(folder / CONFIG_FILE)).to_dict())
    left_out = OF_THE_FOLDER if run.config.data.source == "folder" else ()
    keys = {key for key in planned.keys() | recorded.keys() if key not in left_out and said_of(key).free != "label"}
    differing = sorted(key for key in keys if planned.get(key) != recorded.get(key))
    if differing:
        said = f"{folder} holds a run with other settings ({', '.join(differing)})"
        raise TomatError(f"{said}; name another --output_dir, or delete that folder.")


def train_run(run: PlannedRun, output_dir: Path, lock: IO[str]) -> None:
    """Train a run or continue it, in its own process. `output_dir` gets its log and is locked by `lock`. A run that
    ended with an error raises `RunFailed`; one that was stopped and saved a checkpoint raises another TomatError."""
    log = output_dir / "logs" / f"{run.name}.log"
    command = tomat_command("train", *run.words)
    # The child holds the lock too: if only this process is killed, the run goes on and nobody else may touch it. After
    # SIGTERM the child saves a checkpoint.
    with started(command, log, end=subprocess.Popen.terminate, pass_fds=[lock.fileno()]) as process:
        status = process.wait()
    if status == STOPPED_STATUS:
        raise TomatError(f"run {run.name} was stopped and has saved a checkpoint; the same command goes on from there.")
    if status != 0:
        raise RunFailed(f"run {run.name} ended with status {status}; its log {log} ends:\n{end_of(log)}")
    if read_finished(run) is None:
        raise RunFailed(f"run {run.name} ended without all of its steps and its evaluation; see its log {log}.")


def check_judged(config: TrainConfig, sources: Sequence[str]) -> None:
    """Raise an error unless the configuration evaluates whole densities and its data come from one of `sources`."""
    asked = config.evaluation
    if config.data.source not in sources or asked.patches_per_material < 1:
        raise TomatError(
            f"data.source is {config.data.source} and evaluation.patches_per_material {asked.patches_per_material}; "
            f"expected {' or '.join(sources)}, and at least 1: settings are compared by their errors on materials."
        )


def tuning_overrides(config: TrainConfig, work_dir: Path, share: float, split_seed: int) -> dict[str, Any]:
    """Settings with which a configuration is evaluated on compounds of its training set that are set aside: `share` of
    the densities, in whole compositions. Writes the training compounds, without the held-out ones, below `work_dir`.
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
            if place.is_symlink():  # an earlier tomat made links to its own density files here
                place.unlink()
            if not place.is_dir():
                write_density(load_stored(material.material_id), place, "zarr")
    data = {"source": "folder", "input": str(folder), "validation_share": share, "split_seed": split_seed}
    return {f"data.{key}": value for key, value in data.items()}


def share_data(made: Path, run: Path, config: TrainConfig, other: TrainConfig) -> None:
    """Link the data of the run in the folder `made` into the folder `run`, if both configurations ask for the same."""
    same = dataclasses.asdict(config.data) == dataclasses.asdict(other.data)
    source, target = made / DATA_FOLDER, run / DATA_FOLDER
    if same and not target.exists() and (source / MADE_FILE).exists():
        # A complete file is only ever replaced, never written to, so a hard link is as good as a copy.
        with writing(target):
            shutil.copytree(source, target, copy_function=os.link, ignore=shutil.ignore_patterns("*.lock"))
