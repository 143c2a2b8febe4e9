"""Starts the devices (compiler flags, `jax.distributed`) and later, once data, codec and checkpoint are checked, log
and trackers."""

import dataclasses
import importlib.util
import logging
import os
import socket
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
from levanter.tracker import set_global_tracker
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import TrackerConfig
from levanter.trainer import TrainerConfig

from tomat.base.errors import TomatError
from tomat.base.layout import METRICS_FILE
from tomat.base.memory import keep_freed_memory
from tomat.base.reporting import warn, writing
from tomat.base.shipped import installs
from tomat.base.stages import StartStages
from tomat.base.tpu_faults import known_tpu_fault
from tomat.hardware.chips import FoundDevices, slice_named
from tomat.model.devices import found_devices, ignore_absent_tpu, quiet_terminal
from tomat.model.joining import OPEN_SECONDS, join_processes
from tomat.train.guards.alike import refuse_differences, started_with
from tomat.train.settings.config import TrainConfig
from tomat.train.tracking import JsonLinesTrackerConfig


def connect(config: TrainConfig) -> TrainerConfig:
    """`join` and `settle`, for code that trains outside a run."""
    join(config, StartStages())
    return settle(config, {}, StartStages())


def join(config: TrainConfig, stages: StartStages) -> None:
    """Set the compilers' flags and start `jax.distributed`; nothing before this call touches a device."""
    if config.keep_freed_memory:
        keep_freed_memory()
    # The compilers read their flags from the environment at the first device use.
    flags = {"XLA_FLAGS": config.compiler.xla_flags, "LIBTPU_INIT_ARGS": config.compiler.libtpu_args}
    for variable, given in flags.items():
        if given:
            os.environ[variable] = " ".join([os.environ.get(variable, ""), *given]).strip()
    # JAX's own service takes SIGTERM in C++, where this process can see neither the grace nor a second signal.
    jax.config.update("jax_enable_preemption_service", False)
    ignore_absent_tpu()
    # Before any collective: on a pod, `jax.device_count()` is right only after this.
    join_processes(config.trainer_config().distributed, stages)


def settle(config: TrainConfig, beside: Mapping[str, object], stages: StartStages) -> TrainerConfig:
    """Open the devices, and refuse hosts and devices that do not suit the run; writes nothing. Hosts must agree on the
    configuration and on `beside`: whatever else decides what is trained, by name."""
    trainer_config = config.trainer_config()
    trainer_config.distributed = dataclasses.replace(trainer_config.distributed, initialize_jax_distributed=False)
    stages.begin("opening the devices", OPEN_SECONDS)
    try:
        found = found_devices()
    except RuntimeError as error:
        # Not an error of the input: the same command is right, on this machine or on another.
        if (fault := known_tpu_fault(str(error))) is not None:
            warn(fault.line)
        raise
    # Before the checks that could stop one host alone, while the others wait for it.
    if jax.process_count() > 1:
        stages.begin("comparing this start with the other hosts'")
        refuse_differences(config, started_with(config, beside))
    refuse_other_devices(config, found)
    if config.trackers.tensorboard and importlib.util.find_spec("tensorboardX") is None:
        said = "trackers.tensorboard is set, but tensorboardX is not installed"
        raise TomatError(f"{said}: `{installs('tensorboard')}` installs it.")
    if unknown := [name for name in config.trainer.jax_config if not hasattr(jax.config, name)]:
        said = f"trainer.jax_config sets {', '.join(unknown)}, which JAX {jax.__version__} does not have"
        raise TomatError(f"{said}; look for the spelling in `jax.config.values`, or leave it out.")
    try:
        data_axis_size = trainer_config.data_axis_size
    except ValueError as error:
        said = f"trainer.mesh {dataclasses.asdict(config.trainer.mesh)} does not fit {found}: {error}".rstrip(".")
        raise TomatError(f"{said}. The axes' product must be the devices of a slice; one may be -1.") from error
    config.check_batch(data_axis_size)
    return trainer_config


def refuse_other_devices(config: TrainConfig, found: FoundDevices) -> None:
    """Stop a run on devices of several kinds. Unless `run_elsewhere` is set, stop one that is meant for another slice
    too."""
    if "," in found.device_kind:
        said = f"the devices here are of several kinds, {found.device_kind}, but a step is compiled for one kind"
        raise TomatError(f"{said}. Choose devices of one kind (GPUs: with CUDA_VISIBLE_DEVICES).")
    if config.slice is None or config.run_elsewhere:
        return
    if (difference := found.difference(slice_named(config.slice))) is not None:
        raise TomatError(
            f"run '{config.run_name}' is meant for another slice: {difference}. Start it there, or set --slice to what "
            "is here (null: whatever is here), or --run_elsewhere true: its figures are then those of what ran."
        )


def trackers(config: TrainConfig, run_dir: Path, first_step: int) -> tuple[TrackerConfig, ...]:
    found: list[TrackerConfig] = [JsonLinesTrackerConfig(path=str(run_dir / METRICS_FILE))]
    if config.trackers.wandb is not None:
        found.append(dataclasses.replace(config.trackers.wandb, id=config.run_name))
    if config.trackers.tensorboard:
        # What a killed process wrote beyond its checkpoint is taken back, or TensorBoard would show those steps twice.
        found.append(TensorboardConfig(logdir=str(run_dir / "tensorboard"), purge_step=first_step))
    return tuple(found)


def initialise(config: TrainConfig, trainer_config: TrainerConfig, run_dir: Path, first_step: int) -> None:
    """Set the log and the trackers in `trainer_config`, which `settle` returned, and start them."""
    trainer_config.tracker = trackers(config, run_dir, first_step)
    trainer_config.log_dir = run_dir
    forget_tracker()  # that of an earlier trainer in this process
    trainer_config.initialize()
    rename_log(run_dir, config.run_name)
    quiet_terminal()


def forget_tracker() -> None:
    """Unset the tracker that `initialise` set for the whole process: Levanter's next trainer would write to it in place
    of its own (0.2.227)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Global tracker is already set")
        set_global_tracker(cast(Any, None))


def rename_log(run_dir: Path, run_name: str) -> None:
    """Write Levanter's log to `<run_name>.log`.

    Levanter 0.2.227 gives its logging the name with `.log`, which adds a second `.log` (`TrainerConfig.initialize`,
    `init_logging`), and takes no other name. What earlier starts wrote under that name is moved too.
    """
    wrong, right = (run_dir / f"{run_name}{suffix}" for suffix in (".log.log", ".log"))
    root = logging.getLogger()
    for handler in list(root.handlers):
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename) == wrong.absolute():
            renamed = logging.FileHandler(right, mode=handler.mode)
            renamed.setLevel(handler.level)
            renamed.setFormatter(handler.formatter)
            root.removeHandler(handler)
            handler.close()
            root.addHandler(renamed)
    # Hosts that share the folder share the file: one of them moves all of it away.
    taken = wrong.with_name(f".{wrong.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        wrong.rename(taken)
    except FileNotFoundError:  # another host has it, or nothing was logged
        return
    with writing(right), right.open("ab") as file:
        file.write(taken.read_bytes())
    taken.unlink()
