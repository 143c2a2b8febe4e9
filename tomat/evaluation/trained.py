"""The model of a run that has trained, and what is needed to use it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import haliax as hax
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, CONFIG_FILE
from tomat.base.reporting import console
from tomat.codec.base import DensityCodec
from tomat.codec.files import load_codec
from tomat.evaluation.teacher_forced import TeacherForcedConfig, TeacherForcedEvaluator
from tomat.model.devices import ignore_absent_tpu
from tomat.runs.checkpoints import AVERAGED, find_checkpoint
from tomat.runs.published import is_remote
from tomat.training.config import TrainConfig, recorded_config
from tomat.training.restore import load_weights
from tomat.training.startup import quiet_terminal


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and what is needed to use it."""

    config: TrainConfig
    model: LmHeadModel
    codec: DensityCodec
    step: int
    weights: str
    """`averaged` where the run averages its weights (`trainer.model_averaging`), or `of the last step`."""

    @contextlib.contextmanager
    def evaluator(self, config: TeacherForcedConfig) -> Iterator[tuple[TeacherForcedEvaluator, LmHeadModel]]:
        """An evaluator of the run and the model that it takes, both on the mesh of the run's trainer, which is in force
        meanwhile.

        Args:
            config: Sampling; the batch is raised to a multiple of the devices.
        """
        trainer = self.config.trainer_config()
        with trainer.use_device_mesh():
            evaluator = TeacherForcedEvaluator(
                self.codec,
                self.config.data.sequence_layout,
                config.for_devices(trainer.data_axis_size),
                axis_mapping=trainer.compute_axis_mapping,
                policy=trainer.mp,
            )
            yield evaluator, hax.shard(self.model, trainer.parameter_axis_mapping)

    def settings(self, materials_from: str) -> dict[str, Any]:
        """What a result says of the run, and of where its materials are from."""
        return {
            "run": self.config.run_name,
            "step": self.step,
            "weights": self.weights,
            "materials_from": materials_from,
        }


def load_trained(run_dir: str | Path, step: int | None = None) -> LoadedRun:
    """The model of a run at its newest checkpoint, or at `step`, with its averaged weights where it has any.

    Raises:
        TomatError: No such run, no whole checkpoint, or one that does not fit the run's configuration.
    """
    quiet_terminal()
    ignore_absent_tpu()
    folder = Path(run_dir)
    config_path = folder / CONFIG_FILE
    if not config_path.exists():
        raise TomatError(f"{folder} is not a run: it has no {CONFIG_FILE}.")
    config = recorded_config(config_path)
    place = config.run_dir if is_remote(config.output_dir) else str(folder)
    found = find_checkpoint(place, step, config.temporary_checkpoints)
    trainer = config.trainer_config()
    try:
        with trainer.use_device_mesh():
            model, weights = load_weights(config, found.path, trainer.parameter_axis_mapping, trainer.device_mesh)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(f"{found.path} does not hold the model of {config_path}: {error}") from error
    if weights == AVERAGED:
        console.print(f"weights of {found.path}: averaged, as trainer.model_averaging says.")
    return LoadedRun(config, inference_mode(model, True), load_codec(str(folder / CODEC_FILE)), found.step, weights)
