"""A distillation: loads the teacher and the folder of the student, and writes the folder with the trained codes."""

import hashlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray
from levanter.checkpoint import load_checkpoint
from levanter.metrics import Metric
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE
from tomat.base.reporting import counted, tell
from tomat.base.storage import is_remote
from tomat.model.any_decoder import environment_of, hidden_and_head
from tomat.model.loss.density_loss import density_loss
from tomat.predict.distillation.arrays import TrainedArrays
from tomat.predict.distillation.divergence import teacher_divergence
from tomat.predict.inference.trained import LoadedRun, load_trained
from tomat.predict.weights.arrays import arrays_sha256, check_arrays, named_arrays, part_of, stacked_model
from tomat.predict.weights.folder import StoredWeights, WrittenWeights, read_weights, write_weights
from tomat.predict.weights.quantise import Quantised
from tomat.predict.weights.record import WEIGHTS_FILE, is_weights_folder
from tomat.train.datasets import Datasets
from tomat.train.loader import TokenExample
from tomat.train.runs.checkpoints import find_checkpoint
from tomat.train.runs.history import SUBJECT_EVENT, last_event, read_events
from tomat.train.settings.config import TrainConfig, recorded_config
from tomat.train.settings.schema import DistillationConfig
from tomat.train.step import DensityLossFunction, Subject, mean_metrics


class StudentAndTeacher(eqx.Module):
    """The model that the trainer holds in a distillation."""

    student: TrainedArrays
    teacher: LmHeadModel | None


@dataclass(frozen=True, eq=False)
class DistillationLoss:
    """`loss_fn(model, example, key=None) -> (loss, metrics)` as Levanter's trainer calls it."""

    config: TrainConfig
    distillation: DistillationConfig
    data: DensityLossFunction
    """The loss on the data, which also says how both models read a batch."""

    def __call__(
        self, model: StudentAndTeacher, example: TokenExample, *, key: PRNGKeyArray | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Loss of one (micro)batch, a float32 scalar, and metrics. Without a key both models read every row whole."""
        settings, data = self.distillation, self.data
        tokens, unread, key = data.read(example.tokens, key)
        student = stacked_model(model.student.values(), self.config)
        said = hidden_and_head(student, tokens, example.atoms, data.environment, key=key)
        given = {"config": data.config, "target": data.target, "unread": unread, "scale": said.scale}
        loss, metrics = density_loss(said.hidden, said.head, example.tokens, **given)
        assert model.teacher is not None
        teacher = inference_mode(model.teacher, True)
        kl = teacher_divergence(
            said,
            hidden_and_head(teacher, tokens, example.atoms, data.environment),
            example.tokens,
            target=data.target,
            top_k=settings.top_k,
            temperature=settings.temperature,
            block_positions=data.config.block_positions,
        )
        total = settings.temperature**2 * kl + settings.data_weight * loss
        return total, mean_metrics({**metrics, "data_loss": loss, "teacher_kl_nats": kl})


def settings_of(config: TrainConfig) -> DistillationConfig:
    assert config.distillation is not None
    return config.distillation


def open_subject(config: TrainConfig, datasets: Datasets) -> Subject:
    """Load the student's folder and the teacher."""
    settings = settings_of(config)
    stored = read_student(config)
    said = f"teacher: {settings.teacher}, student: {settings.quantised} ({stored.weights})"
    tell(said, soft_wrap=True, highlight=False)
    teacher = load_trained(settings.teacher)
    _check_teacher(config, datasets, teacher)
    arrays = named_arrays(teacher.model)
    teacher_sha256 = arrays_sha256(arrays)
    # Where the student is this teacher quantised, training starts at the teacher's own matrices. They tell which
    # numbers lie near the end of a code's interval, and so change their code soonest.
    before = arrays if stored.quantised_from == teacher_sha256 else {}
    student = TrainedArrays.of(stored.stored, before, lambda name: is_trained(settings, name, stored))
    if not student.numbers:
        said = f"{settings.quantised} has no matrix in few bits that distillation.train={settings.train} trains"
        raise TomatError(f"{said}; write it with `tomat compress`, or train all.")
    began = "the teacher's weights" if before else "the values of the codes"
    tell(f"trained: {counted(len(student.numbers), 'matrix', 'matrices')} in few bits, from {began}"
                  + (", and the weights that are not quantised" if settings.train == "all" else ""))  # fmt: skip

    model = StudentAndTeacher(student, teacher.model)
    flags = replace(model, student=student.trainable(settings.train == "all", stored.quantised), teacher=False)
    record = {
        "teacher": settings.teacher,
        "teacher_step": teacher.step,
        "teacher_weights_sha256": teacher_sha256,
        "quantised": settings.quantised,
        "quantised_sha256": _quantised_sha256(settings),
    }
    return Subject(model, flags, partial(DistillationLoss, config, settings), record)


def _quantised_sha256(settings: DistillationConfig) -> str:
    """Hash of the record of the student's folder, which has the hashes of its files."""
    return hashlib.sha256((Path(settings.quantised) / WEIGHTS_FILE).read_bytes()).hexdigest()


def read_student(config: TrainConfig) -> StoredWeights:
    """The folder of quantised weights that a distillation starts from."""
    folder = Path(settings_of(config).quantised)
    if not is_weights_folder(folder):
        raise TomatError(f"distillation.quantised is {folder}, which has no {WEIGHTS_FILE}; make it: `tomat compress`.")
    stored = read_weights(folder)
    try:
        check_arrays({name: its.shape for name, its in stored.stored.items()}, config)
    except TomatError as error:
        raise TomatError(f"{folder}: {error}") from None
    return stored


def is_trained(settings: DistillationConfig, name: str, stored: StoredWeights) -> bool:
    its = stored.stored[name]
    return isinstance(its, Quantised) and (settings.train == "all" or part_of(name, its.shape) == settings.train)


def _check_teacher(config: TrainConfig, datasets: Datasets, teacher: LoadedRun) -> None:
    """Refuse a teacher that predicts other ids than the student, or reads other inputs."""
    place, theirs = settings_of(config).teacher, teacher.config
    read = environment_of(theirs.model)
    given = environment_of(config.model) if read is not None else None  # a student may read what its teacher does not
    codecs = (f"{each.sha256} ({each.n_density_tokens} density ids)" for each in (teacher.codec, datasets.codec))
    learnt = (each and read and each.sha256 for each in (teacher.promolecule, datasets.train.promolecule))
    for key, one, other in (
        ("a codec", *codecs),
        ("a promolecule", *learnt),
        ("data.vocabulary_rows", theirs.data.model_vocabulary, config.data.model_vocabulary),
        ("data.layout", theirs.data.layout, config.data.layout),
        ("model.environment.basis", read and read.basis, given and given.basis),
    ):
        if one != other:
            said = f"the teacher {place} has {key} {one} and the run or its data {other}"
            raise TomatError(f"{said}; expected the same. Give a teacher that read as the run does.")
    if theirs.seq_len < config.seq_len:
        said = f"the teacher {place} reads {theirs.seq_len} tokens, the run {config.seq_len}"
        raise TomatError(f"{said}; expected at least as many.")


def write_distilled(
    run_dir: Path, output: Path, step: int | None = None, licence: str | None = None, for_hub: bool = False
) -> tuple[WrittenWeights, int]:
    """Write a run with `distillation` as a folder that predicts, packed as trained; returns the sizes and the step."""
    config = recorded_config(run_dir / CONFIG_FILE)
    settings = settings_of(config)
    begun_with = read_student(config)
    place = config.run_dir if is_remote(config.output_dir) else str(run_dir)
    found = find_checkpoint(place, step, config.temporary_checkpoints)
    # The checkpoint has only what was trained: scales and whole arrays are those of the folder.
    begun, now = last_event(read_events(place), SUBJECT_EVENT), _quantised_sha256(settings)
    if begun is not None and (before := begun.get("quantised_sha256", now)) != now:
        said = f"{run_dir} began with quantised_sha256 {before}, and {settings.quantised} has {now} now"
        raise TomatError(f"{said}: the result would be another model. Put back the folder that it began with.")
    student = TrainedArrays.of(begun_with.stored, {}, lambda name: is_trained(settings, name, begun_with))
    trained, rest = eqx.partition(student, student.trainable(settings.train == "all", begun_with.quantised))
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
        raise TomatError(f"{found.path} does not hold the trained {settings.quantised}: {error}") from error
    stored = eqx.combine(loaded.student, rest).stored(begun_with.stored)
    kind = f"{begun_with.weights}; {settings.train} distilled from {Path(settings.teacher).name}"
    return write_weights(run_dir, stored, found.step, kind, output, licence=licence, for_hub=for_hub), found.step
