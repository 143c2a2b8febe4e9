"""One training run: start or resume, train, and leave a folder that says what happened.

A run's folder holds `config.yaml` (the whole configuration), `codec.json`, `metrics.jsonl` (one line a step),
`checkpoints/step-N`, `profiler/` where a window was profiled, and Levanter's log.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import levanter.tracker
import numpy as np
import yaml
from levanter.callbacks import ProgressEvent, progress_event_scope
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.tree_utils import inference_mode

from tomat.base.errors import TomatError
from tomat.base.reporting import console, write_text
from tomat.codec.base import DensityCodec
from tomat.codec.files import load_codec, write_codec
from tomat.hardware.mfu import LiveMfu
from tomat.loss.start import TIED_LOGIT_STD, UNTIED_LOGIT_STD, check_first_loss, uniform_loss
from tomat.runs.checkpoints import AVERAGED, find_checkpoint
from tomat.runs.history import append_event, read_events
from tomat.runs.lock import RunLock, hold_run
from tomat.runs.published import CODEC_FILE, CONFIG_FILE, fetch, is_remote, publish
from tomat.training.checkpointer import RunCheckpointer
from tomat.training.config import TrainConfig, config_hash, recorded_config
from tomat.training.datasets import Datasets, open_datasets, value_table
from tomat.training.devices import ignore_absent_tpu
from tomat.training.guards.watch import RunGuards
from tomat.training.hooks import DATA_KEY, add_hooks, make_loader
from tomat.training.loader import ShardDataset
from tomat.training.origins import Continuation, Start, plan_start
from tomat.training.phases import PhaseClock
from tomat.training.preemption import StopRequest
from tomat.training.restore import begin_with_weights, load_weights, restore_state
from tomat.training.startup import (
    connect,
    initialise,
    local_run_dir,
    make_folder,
    quiet_terminal,
    set_compiler_flags,
)
from tomat.training.step import build_trainer, density_target
from tomat.training.tracking import METRICS_FILE, TrainingProgress, truncate_metrics

MODEL_KEY, TRAINING_KEY = 0, 1
"""What a run's seed is folded with for the weights and the training step."""


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
    """SIGTERM, Ctrl-C or a notice stopped the run; the same command continues it."""


@dataclass(frozen=True)
class LoadedRun:
    """A trained model and what is needed to use it."""

    config: TrainConfig
    model: LmHeadModel
    codec: DensityCodec
    step: int
    weights: str
    """`averaged` where the run averages its weights (`trainer.model_averaging`), or `of the last step`."""


def train(
    config: TrainConfig, continuation: Continuation | None = None, stop: StopRequest | None = None
) -> TrainResult:
    """Train until `trainer.num_train_steps`, from the newest whole checkpoint of the run where there is one.

    Args:
        config: The run.
        continuation: Changes by leave, a fork, a warm start; None: none of them.
        stop: Listening already, where a command does more than train; None: SIGTERM and Ctrl-C
            are listened to here.

    Raises:
        TomatError: Data, configuration, devices or a checkpoint that do not go together, another process that trains
            the run, or a first loss that is not the configured one.
        RetryableError: Storage that did not answer.
    """
    with contextlib.ExitStack() as stack:
        if stop is None:
            stop = StopRequest(config.preemption.grace_seconds)
            stack.enter_context(stop.listening())
        run_dir, continuation = local_run_dir(config), continuation or Continuation()
        set_compiler_flags(config)
        if is_remote(config.output_dir):
            make_folder(run_dir)
            fetch(config.run_dir, run_dir)
        start = plan_start(config, continuation, run_dir)
        make_folder(run_dir)
        trainer_config = connect(config)
        stop.take_over()  # the TPU's library has installed a handler of its own
        if config.preemption.maintenance_notice and jax.default_backend() == "tpu":
            stop.poll_notices(config.preemption.poll_seconds)
        try:
            hold = RunLock()
            if jax.process_index() == 0:
                hold = stack.enter_context(hold_run(config.run_dir, run_dir, config.run_name))
                fetched = is_remote(config.output_dir) and fetch(config.run_dir, run_dir)
                if fetched or start.is_outdated:
                    # Another process has gone on with the run before this one had its turn.
                    start = plan_start(config, continuation, run_dir)
            return _train(config, trainer_config, start, run_dir, stop, hold)
        except BaseException:
            if jax.process_count() > 1:
                stop.limit_exit(1)
            raise


def _train(
    config: TrainConfig, trainer_config: TrainerConfig, start: Start, run_dir: Path, stop: StopRequest, hold: RunLock
) -> TrainResult:
    """`train`, once the devices are there."""
    guards = RunGuards(config, run_dir)
    first = jax.process_index() == 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(guards.active())
        datasets = open_datasets(config, run_dir)
        guards.check_start(datasets, run_dir / CODEC_FILE)
        start.check_data(datasets)
        start.settle(datasets.codec)
        # Only now: of a run that cannot go on, TensorBoard would already have dropped the last steps.
        initialise(config, trainer_config, run_dir, start.first_step)
        table = value_table(datasets.codec)
        trainer_config.load_checkpoint = start.source is not None
        trainer_config.load_checkpoint_path = None if start.source is None else start.source.path
        trainer = stack.enter_context(build_trainer(config, trainer_config, table))
        stack.callback(_publish, config, run_dir, hold)
        stack.callback(trainer.tracker.finish)
        state = _initial_state(config, trainer, start)
        if first:
            # Only now: a resume that fails leaves the run as it was.
            start.record(datasets)
            guards.record_start()
            write_text(run_dir / CONFIG_FILE, yaml.safe_dump(config.to_dict(), sort_keys=False))
            write_codec(datasets.codec, run_dir / CODEC_FILE)
            if start.fork is not None:
                # A large checkpoint takes minutes to copy; a machine that goes on with the run must know what it is.
                _publish(config, run_dir, hold)
                start.copy_fork()
        first_step = int(state.step)
        stop.step = first_step
        stop.on_overrun = lambda message: _record(run_dir, "stop", stop.step, reason=message)
        try:
            _announce(config, datasets, state, start, run_dir)
            _publish(config, run_dir, hold)
            if first_step >= config.trainer.num_train_steps:
                console.print(f"training is complete: {first_step} of {config.trainer.num_train_steps} steps are done.")
                count = _parameters(state)
                return TrainResult(run_dir, first_step, first_step, float("nan"), float("nan"), 0.0, count)
            return _loop(config, trainer, state, datasets, table, start, run_dir, guards, stop, hold)
        except BaseException as error:
            if isinstance(error, SystemExit | KeyboardInterrupt) and stop.asked:
                _record(run_dir, "preempted", stop.step, cause=stop.cause, saved=not stop.unsaved)
                raise
            _record(run_dir, "stop", stop.step, reason=f"{type(error).__name__}: {error}"[:500])
            raise


def _initial_state(config: TrainConfig, trainer: Trainer, start: Start) -> Any:
    """The trainer's state: of the run's checkpoint, or fresh, with the weights of another run after a warm start.

    Raises:
        TomatError: A checkpoint of another model or optimizer.
    """
    seed_key = jax.random.PRNGKey(config.trainer.seed)
    training_key = jax.random.fold_in(seed_key, TRAINING_KEY)
    source = start.source or start.weights
    try:
        if start.weights is None:
            path = None if start.source is None else start.source.path
            return restore_state(config, trainer, path, training_key, jax.random.fold_in(seed_key, MODEL_KEY))
        model, _ = load_weights(config, start.weights.path, trainer.parameter_axis_mapping, trainer.device_mesh)
        return begin_with_weights(trainer, training_key, model)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(
            f"the checkpoint {source.path if source else ''} does not hold this model and optimizer ({error}); use the "
            "run's own settings, or another run_name."
        ) from error


def _announce(config: TrainConfig, datasets: Datasets, state: Any, start: Start, run_dir: Path) -> None:
    """Say what begins, on the terminal and in the run's history; cut the log back to where the run goes on."""
    if jax.process_index() != 0:
        return
    first_step = int(state.step)
    again = truncate_metrics(run_dir / METRICS_FILE, first_step)
    before = [event for event in read_events(run_dir) if event["event"] in ("start", "resume", "stop", "preempted")]
    devices = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    details = {"devices": devices, "hosts": jax.process_count(), "configuration": config_hash(config)}
    if not before:
        append_event(run_dir, "start", first_step, **details)
    elif first_step < config.trainer.num_train_steps:
        # Whoever is killed cannot say so.
        after = before[-1]["event"] if before[-1]["event"] in ("stop", "preempted") else "killed"
        found = start.checkpoint.path if start.checkpoint is not None else None
        append_event(run_dir, "resume", first_step, after=after, checkpoint=found, steps_again=again, **details)
    console.print(
        f"run [bold]{config.run_name}[/bold]: {_parameters(state) / 1e6:,.1f} M parameters, {datasets.train.rows:,} "
        f"rows of {config.seq_len} tokens, batch {config.batch_size}, loss {config.loss.kind}, {devices}"
        + (f", resumed at step {first_step}" if first_step else "")
    )
    if (warning := config.loss.warning()) is not None:
        console.print(f"[yellow]warning:[/yellow] {warning}")


def _loop(
    config: TrainConfig,
    trainer: Trainer,
    state: Any,
    datasets: Datasets,
    table: np.ndarray | None,
    start: Start,
    run_dir: Path,
    guards: RunGuards,
    stop: StopRequest,
    hold: RunLock,
) -> TrainResult:
    """Step, report, save, until the last step or a request to stop."""
    first_step, total_steps = int(state.step), config.trainer.num_train_steps
    parameters = _parameters(state)
    dataset = ShardDataset(
        datasets.train,
        config.data.shuffle,
        seed=config.trainer.seed + DATA_KEY,
        seq_len=config.seq_len,
        verify_checksums=config.data.verify_checksums,
    )
    # From the end of the first step there is something to save.
    trainer.add_hook(lambda info: stop.defer(info.next_step), every=1)
    guards.attach(trainer, state, dataset, datasets)
    clock = PhaseClock()
    closing = add_hooks(config, trainer, datasets, clock, run_dir, stop)

    # A machine that goes on from the checkpoint finds the log of every step before it.
    publish_log = partial(_publish, config, run_dir, hold)
    checkpointer = RunCheckpointer(trainer.config.checkpointer, trainer.run_id, start.partial, publish_log)

    def save(info: Any, force: bool = False) -> None:
        with progress_event_scope(info.emit_event, ProgressEvent.CHECKPOINT_STARTED, ProgressEvent.CHECKPOINT_FINISHED):
            checkpointer.on_step(tree=info.state.saveable_state, step=info.step, force=force)
            if force:
                checkpointer.wait_until_finished()

    save = clock.timed("checkpoint_seconds", save)
    live_mfu = LiveMfu.from_config(config, jax.devices()[0].device_kind, jax.device_count())
    progress = TrainingProgress(total_steps, first_step)
    losses: list[float] = []
    started = time.monotonic()
    info = None
    try:
        with clock.listening_to_compiles():
            batches = make_loader(trainer, dataset, config.batch_size).iter_from_step(first_step)
            for info in trainer.training_steps(state, batches):
                losses.append(float(info.loss))
                if len(losses) == 1 and first_step == 0 and start.weights is None:
                    _check_first_loss(config, dataset, table, losses[0])
                last = info.next_step >= total_steps
                if last:
                    closing.close(info, complete=True)
                row = clock.row(info.step_duration) | live_mfu.row(info.step_duration)
                # The line of the step is on disk before the step can be in a checkpoint: the log has no holes.
                levanter.tracker.log(row, step=info.step, commit=True)
                guards.check_log()
                hold.check()
                progress.update(info.next_step, losses[-1], row["tokens_per_second"], row.get("mfu_full"))
                stopping = stop.reached()
                if stopping and jax.process_index() == 0:
                    console.print(f"{stop.cause or 'SIGTERM'}: stopping after step {info.step}, with a checkpoint.")
                save(info, force=last or stopping)
                if stopping:
                    stop.unsaved = False  # whatever takes too long from here on
                    if not last:
                        closing.close(info, complete=False)
                    break
        if info is None:
            raise TomatError("no step was run: the data loader ended at once.")
    finally:
        progress.close()
        # A run that has returned has its checkpoints on disk.
        checkpointer.wait_until_finished()
    if stop.agreed:
        _record(run_dir, "preempted", info.next_step, cause=stop.cause or "another host", saved=True)
    else:
        _record(run_dir, "stop", info.next_step, reason="complete")
    stop.resume_at_once()
    return TrainResult(
        run_dir,
        first_step,
        info.next_step,
        losses[0],
        # A batch that was passed over has no loss to report.
        float(np.nanmean(losses[-10:])) if np.isfinite(losses[-10:]).any() else losses[-1],
        time.monotonic() - started,
        parameters,
        preempted=stop.agreed,
    )


def _publish(config: TrainConfig, run_dir: Path, hold: RunLock) -> None:
    """Bring the files of a run in a bucket up to date, if they are still this process's: an outage may have cost it the
    lease unnoticed.

    Raises:
        TomatError: Another process trains the run now, or the bucket cannot be written.
        RetryableError: The bucket does not answer.
    """
    hold.confirm()
    if is_remote(config.output_dir) and jax.process_index() == 0:
        publish(config.run_dir, run_dir)


def _record(run_dir: Path, event: str, step: int, **details: Any) -> None:
    if jax.process_index() == 0:
        append_event(run_dir, event, step, **details)


def _parameters(state: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state.trainable_model))


def _check_first_loss(config: TrainConfig, dataset: ShardDataset, table: np.ndarray | None, measured: float) -> None:
    """Stop the run if its first loss is not what the configured loss gives for near-uniform logits."""
    examples = asyncio.run(dataset.get_batch(range(config.batch_size)))
    tokens = np.stack([np.asarray(example.tokens.array) for example in examples])
    target = density_target(config, table)
    expected = uniform_loss(config.loss, tokens, target=target, vocab_size=config.data.vocabulary.size)
    check_first_loss(
        config.loss,
        measured,
        expected,
        target=target,
        logit_std=TIED_LOGIT_STD if getattr(config.model, "tie_word_embeddings", False) else UNTIED_LOGIT_STD,
    )
    if jax.process_index() == 0:
        console.print(f"first loss {measured:.4f}; {config.loss.kind} at uniform logits gives {expected:.4f}")


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
