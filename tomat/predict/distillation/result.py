"""The folder of weights that a distillation becomes: codes, scales and tables as they were trained."""

from __future__ import annotations

from pathlib import Path

import equinox as eqx
from levanter.checkpoint import load_checkpoint

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, WEIGHTS_FOLDER
from tomat.predict.distillation.arrays import TrainedArrays
from tomat.predict.distillation.loss import StudentAndTeacher
from tomat.predict.distillation.subject import is_trained, read_student, settings_of
from tomat.predict.weights.folder import WrittenWeights, write_weights
from tomat.predict.weights.record import is_weights_folder
from tomat.train.runs.checkpoints import find_checkpoint
from tomat.train.runs.published import is_remote
from tomat.train.settings.config import TrainConfig, recorded_config


def write_distilled(
    run_dir: Path, output: Path, step: int | None = None, licence: str | None = None
) -> tuple[WrittenWeights, int]:
    """Write the weights of a run with `distillation` as a folder that predicts; packed as trained, nothing is fitted.

    Args:
        run_dir: The run, with the folder that it began with where its configuration says.
        output: The folder, which must not be there.
        step: Of the checkpoint; None: the newest.

    Returns:
        What was written, and the step.
    """
    config = recorded_config(run_dir / CONFIG_FILE)
    settings = settings_of(config)
    begun_with = read_student(config)
    place = config.run_dir if is_remote(config.output_dir) else str(run_dir)
    found = find_checkpoint(place, step, config.temporary_checkpoints)
    student = TrainedArrays.of(begun_with.stored, {}, lambda name: is_trained(settings, name, begun_with))
    trained, rest = eqx.partition(student, student.trainable(settings.train == "all"))
    trainer = config.trainer_config()
    try:
        with trainer.use_device_mesh():
            loaded = load_checkpoint(
                StudentAndTeacher(trained, None),
                found.path,
                subpath="model",
                axis_mapping=trainer.parameter_axis_mapping,
                mesh=trainer.device_mesh,
            )
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(f"{found.path} does not hold what {settings.quantised} became: {error}") from error
    stored = eqx.combine(loaded.student, rest).stored(begun_with.stored)
    kind = f"{begun_with.weights}; {settings.train} distilled from {Path(settings.teacher).name}"
    written = write_weights(run_dir, stored, found.step, kind, output, licence=licence)
    return written, found.step


def write_final(config: TrainConfig, run_dir: Path) -> Path:
    """The folder `weights` of a run that has ended; left as it is where it is there already."""
    output = run_dir / WEIGHTS_FOLDER
    if not is_weights_folder(output):
        write_distilled(run_dir, output)
    return output


def is_distillation(run_dir: Path) -> bool:
    """Whether a folder is a run that trained a model in few bits."""
    return not is_weights_folder(run_dir) and recorded_config(run_dir / CONFIG_FILE).distillation is not None
