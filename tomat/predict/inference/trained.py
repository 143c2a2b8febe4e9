"""Loads the trained model of a run, or of a folder of weights, with all that is needed to use it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from levanter.models.lm_model import LmHeadModel
from levanter.utils.tree_utils import inference_mode

from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, CONFIG_FILE, PROMOLECULE_FILE
from tomat.base.reporting import tell
from tomat.data.codec.base import DensityCodec
from tomat.data.codec.files import load_codec
from tomat.data.codec.relative import check_promolecule, offset_of
from tomat.data.density.promolecule import Promolecule
from tomat.model.any_decoder import environment_of
from tomat.model.devices import ignore_absent_tpu, quiet_terminal
from tomat.model.environment import EnvironmentTables, environment_tables
from tomat.predict.weights.record import FoundWeights, find_weights
from tomat.train.restore import load_weights
from tomat.train.runs.checkpoints import AVERAGED
from tomat.train.settings.config import TrainConfig, recorded_config


@dataclass(frozen=True)
class LoadedRun:
    config: TrainConfig
    model: LmHeadModel
    codec: DensityCodec
    promolecule: Promolecule | None
    """The promolecule of its training data; None: they have none."""
    step: int
    weights: str
    """`averaged` (`trainer.model_averaging`) or `of the last step`, and how the weights were compressed."""

    @cached_property
    def tables(self) -> EnvironmentTables | None:
        """The constants of the model's environment; None for a model without one."""
        if environment_of(self.config.model) is None:
            return None
        if self.promolecule is None:
            said = f"run '{self.config.run_name}' has model.environment and no {PROMOLECULE_FILE} beside its codec"
            raise TomatError(f"{said}; copy it from its training set.")
        medians = self.codec.decode(np.arange(self.codec.n_density_tokens), "median")
        return environment_tables(self.promolecule, medians, offset_of(self.codec))

    def settings(self, materials_from: str) -> dict[str, Any]:
        """What a result records of the run, and of the source of its materials."""
        of_run = {"run": self.config.run_name, "step": self.step, "weights": self.weights}
        return {**of_run, "materials_from": materials_from}


def load_trained(run_dir: str | Path, step: int | None = None, *, packed: bool = False) -> LoadedRun:
    """The model of a run at its newest checkpoint, or at `step`, with its averaged weights if it has any; or the model
    of a folder that `tomat export` or `tomat compress` wrote. `packed` is for prediction: quantised matrices of the
    folder stay packed in memory (`PackedMatrix`), and have no names."""
    return load_weights_found(find_weights(run_dir, step), packed=packed)


def load_weights_found(found: FoundWeights, *, packed: bool = False) -> LoadedRun:
    quiet_terminal()
    ignore_absent_tpu()
    folder = found.folder
    config = recorded_config(folder / CONFIG_FILE)
    if found.checkpoint is None:
        model = _stored(folder, config, packed)
    else:
        model = _checkpoint(found.checkpoint, folder, config)
    codec, promolecule = load_codec(str(folder / CODEC_FILE)), None
    if (folder / PROMOLECULE_FILE).exists():
        promolecule = Promolecule.load(folder / PROMOLECULE_FILE)
    check_promolecule(codec, promolecule, str(folder))
    return LoadedRun(config, inference_mode(model, True), codec, promolecule, found.step, found.kind)


def _checkpoint(path: str, folder: Path, config: TrainConfig) -> LmHeadModel:
    trainer = config.trainer_config()

    def load() -> tuple[LmHeadModel, str]:
        with trainer.use_device_mesh():
            return load_weights(config, path, trainer.parameter_axis_mapping, trainer.device_mesh)

    try:
        # Levanter 0.2.227 reads checkpoints with `asyncio.run`, which a notebook's own loop refuses.
        model, weights = outside_event_loop(load)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(f"{path} does not hold the model of {folder / CONFIG_FILE}: {error}") from error
    if weights == AVERAGED:
        tell(f"weights of {path}: averaged, as trainer.model_averaging says.")
    return model


def _stored(folder: Path, config: TrainConfig, packed: bool) -> LmHeadModel:
    from tomat.predict.weights.arrays import check_compressible, model_of, with_packed
    from tomat.predict.weights.folder import read_weights

    stored = read_weights(folder)
    if stored.quantised:
        check_compressible(config, str(folder))
    trainer = config.trainer_config()
    try:
        model = model_of(stored.arrays, config, trainer.parameter_axis_mapping, trainer.device_mesh)
    except TomatError as error:
        raise TomatError(f"{folder}: {error}") from None
    return with_packed(model, stored.quantised) if packed else model


def outside_event_loop[Result](work: Callable[[], Result]) -> Result:
    """Return or raise what `work` does. If this thread runs an event loop, as in every notebook, `work` runs in a new
    thread, where `asyncio.run` is allowed. So `work` must not rely on thread-local state, such as a JAX mesh."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none runs
        return work()
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(work).result()
