"""One training run: start or resume, train, and leave a folder that says what happened.

A run's folder holds `config.yaml` (the whole configuration), `codec.json`, `metrics.jsonl` (one line a step),
`checkpoints/step-N`, `profiler/` where a window was profiled, and Levanter's log.
"""

import asyncio
import contextlib
import dataclasses
import importlib.util
import json
import logging
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import fsspec
import haliax as hax
import jax
import levanter.callbacks
import levanter.tracker
import numpy as np
import yaml
from levanter.checkpoint import is_checkpoint_path, latest_checkpoint_path, load_checkpoint
from levanter.data.loader import DataLoader
from levanter.models.lm_model import LmHeadModel
from levanter.tracker.telemetry import capture_stall_diagnostics
from levanter.tracker.tensorboard import TensorboardConfig
from levanter.tracker.tracker import TrackerConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.tree_utils import inference_mode

from tomat.codec import DensityCodec, load_codec
from tomat.errors import TomatError
from tomat.performance.mfu import LiveMfu
from tomat.reporting import console, write_text
from tomat.tokens.vocabulary import DENSITY_START
from tomat.training.config import TrainConfig, config_from_dict
from tomat.training.datasets import Datasets, open_datasets, value_table
from tomat.training.guards import RunGuards
from tomat.training.loader import ShardDataset, token_loader
from tomat.training.loss_start import TIED_LOGIT_STD, UNTIED_LOGIT_STD, check_first_loss, uniform_loss
from tomat.training.phases import PhaseClock
from tomat.training.preemption import StopRequest
from tomat.training.published import fetch, is_remote, publish
from tomat.training.resume import refuse_changes
from tomat.training.step import build_trainer, model_initialiser
from tomat.training.tracking import METRICS_FILE, JsonLinesTrackerConfig, TrainingProgress, truncate_metrics

CONFIG_FILE = "config.yaml"
CODEC_FILE = "codec.json"
MODEL_KEY, TRAINING_KEY, DATA_KEY = 0, 1, 2
"""What a run's seed is folded with for the weights, the training step and the data order."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainResult:
    """What a finished run reports."""

    run_dir: Path
    first_step: int
    """The step this process began at; above 0 after a resume."""
    steps: int
    """Steps after the last one trained."""
    first_loss: float
    """Loss of the first step this process ran."""
    last_loss: float
    """Mean loss of the last 10 steps this process ran."""
    train_seconds: float
    """Wall-clock from the first batch to the last step, compilation included."""
    parameters: int
    """Trainable numbers in the model."""
    preempted: bool = False
    """SIGTERM stopped the run before its last step; the same command continues it."""


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and what is needed to use it."""

    config: TrainConfig
    model: LmHeadModel
    codec: DensityCodec
    step: int


def train(config: TrainConfig) -> TrainResult:
    """Train until `trainer.num_train_steps`, from the newest checkpoint of the run where there is one.

    Raises:
        TomatError: Data, configuration, devices or a checkpoint that do not go together, or a first loss that is not
            the configured one.
    """
    run_dir = local_run_dir(config)
    _set_compiler_flags(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    if is_remote(config.output_dir):
        fetch(config.run_dir, run_dir)
    refuse_changes(run_dir / CONFIG_FILE, config)
    trainer_config = _initialise(config, run_dir)
    guards = RunGuards(config, run_dir)
    with contextlib.ExitStack() as stack:
        stack.enter_context(guards.active())
        datasets = open_datasets(config, run_dir)
        guards.check_start(datasets, run_dir / CODEC_FILE)
        if jax.process_index() == 0:
            write_text(run_dir / CONFIG_FILE, yaml.safe_dump(config.to_dict(), sort_keys=False))
            datasets.codec.save(str(run_dir / CODEC_FILE))
        table = value_table(datasets.codec)
        trainer = stack.enter_context(build_trainer(config, trainer_config, table))
        if is_remote(config.output_dir) and jax.process_index() == 0:
            stack.callback(publish, config.run_dir, run_dir)
        stack.callback(trainer.tracker.finish)
        return _train(config, trainer, datasets, table, run_dir, guards)


def _train(
    config: TrainConfig,
    trainer: Trainer,
    datasets: Datasets,
    table: np.ndarray | None,
    run_dir: Path,
    guards: RunGuards,
) -> TrainResult:
    """`train`, inside the trainer's context."""
    seed_key = jax.random.PRNGKey(config.trainer.seed)
    try:
        state = trainer.initial_state(
            jax.random.fold_in(seed_key, TRAINING_KEY),
            model_init=model_initialiser(config, jax.random.fold_in(seed_key, MODEL_KEY)),
        )
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(
            f"the checkpoint under {trainer.checkpoint_path} does not hold this model ({error}); use the run's own "
            "model settings, or another run_name."
        ) from error
    first_step = int(state.step)
    total_steps = config.trainer.num_train_steps
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.trainable_model))
    if jax.process_index() == 0:
        truncate_metrics(run_dir / METRICS_FILE, first_step)
        console.print(
            f"run [bold]{config.run_name}[/bold]: {parameters / 1e6:,.1f} M parameters, {datasets.train.rows:,} rows "
            f"of {config.seq_len} tokens, batch {config.batch_size}, loss {config.loss.kind}, "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}"
            + (f", resumed at step {first_step}" if first_step else "")
        )
    if (warning := config.loss.warning()) is not None and jax.process_index() == 0:
        console.print(f"[yellow]warning:[/yellow] {warning}")
    if first_step >= total_steps:
        console.print(f"training is complete: {first_step} of {total_steps} steps are done.")
        return TrainResult(run_dir, first_step, first_step, float("nan"), float("nan"), 0.0, parameters)

    dataset = ShardDataset(
        datasets.train,
        config.data.shuffle,
        seed=config.trainer.seed + DATA_KEY,
        seq_len=config.seq_len,
        verify_checksums=config.data.verify_checksums,
    )
    guards.attach(trainer, state, dataset, datasets)
    clock = PhaseClock()
    checkpointer = trainer.config.checkpointer.create(trainer.run_id)
    _add_hooks(config, trainer, datasets, clock, checkpointer, run_dir)
    live_mfu = LiveMfu.from_config(config, jax.devices()[0].device_kind, jax.device_count())
    progress = TrainingProgress(total_steps, first_step)
    stop = StopRequest()
    losses: list[float] = []
    started = time.monotonic()
    info = None
    try:
        with clock.listening_to_compiles(), stop.listening():
            batches = _loader(trainer, dataset, config.batch_size).iter_from_step(first_step)
            for info in trainer.training_steps(state, batches):
                losses.append(float(info.loss))
                if first_step == 0 and len(losses) == 1:
                    _check_first_loss(config, dataset, table, losses[0])
                row = clock.row(info.step_duration) | live_mfu.row(info.step_duration)
                levanter.tracker.log(row, step=info.step)
                progress.update(info.next_step, losses[-1], row["tokens_per_second"], row.get("mfu_full"))
                if stop.reached(info.next_step):
                    console.print(f"SIGTERM: stopping after step {info.next_step}, with a checkpoint.")
                    break
            if info is None:
                raise TomatError("no step was run: the data loader ended at once.")
            trainer.run_hooks(info, force=True)
    finally:
        progress.close()
        # A run that has returned has its checkpoints on disk.
        checkpointer.wait_until_finished()
    return TrainResult(
        run_dir,
        first_step,
        info.next_step,
        losses[0],
        # A batch that was passed over has no loss to report.
        float(np.nanmean(losses[-10:])) if np.isfinite(losses[-10:]).any() else losses[-1],
        time.monotonic() - started,
        parameters,
        preempted=stop.agreed and info.next_step < total_steps,
    )


def _loader(trainer: Trainer, dataset: ShardDataset, batch_size: int) -> DataLoader:
    """Batches of `dataset` for the trainer's devices.

    `Trainer.data_loader` asks for 32 batches at once (Levanter 0.2.227), so that the first one would wait for nearly a
    whole shuffle window.
    """
    return token_loader(dataset, batch_size, mesh=trainer.device_mesh, axis_resources=trainer.compute_axis_mapping)


def _add_hooks(
    config: TrainConfig, trainer: Trainer, datasets: Datasets, clock: PhaseClock, checkpointer: Any, run_dir: Path
) -> None:
    """Everything that happens between steps, each part timed by `clock` under its own name."""
    trainer.add_hook(levanter.callbacks.log_step_info(config.trainer.num_train_steps), every=1)
    watchdog = config.trainer.progress_watchdog.create(
        process_index=jax.process_index(), diagnostic=capture_stall_diagnostics
    )
    if watchdog is not None:
        trainer.add_hook(watchdog, every=1)
    if datasets.validation is not None and config.trainer.max_eval_batches != 0:
        validation = ShardDataset(
            datasets.validation,
            config.data.shuffle,
            seed=config.trainer.seed + DATA_KEY,
            seq_len=config.seq_len,
            verify_checksums=config.data.verify_checksums,
            epochs=1,
        )
        loader = _loader(trainer, validation, trainer.EvalBatch.size)

        @hax.named_jit(axis_resources=trainer.parameter_axis_mapping)
        def validation_loss(model: LmHeadModel, batch: Any) -> Any:
            return trainer.loss_fn(model, batch, key=None)

        hook = levanter.callbacks.compute_validation_loss(
            cast(Any, validation_loss),  # its protocol asks for *inputs, which one batch satisfies
            loader,
            max_batches=config.trainer.max_eval_batches,
            name="validation",
        )
        trainer.add_hook(clock.timed("eval_seconds", hook), every=config.trainer.steps_per_eval)

    def checkpoint(info: Any, force: bool = False) -> None:
        checkpointer.on_step(tree=info.state.saveable_state, step=info.step, force=force)

    trainer.add_hook(clock.timed("checkpoint_seconds", checkpoint), every=1)
    profiler = config.trainer.profiler
    profile_steps = profiler.resolve_num_profile_steps(config.trainer.num_train_steps) if profiler.is_enabled else 0
    if profile_steps > 0:
        hook = profiler.build(str(run_dir / "profiler"), run_id=config.run_name, num_steps=profile_steps)
        trainer.add_hook(clock.timed("profiler_seconds", hook), every=1)


def _check_first_loss(config: TrainConfig, dataset: ShardDataset, table: np.ndarray | None, measured: float) -> None:
    """Stop the run if its first loss is not what the configured loss gives for near-uniform logits."""
    examples = asyncio.run(dataset.get_batch(range(config.batch_size)))
    tokens = np.stack([np.asarray(example.tokens.array) for example in examples])
    expected = uniform_loss(
        config.loss,
        tokens,
        value_table=table,
        density_start=DENSITY_START,
        n_density_tokens=config.data.n_density_tokens,
        vocab_size=config.data.vocabulary.size,
        tokens_per_voxel=config.data.sequence_layout.tokens_per_voxel,
    )
    check_first_loss(
        config.loss,
        measured,
        expected,
        value_table=table,
        n_density_tokens=config.data.n_density_tokens,
        logit_std=TIED_LOGIT_STD if getattr(config.model, "tie_word_embeddings", False) else UNTIED_LOGIT_STD,
    )
    if jax.process_index() == 0:
        console.print(f"first loss {measured:.4f}; {config.loss.kind} at uniform logits gives {expected:.4f}")


def local_run_dir(config: TrainConfig) -> Path:
    """The folder for what must lie on a local disk: logs, metrics, profiles."""
    return Path("runs") / config.run_name if is_remote(config.output_dir) else Path(config.run_dir)


def _set_compiler_flags(config: TrainConfig) -> None:
    """Hand the configured XLA flags to the compilers, which read them from the environment at the first device use."""
    for variable, flags in (
        ("XLA_FLAGS", config.compiler.xla_flags),
        ("LIBTPU_INIT_ARGS", config.compiler.libtpu_args),
    ):
        if flags:
            os.environ[variable] = " ".join([os.environ.get(variable, ""), *flags]).strip()


def _initialise(config: TrainConfig, run_dir: Path) -> TrainerConfig:
    """Start `jax.distributed`, logging and trackers; the first call that touches a device."""
    trainer_config = config.trainer_config()
    trackers: list[TrackerConfig] = [JsonLinesTrackerConfig(path=str(run_dir / METRICS_FILE))]
    if config.trackers.wandb is not None:
        trackers.append(config.trackers.wandb)
    if config.trackers.tensorboard:
        if importlib.util.find_spec("tensorboardX") is None:
            raise TomatError(
                "trackers.tensorboard is set, but tensorboardX is not installed; install it with "
                "`uv sync --extra tensorboard`."
            )
        trackers.append(TensorboardConfig(logdir=str(run_dir / "tensorboard")))
    trainer_config.tracker = tuple(trackers)
    trainer_config.log_dir = run_dir
    # Before any collective: on a pod, `jax.device_count()` is right only after this.
    trainer_config.distributed.initialize()
    trainer_config.distributed = dataclasses.replace(trainer_config.distributed, initialize_jax_distributed=False)
    _check_batch(config, trainer_config)
    with warnings.catch_warnings():
        # A second run in one process (a notebook, a test): the tracker of the first one is finished.
        warnings.filterwarnings("ignore", message="Global tracker is already set")
        trainer_config.initialize()
    _quiet_terminal()
    return trainer_config


def _quiet_terminal() -> None:
    """Leave the terminal to the progress bar and to what needs attention; Levanter's own log is in the run's folder."""
    for handler in logging.getLogger().handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(logging.WARNING)
    # Levanter 0.2.227 warns once for every optional part that a model does not have, some 40 lines for each load.
    logging.getLogger("levanter.tensorstore_serialization").setLevel(logging.ERROR)


def _check_batch(config: TrainConfig, trainer_config: TrainerConfig) -> None:
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


def load_trained(run_dir: str | Path, step: int | None = None) -> LoadedRun:
    """The model of a run at its newest checkpoint, or at `step`.

    Raises:
        TomatError: No such run, no whole checkpoint, or one that does not fit the run's configuration.
    """
    _quiet_terminal()
    folder = Path(run_dir)
    config_path = folder / CONFIG_FILE
    if not config_path.exists():
        raise TomatError(f"{folder} is not a run: it has no {CONFIG_FILE}.")
    config = config_from_dict(yaml.safe_load(config_path.read_text(encoding="utf-8")), source=str(config_path))
    checkpoints = f"{config.run_dir}/checkpoints" if is_remote(config.output_dir) else str(folder / "checkpoints")
    try:
        path = latest_checkpoint_path(checkpoints) if step is None else f"{checkpoints}/step-{step}"
    except FileNotFoundError as error:
        raise TomatError(f"{checkpoints} holds no whole checkpoint; train the run first.") from error
    if not is_checkpoint_path(path):
        raise TomatError(f"{path} is not a whole checkpoint.")
    shape = eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))
    trainer = config.trainer_config()
    try:
        with trainer.use_device_mesh():
            model = load_checkpoint(
                shape, path, subpath="model", axis_mapping=trainer.parameter_axis_mapping, mesh=trainer.device_mesh
            )
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(f"{path} does not hold the model of {config_path}: {error}") from error
    found_step = json.loads(_read(f"{path}/metadata.json"))["step"]
    return LoadedRun(config, inference_mode(model, True), load_codec(str(folder / CODEC_FILE)), int(found_step))


def _read(url: str) -> str:
    files, path = fsspec.core.url_to_fs(url)
    return files.cat_file(path).decode()
