"""The training loop: step, report, save, until the last step or a request to stop."""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import levanter.tracker
import numpy as np
from levanter.callbacks import ProgressEvent, progress_event_scope
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from tomat.base.errors import TomatError
from tomat.base.reporting import console
from tomat.model.any_decoder import environment_of
from tomat.model.loss.start import TIED_LOGIT_STD, UNTIED_LOGIT_STD, check_first_loss, uniform_loss
from tomat.train.checkpointer import RunCheckpointer
from tomat.train.datasets import Datasets, value_table
from tomat.train.dispatch import training_steps
from tomat.train.folder import RunFolder
from tomat.train.guards.watch import RunGuards
from tomat.train.hooks import add_hooks, shuffled_rows
from tomat.train.loader import token_loader
from tomat.train.mfu import live_mfu
from tomat.train.origins import Start
from tomat.train.preemption import StopRequest
from tomat.train.step import density_target
from tomat.train.tracking import PhaseClock, TrainingProgress


@dataclass(frozen=True)
class TrainResult:
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


class TrainingLoop:
    """The steps of one process of a run.

    The trainer is entered and has no hooks yet, the guards are active, and `stop` is listening.
    """

    def __init__(
        self,
        folder: RunFolder,
        datasets: Datasets,
        start: Start,
        trainer: Trainer,
        state: TrainerState,
        guards: RunGuards,
        stop: StopRequest,
    ):
        self._folder, self._start, self._trainer = folder, start, trainer
        self._datasets, self._guards, self._stop = datasets, guards, stop
        self._config = config = folder.config
        self._first_step, self._total_steps = int(state.step), config.trainer.num_train_steps
        self._parameters = count_parameters(state)
        self._rows = shuffled_rows(config, datasets.train)
        self._losses: list[float] = []
        # From the end of the first step there is something to save.
        trainer.add_hook(lambda info: stop.defer(info.next_step), every=1)
        guards.attach(trainer, state, self._rows, datasets)
        self._clock = PhaseClock()
        self._closing = add_hooks(folder, trainer, datasets, self._clock, stop)
        # A machine that goes on from the checkpoint finds the log of every step before it.
        self._checkpointer = RunCheckpointer(
            trainer.config.checkpointer, trainer.run_id, start.partial, before_save=folder.publish
        )
        self._save = self._clock.timed("checkpoint_seconds", self._save_untimed)
        self._live_mfu = live_mfu(config, jax.devices()[0].device_kind, jax.device_count())
        self._progress = TrainingProgress(self._total_steps, self._first_step)

    def run(self, state: TrainerState) -> TrainResult:
        started = time.monotonic()
        info = None
        try:
            with self._clock.listening_to_compiles():
                loader = token_loader(
                    self._rows,
                    self._config.batch_size,
                    mesh=self._trainer.device_mesh,
                    axis_resources=self._trainer.compute_axis_mapping,
                    buffered_batches=self._config.data.prefetch_batches,
                )
                steps = training_steps(
                    self._trainer,
                    state,
                    loader.iter_from_step(self._first_step),
                    ahead=self._config.dispatch_ahead,
                    pauses_after=self._pauses_after,
                    asks=lambda: self._stop.asked or self._checkpointer.interval_is_over,
                    rest=self._config.pause,
                )
                for info in steps:
                    if self._is_ended_by(info):
                        break
            if info is None:
                raise TomatError("no step was run: the data loader ended at once.")
        finally:
            self._progress.close()
            # A run that has returned has its checkpoints on disk.
            self._checkpointer.wait_until_finished()
        steps, stop = info.next_step, self._stop
        if stop.agreed:
            self._folder.record("preempted", steps, cause=stop.cause or "another host", saved=True)
        else:
            self._folder.record("stop", steps, reason="complete")
        stop.resume_at_once()
        last = self._losses[-10:]
        return TrainResult(
            self._folder.path,
            self._first_step,
            steps,
            self._losses[0],
            # A batch that was passed over has no loss to report.
            float(np.nanmean(last)) if np.isfinite(last).any() else last[-1],
            time.monotonic() - started,
            self._parameters,
            preempted=stop.agreed,
        )

    def _pauses_after(self, done: int) -> bool:
        """Whether something after so many steps needs their state, or devices that have nothing else to do."""
        trainer, hooks = self._config.trainer, self._closing
        window = trainer.profiler
        evaluates = hooks.evaluation is not None and done % trainer.steps_per_eval == 0
        traces = hooks.profiler is not None and done in (window.start_step, window.start_step + window.num_steps)
        return evaluates or traces or self._checkpointer.is_due(done - 1)

    def _is_ended_by(self, info: Any) -> bool:
        """Report the step just read, and save it where its state is there; says whether the run is to stop after it."""
        self._losses.append(float(info.loss))
        if info.step == 0 and self._start.weights is None and self._config.distillation is None:
            self._check_first_loss()
        last = info.next_step >= self._total_steps
        if last:
            self._closing.close(info, complete=True)
        # Its line is on disk before the step can be in a checkpoint: the log has no holes.
        row = self._clock.row(info.step_duration) | self._live_mfu.row(info.step_duration)
        levanter.tracker.log(row, step=info.step, commit=True)
        self._guards.check_log()
        self._folder.lock.check()
        self._progress.update(info.next_step, self._losses[-1], row["tokens_per_second"], row.get("mfu_full"))
        if not isinstance(info.state, TrainerState):
            return False
        stopping = self._stop.reached()
        if stopping and jax.process_index() == 0:
            console.print(f"{self._stop.cause or 'SIGTERM'}: stopping after step {info.step}, with a checkpoint.")
        self._save(info, force=last or stopping)
        if stopping:
            self._stop.unsaved = False  # whatever takes too long from here on
            if not last:
                self._closing.close(info, complete=False)
        return stopping

    def _save_untimed(self, info: Any, force: bool = False) -> None:
        with progress_event_scope(info.emit_event, ProgressEvent.CHECKPOINT_STARTED, ProgressEvent.CHECKPOINT_FINISHED):
            self._checkpointer.on_step(tree=info.state.saveable_state, step=info.step, force=force)
            if force:
                self._checkpointer.wait_until_finished()

    def _check_first_loss(self) -> None:
        """Stop the run if its first loss is not what the configured loss gives for near-uniform logits."""
        config, measured = self._config, self._losses[0]
        environment = environment_of(config.model)
        if environment is not None and environment.prior_anchors:
            # Its logits are not near-uniform: how wide the prior is, and how wrong, decides its first loss.
            said = "of the prior around the promolecule"
        else:
            target = density_target(config, value_table(self._datasets.codec))
            examples = asyncio.run(self._rows.get_batch(range(config.batch_size)))
            tokens = np.stack([np.asarray(example.tokens.array) for example in examples])
            expected = uniform_loss(config.loss, tokens, target=target, vocab_size=config.data.model_vocabulary)
            tied = getattr(config.model, "tie_word_embeddings", False)
            logit_std = TIED_LOGIT_STD if tied else UNTIED_LOGIT_STD
            check_first_loss(config.loss, measured, expected, target=target, logit_std=logit_std)
            said = f"{config.loss.kind} at uniform logits gives {expected:.4f}"
        if jax.process_index() == 0:
            console.print(f"first loss {measured:.4f}; {said}")


def count_parameters(state: TrainerState) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(state.trainable_model))
