"""What a distillation begins with: a folder of weights in few bits, and its teacher."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.base.reporting import console, counted
from tomat.model.any_decoder import environment_of
from tomat.predict.distillation.arrays import TrainedArrays
from tomat.predict.distillation.loss import DistillationLoss, StudentAndTeacher
from tomat.predict.inference.trained import LoadedRun, load_trained
from tomat.predict.weights.arrays import arrays_sha256, check_arrays, named_arrays, part_of
from tomat.predict.weights.folder import StoredWeights, read_weights
from tomat.predict.weights.quantise import Quantised
from tomat.predict.weights.record import WEIGHTS_FILE, is_weights_folder
from tomat.train.datasets import Datasets
from tomat.train.settings.config import TrainConfig
from tomat.train.settings.distillation import DistillationConfig
from tomat.train.step import DensityLossFunction, Subject


def settings_of(config: TrainConfig) -> DistillationConfig:
    """`distillation` of a run that has it."""
    assert config.distillation is not None
    return config.distillation


def open_subject(config: TrainConfig, datasets: Datasets) -> Subject:
    """Load the folder in few bits and the teacher."""
    settings = settings_of(config)
    stored = read_student(config)
    said = f"teacher: {settings.teacher}, student: {settings.quantised} ({stored.weights})"
    console.print(said, soft_wrap=True, highlight=False)
    teacher = load_trained(settings.teacher)
    _check_teacher(config, datasets, teacher)
    before = _before_quantised(stored, teacher)
    student = TrainedArrays.of(stored.stored, before, lambda name: is_trained(settings, name, stored))
    if not student.packings:
        raise TomatError(
            f"{settings.quantised} has no matrix in few bits that distillation.train={settings.train} trains; "
            "write it with `tomat compress`, or train all."
        )
    began = "the teacher's weights" if before else "the values of the codes"
    console.print(f"trained: {counted(len(student.packings), 'matrix', 'matrices')} in few bits, from {began}"
                  + (", and what is whole" if settings.train == "all" else ""))  # fmt: skip

    def loss_of(data: DensityLossFunction) -> DistillationLoss:
        return DistillationLoss(config, settings, data)

    model = StudentAndTeacher(student, teacher.model)
    flags = replace(model, student=student.trainable(settings.train == "all"), teacher=False)
    record = {
        "teacher": settings.teacher,
        "teacher_step": teacher.step,
        "teacher_weights_sha256": arrays_sha256(named_arrays(teacher.model)),
        "quantised": settings.quantised,
        "quantised_sha256": _sha256(Path(settings.quantised) / WEIGHTS_FILE),
    }
    return Subject(model, flags, loss_of, record)


def read_student(config: TrainConfig) -> StoredWeights:
    """The folder that a distillation began with."""
    folder = Path(settings_of(config).quantised)
    if not is_weights_folder(folder):
        raise TomatError(f"distillation.quantised is {folder}, which has no {WEIGHTS_FILE}; make it: `tomat compress`.")
    stored = read_weights(folder)
    try:
        check_arrays(stored.shapes, config)
    except TomatError as error:
        raise TomatError(f"{folder}: {error}") from None
    return stored


def is_trained(settings: DistillationConfig, name: str, stored: StoredWeights) -> bool:
    """Whether a matrix in few bits is trained."""
    its = stored.stored[name]
    return isinstance(its, Quantised) and (settings.train == "all" or part_of(name, its.shape) == settings.train)


def _before_quantised(stored: StoredWeights, teacher: LoadedRun) -> dict:
    """The teacher's matrices, where the student is that teacher in few bits; else nothing.

    Numbers near the end of a code's interval change their code soonest: those that were quantised say which these are.
    """
    if stored.quantised_from is not None:
        arrays = named_arrays(teacher.model)
        if stored.quantised_from == arrays_sha256(arrays):
            return arrays
    return {}


def _check_teacher(config: TrainConfig, datasets: Datasets, teacher: LoadedRun) -> None:
    """Refuse a teacher whose distributions are over other ids, or that reads something else."""
    place, theirs = settings_of(config).teacher, teacher.config
    if teacher.codec.sha256 != datasets.codec.sha256:
        raise TomatError(
            f"the teacher {place} has codec {teacher.codec.sha256[:12]} ({teacher.codec.n_density_tokens} density ids) "
            f"and the data {datasets.codec.sha256[:12]} ({datasets.codec.n_density_tokens}): the same id stands for "
            "another density in each. Give a teacher of the data's codec."
        )
    for key, its, own in (
        ("data.vocabulary_rows", theirs.data.model_vocabulary, config.data.model_vocabulary),
        ("data.layout", theirs.data.layout, config.data.layout),
    ):
        if its != own:
            raise TomatError(f"the teacher {place} has {key} {its} and the run {own}; expected the same.")
    if theirs.seq_len < config.seq_len:
        raise TomatError(
            f"the teacher {place} reads {theirs.seq_len} tokens, the run {config.seq_len}; expected at least as many."
        )
    read = environment_of(theirs.model)
    if read is None:
        return
    given = environment_of(config.model)
    if given is None or read.basis != given.basis:
        raise TomatError(
            f"the teacher {place} reads atoms with the radial functions {read.basis}, and the run "
            f"{'reads none' if given is None else f'with {given.basis}'}; expected the same model.environment.basis."
        )
    mine = datasets.train.promolecule
    if teacher.promolecule is None or mine is None or teacher.promolecule.sha256 != mine.sha256:
        raise TomatError(
            f"the teacher {place} has learnt with another promolecule than that of {datasets.train.url}; expected the "
            "same."
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
