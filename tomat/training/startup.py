"""Bringing the devices up: compiler flags, `jax.distributed`, logs and trackers."""

import dataclasses
import importlib.util
import logging
import os
import warnings
from pathlib import Path

import jax
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import TrackerConfig
from levanter.trainer import TrainerConfig

from tomat.errors import TomatError
from tomat.training.config import TrainConfig
from tomat.training.devices import ignore_absent_tpu
from tomat.training.published import is_remote
from tomat.training.tracking import METRICS_FILE, JsonLinesTrackerConfig


def local_run_dir(config: TrainConfig) -> Path:
    """The folder for what must lie on a local disk: logs, metrics, profiles."""
    return Path("runs") / config.run_name if is_remote(config.output_dir) else Path(config.run_dir)


def set_compiler_flags(config: TrainConfig) -> None:
    """Hand the configured XLA flags to the compilers, which read them from the environment at the first device use."""
    for variable, flags in (
        ("XLA_FLAGS", config.compiler.xla_flags),
        ("LIBTPU_INIT_ARGS", config.compiler.libtpu_args),
    ):
        if flags:
            os.environ[variable] = " ".join([os.environ.get(variable, ""), *flags]).strip()


def initialise(config: TrainConfig, run_dir: Path) -> TrainerConfig:
    """Start `jax.distributed`, logging and trackers; the first call that touches a device.

    Raises:
        TomatError: A tracker that is not installed, or a batch that the devices cannot share.
    """
    trainer_config = config.trainer_config()
    trackers: list[TrackerConfig] = [JsonLinesTrackerConfig(path=str(run_dir / METRICS_FILE))]
    if config.trackers.wandb is not None:
        trackers.append(dataclasses.replace(config.trackers.wandb, id=config.run_name))
    if config.trackers.tensorboard:
        if importlib.util.find_spec("tensorboardX") is None:
            raise TomatError(
                "trackers.tensorboard is set, but tensorboardX is not installed; install it with "
                "`uv sync --extra tensorboard`."
            )
        trackers.append(TensorboardConfig(logdir=str(run_dir / "tensorboard")))
    trainer_config.tracker = tuple(trackers)
    trainer_config.log_dir = run_dir
    # JAX's own service takes SIGTERM in C++, where neither the grace nor a second signal can be told from it.
    jax.config.update("jax_enable_preemption_service", False)
    ignore_absent_tpu()
    # Before any collective: on a pod, `jax.device_count()` is right only after this.
    trainer_config.distributed.initialize()
    trainer_config.distributed = dataclasses.replace(trainer_config.distributed, initialize_jax_distributed=False)
    check_batch(config, trainer_config)
    with warnings.catch_warnings():
        # A second run in one process (a notebook, a test): the tracker of the first one is finished.
        warnings.filterwarnings("ignore", message="Global tracker is already set")
        trainer_config.initialize()
    quiet_terminal()
    return trainer_config


def quiet_terminal() -> None:
    """Leave the terminal to the progress bar and to what needs attention; Levanter's own log is in the run's folder."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(logging.WARNING)
    # Levanter 0.2.227 warns once for every optional part that a model does not have, some 40 lines for each load.
    logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)


def check_batch(config: TrainConfig, trainer_config: TrainerConfig) -> None:
    """Refuse a batch that the devices cannot share evenly, before Levanter does it with an assertion."""
    data_axis = trainer_config.data_axis_size
    per_device = trainer_config.per_device_parallelism
    unit = data_axis * (per_device if per_device > 0 else 1)
    if config.batch_size < 1 or config.batch_size % unit != 0:
        raise TomatError(
            f"trainer.train_batch_size is {config.batch_size}; expected a multiple of {unit}, which is {data_axis} "
            f"device(s) on the data axis times a microbatch of {max(per_device, 1)} per device. Change the batch or "
            "trainer.per_device_parallelism."
        )
