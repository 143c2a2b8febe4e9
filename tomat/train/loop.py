"""The training loop: step, evaluate, report, save, until the last step or a request to stop."""

import asyncio
import dataclasses
import itertools
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.callbacks
import levanter.tracker
import numpy as np
from haliax.quantization import partition_for_grad_overwrite
from levanter.callbacks import ProgressEvent, progress_event_scope
from levanter.metrics import unwrap_metrics
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from tomat.base.errors import TomatError
from tomat.base.layout import PROFILER_FOLDER
from tomat.base.reporting import console, tell, warn
from tomat.data.codec.relative import offset_of
from tomat.data.tokens.shards import ShardSet
from tomat.data.tokens.vocabulary import DENSITY_START
from tomat.model.any_decoder import environment_of, is_field
from tomat.model.environment import EnvironmentConfig, EnvironmentTables
from tomat.model.field import FieldModel
from tomat.model.loss.density_loss import evaluation_sums
from tomat.model.loss.start import TIED_LOGIT_STD, UNTIED_LOGIT_STD, check_first_loss, uniform_loss
from tomat.train.checkpointer import RunCheckpointer
from tomat.train.datasets import Datasets, value_table
from tomat.train.dispatch import training_steps
from tomat.train.folder import RunFolder
from tomat.train.guards.storage import StorageWatch
from tomat.train.guards.watch import RunGuards
from tomat.train.loader import ShardDataset, token_loader, training_loader
from tomat.train.mfu import live_mfu
from tomat.train.origins import Start
from tomat.train.preemption import StopRequest
from tomat.train.row_atoms import RowAtoms
from tomat.train.settings.config import TrainConfig
from tomat.train.step import density_target
from tomat.train.tracking import PhaseClock, TrainingProgress

DATA_KEY = 2
"""Added to the run's seed for the data order."""


def shuffled_rows(config: TrainConfig, shards: ShardSet, epochs: int | None = None) -> ShardDataset:
    """The rows of a set in the order in which a run reads them; `epochs` None: without end."""
    environment = environment_of(config.model)
    return ShardDataset(
        shards,
        config.data.shuffle,
        # An evaluation of a part of the set reads the same part whatever the run's seed.
        seed=(config.trainer.seed if epochs is None else 0) + DATA_KEY,
        seq_len=config.seq_len,
        verify_checksums=config.data.verify_checksums,
        in_memory=config.data.in_memory,
        epochs=epochs,
        atoms=None if environment is None else RowAtoms(shards, environment, config.seq_len),
    )


@dataclass(frozen=True)
class TrainResult:
    """The result of one process of a run. For a resumed run it begins above step 0."""

    run_dir: Path
    first_step: int
    steps: int
    first_loss: float
    last_loss: float
    """Mean of the last 10 steps."""
    train_seconds: float
    """Wall-clock from the first batch to the last step, compilation included."""
    parameters: int
    """Trainable numbers in the model."""
    preempted: bool = False
    """SIGTERM, Ctrl-C or a notice stopped the run; the same command continues it."""


class TrainingLoop:
    """The steps of one process of a run. The trainer is entered and has no hooks yet, the guards are active, and `stop`
    is listening."""

    def __init__(
        self,
        folder: RunFolder,
        datasets: Datasets,
        start: Start,
        trainer: Trainer,
        state: TrainerState,
        guards: RunGuards,
        stop: StopRequest,
        storage: StorageWatch,
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
        self._evaluate = self._trace = None
        trainer.add_hook(levanter.callbacks.log_step_info(self._total_steps), every=1)
        if datasets.validation is not None and config.trainer.max_eval_batches != 0:
            validation = shuffled_rows(config, datasets.validation, epochs=1)
            self._evaluate = self._clock.timed("eval_seconds", Evaluation(trainer, validation, folder, stop))
            trainer.add_hook(self._evaluate, every=config.trainer.steps_per_eval)
        profiler, place = trainer.config.profiler, folder.path / PROFILER_FOLDER
        traced_steps = 0
        if profiler.is_enabled and profiler.start_step > self._first_step:  # a trace begins after a step
            traced_steps = profiler.resolve_num_profile_steps(self._total_steps)
        if profiler.is_enabled and not traced_steps and jax.process_index() == 0 and not any(place.rglob("*.pb")):
            steps = f"begins after step {self._first_step} and ends with step {self._total_steps}"
            warn(f"no trace: trainer.profiler.start_step is {profiler.start_step}, and this process {steps}.")
        if traced_steps > 0:
            hook: Any = profiler.build(str(place), run_id=config.run_name, num_steps=traced_steps)

            def traced(info: Any, force: bool = False) -> None:
                hook(info, force=force)
                if force or info.next_step >= profiler.start_step + traced_steps:
                    # Every host publishes its trace once it is written: the machine may be gone by the end of the run.
                    folder.publish_tree(place, PROFILER_FOLDER)

            self._trace = self._clock.timed("profiler_seconds", traced)
            trainer.add_hook(self._trace, every=1)
        # A machine that continues from the checkpoint finds the log of every step before it.
        saving = trainer.config.checkpointer
        self._checkpointer = RunCheckpointer(saving, trainer.run_id, start.partial, folder.publish, storage)
        self._save = self._clock.timed("checkpoint_seconds", self._save_untimed)
        self._live_mfu = live_mfu(config, jax.devices()[0].device_kind, jax.device_count())
        self._progress = TrainingProgress(self._total_steps, self._first_step)

    def run(self, state: TrainerState) -> TrainResult:
        started = time.monotonic()
        info = None
        try:
            with self._clock.listening_to_compiles():
                loader = training_loader(self._config, self._trainer, self._rows)
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
            assert info is not None  # the rows are repeated without end, and there is a step to take
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
        # A batch that was passed over has no loss to report.
        mean = float(np.nanmean(last)) if np.isfinite(last).any() else last[-1]
        return TrainResult(
            self._folder.path,
            self._first_step,
            steps,
            self._losses[0],
            mean,
            time.monotonic() - started,
            self._parameters,
            preempted=stop.agreed,
        )

    def _pauses_after(self, done: int) -> bool:
        settings, window = self._config.trainer, self._config.trainer.profiler
        evaluates = self._evaluate is not None and done % settings.steps_per_eval == 0
        traces = self._trace is not None and done in (window.start_step, window.start_step + window.num_steps)
        return evaluates or traces or self._checkpointer.is_due(done - 1)

    def _is_ended_by(self, info: Any) -> bool:
        """Report the step just read, and save it if it is due and its state is there; return whether the run stops."""
        self._losses.append(float(info.loss))
        if info.step == 0 and self._start.taken("weights") is None and self._config.distillation is None:
            self._check_first_loss()
        last = info.next_step >= self._total_steps
        if last:
            self._close(info, complete=True)
        # The line is on disk before the step can be in a checkpoint: the log has no holes.
        row = self._clock.row(info.step_duration) | self._live_mfu.row(info.step_duration)
        levanter.tracker.log(row, step=info.step, commit=True)
        self._guards.check_log()
        if self._folder.lease is not None:
            self._folder.lease.check()
        self._progress.update(info.next_step, self._losses[-1], row["tokens_per_second"], row.get("mfu_full"))
        if not isinstance(info.state, TrainerState):
            return False
        stopping = self._stop.reached()
        if stopping and jax.process_index() == 0:
            console.print(f"{self._stop.cause or 'SIGTERM'}: stopping after step {info.step}, with a checkpoint.")
        self._save(info, force=last or stopping)
        if stopping:
            self._stop.unsaved = False  # even if what follows takes too long
            if not last:
                self._close(info, complete=False)
        return stopping

    def _close(self, info: Any, complete: bool) -> None:
        """After the last step of a complete training (`complete`), evaluate; a run that is asked to stop has no time
        for that. After any last step, write a trace that has begun."""
        for hook in filter(None, (self._evaluate if complete else None, self._trace)):
            hook(info, force=True)

    def _save_untimed(self, info: Any, force: bool = False) -> None:
        """Save the step if it is due; with `force`, save the last step or the one that a stop falls on."""
        with progress_event_scope(info.emit_event, ProgressEvent.CHECKPOINT_STARTED, ProgressEvent.CHECKPOINT_FINISHED):
            if force and info.next_step < self._total_steps:
                self._checkpointer.on_stop(tree=info.state.saveable_state, step=info.step)
            else:
                self._checkpointer.on_step(tree=info.state.saveable_state, step=info.step, force=force)
            if force:
                self._checkpointer.wait_until_finished()

    def _check_first_loss(self) -> None:
        """Stop the run if its first loss is not what the configured loss gives for near-uniform logits."""
        config, measured = self._config, self._losses[0]
        environment, offset = environment_of(config.model), offset_of(self._datasets.codec)
        if measured == 0:
            said = f"no row of the first batch has a density token among its first {config.seq_len}"
            raise TomatError(f"{said}, so that nothing can be learnt; set a larger data.seq_len, or leave it out.")
        if is_field(config.model):
            said = "a field model begins as the sum of atoms, and this is the error of that sum"
        elif isinstance(environment, EnvironmentConfig) and environment.prior_anchors:
            # Its logits are not near-uniform: how wide the prior is, and how wrong, decides its first loss.
            said = "it depends on the prior around the promolecule, so it is not checked"
        elif offset is not None and config.loss.kind not in ("cross_entropy", "soft_cross_entropy"):
            said = "its distances scale with each voxel's sum of atoms, so it is not checked"
        else:
            target = density_target(config, value_table(self._datasets.codec), offset)
            examples = asyncio.run(self._rows.get_batch(range(config.batch_size)))
            tokens = np.stack([np.asarray(example.tokens.array) for example in examples])
            expected = uniform_loss(config.loss, tokens, target=target, vocab_size=config.data.model_vocabulary)
            tied = getattr(config.model, "tie_word_embeddings", False)
            logit_std = TIED_LOGIT_STD if tied else UNTIED_LOGIT_STD
            check_first_loss(config.loss, measured, expected, target=target, logit_std=logit_std)
            said = f"{config.loss.kind} at uniform logits gives {expected:.4f}"
        if jax.process_index() == 0:
            tell(f"first loss {measured:.4f}; {said}")


STATISTICS_BATCHES = 16
"""Number of first batches of a run whose invariants give a field model its statistics."""


def with_statistics(
    config: TrainConfig, trainer: Trainer, datasets: Datasets, state: TrainerState, tables: EnvironmentTables | None
) -> TrainerState:
    """The state of an untrained field model, with the statistics of the first rows that it will see."""
    assert tables is not None  # a step without them is refused earlier
    loader = training_loader(config, trainer, shuffled_rows(config, datasets.train))
    batches = itertools.islice(loader.iter_from_step(0), STATISTICS_BATCHES)

    @hax.named_jit(axis_resources=trainer.parameter_axis_mapping)
    def moments(model: FieldModel, batch: Any) -> Any:
        is_voxel = batch.tokens.rearrange(("batch", "position")).array >= DENSITY_START
        return model.moments(batch.atoms, tables, is_voxel)

    found = jax.tree.map(lambda *each: sum(each), *(moments(state.model, batch) for batch in batches))
    averaging: Any = state.model_averaging
    if averaging is not None:  # begins as the model; otherwise it would approach the statistics only slowly
        averaging = dataclasses.replace(averaging, model=averaging.model.with_moments(found))
    return dataclasses.replace(state, model=state.model.with_moments(found), model_averaging=averaging)


def count_parameters(state: TrainerState) -> int:
    # Without the scales of fp8, which no optimizer changes.
    return sum(leaf.size for leaf in jax.tree.leaves(partition_for_grad_overwrite(state.trainable_model)[1]))


class Evaluation:
    """The validation loss of a step, once. Every figure is a mean over the sequences with density, with equal weights.

    A batch gives sums and their count, so the figures are those of the set, whatever the batch and the devices
    (`evaluation_sums` has the rule). Logged under `eval/validation/`: `loss` and the metrics of `density_loss`;
    `sequences`, the number that counted; `sequences_without_density`, the fraction of the rows read that did not.

    On a single host an evaluation is abandoned, and nothing is logged, if half of the grace after SIGTERM has passed:
    the checkpoint needs the other half. Several hosts cannot agree on that within a batch, so there it is finished.
    """

    def __init__(self, trainer: Trainer, dataset: ShardDataset, folder: RunFolder, stop: StopRequest):
        self._folder, self._stop = folder, stop
        self._rows, self._batch_size = dataset.index.rows, trainer.EvalBatch.size
        self._loader = token_loader(
            dataset, self._batch_size, mesh=trainer.device_mesh, axis_resources=trainer.compute_axis_mapping
        )
        self._last_step: int | None = None

        # Levanter's own loop (`eval_loss_loop`, 0.2.227) averages the batches' losses, however few rows one has.
        @hax.named_jit(axis_resources=trainer.parameter_axis_mapping)
        def validation_loss(model: LmHeadModel, batch: Any) -> dict[str, jax.Array]:
            loss, metrics = trainer.loss_fn(model, batch, key=None)
            return evaluation_sums(jnp.asarray(loss), unwrap_metrics(metrics), batch.tokens.axis_size("batch"))

        self._sums_of_batch = validation_loss

    def __call__(self, info: Any, force: bool = False) -> None:
        """Evaluate after the step of `info`, unless that is done. `force`, which a run's end passes, does nothing."""
        del force
        if info.step == self._last_step:
            return
        began, ended = ProgressEvent.EVALUATION_STARTED, ProgressEvent.EVALUATION_FINISHED
        with progress_event_scope(info.emit_event, began, ended):
            figures = self._figures(info.eval_model)
        if figures is not None:
            levanter.tracker.log({f"eval/validation/{name}": x for name, x in figures.items()}, step=info.step)
        else:
            if jax.process_index() == 0:
                said = f"the evaluation of step {info.step} is abandoned, so that the step is saved"
                console.print(f"{self._stop.cause}: {said}.")
            self._folder.record("evaluation_abandoned", info.next_step)
        self._last_step = info.step

    def _figures(self, model: LmHeadModel) -> dict[str, float] | None:
        """The figures to log; None for an evaluation that is abandoned in favour of the checkpoint."""
        sums: dict[str, float] = defaultdict(float)
        load_seconds = loss_seconds = 0.0
        n_batches, began = 0, time.monotonic()
        for batch in itertools.islice(self._loader, self._folder.config.trainer.max_eval_batches):
            if jax.process_count() == 1 and self._stop.remaining_seconds < self._stop.grace_seconds / 2:
                return None
            loaded = time.monotonic()
            for name, value in jax.device_get(self._sums_of_batch(model, batch)).items():
                sums[name] += float(value)
            load_seconds += loaded - began
            began = time.monotonic()
            loss_seconds += began - loaded
            n_batches += 1
        rows = min(n_batches * self._batch_size, self._rows)
        sequences = sums.pop("sequences", 0.0)
        if sequences == 0:
            said = f"none of the {rows} validation rows read has a density token"
            raise TomatError(f"{said}; check data.validation, or set trainer.max_eval_batches: 0 to do without.")
        return {name: total / sequences for name, total in sums.items()} | {
            "sequences": sequences,
            "sequences_without_density": 1.0 - sequences / rows,
            "timing/load_time": load_seconds,
            "timing/loss_time": loss_seconds,
            "timing/num_batches": float(n_batches),
        }
