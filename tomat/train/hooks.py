"""What happens between the steps of a run besides its guards: logging, evaluation, the profiler."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import levanter.callbacks
import levanter.tracker
from levanter.callbacks import ProgressEvent, progress_event_scope
from levanter.metrics import unwrap_metrics
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer

from tomat.base.errors import TomatError
from tomat.base.layout import PROFILER_FOLDER
from tomat.base.reporting import console
from tomat.data.tokens.shards import ShardSet
from tomat.model.any_decoder import environment_of
from tomat.model.loss.density_loss import evaluation_sums
from tomat.train.datasets import Datasets
from tomat.train.folder import RunFolder
from tomat.train.loader import RowAtoms, ShardDataset, token_loader
from tomat.train.preemption import StopRequest
from tomat.train.settings.config import TrainConfig
from tomat.train.tracking import PhaseClock

DATA_KEY = 2
"""What a run's seed is increased by for the data order."""


def shuffled_rows(config: TrainConfig, shards: ShardSet, epochs: int | None = None) -> ShardDataset:
    """The rows of a set in the order that a run reads them; `epochs` None: without end."""
    environment = environment_of(config.model)
    return ShardDataset(
        shards,
        config.data.shuffle,
        seed=config.trainer.seed + DATA_KEY,
        seq_len=config.seq_len,
        verify_checksums=config.data.verify_checksums,
        in_memory=config.data.in_memory,
        epochs=epochs,
        atoms=None if environment is None else RowAtoms(shards, environment),
    )


@dataclass(frozen=True)
class ClosingHooks:
    """What is to be called once more, with `force=True`, after the step that ends a run."""

    evaluation: Callable[..., Any] | None = None
    """After the last step of the training; a run that is asked to stop has no time for it."""
    profiler: Callable[..., Any] | None = None
    """After any last step, so that a trace that has begun is written."""

    def close(self, info: Any, complete: bool) -> None:
        """Call what is due after the last step of the training (`complete`), or after one at which the run stops."""
        for hook in (self.evaluation if complete else None, self.profiler):
            if hook is not None:
                hook(info, force=True)


def add_hooks(
    folder: RunFolder, trainer: Trainer, datasets: Datasets, clock: PhaseClock, stop: StopRequest
) -> ClosingHooks:
    """Everything that happens between steps, each part timed by `clock` under its own name."""
    config, profiler = folder.config, trainer.config.profiler
    evaluate = trace = None
    trainer.add_hook(levanter.callbacks.log_step_info(config.trainer.num_train_steps), every=1)
    if datasets.validation is not None and config.trainer.max_eval_batches != 0:
        validation = shuffled_rows(config, datasets.validation, epochs=1)
        evaluate = clock.timed("eval_seconds", Evaluation(trainer, validation, folder, stop))
        trainer.add_hook(evaluate, every=config.trainer.steps_per_eval)
    steps = profiler.resolve_num_profile_steps(config.trainer.num_train_steps) if profiler.is_enabled else 0
    if steps > 0:
        hook = profiler.build(str(folder.path / PROFILER_FOLDER), run_id=config.run_name, num_steps=steps)
        trace = clock.timed("profiler_seconds", hook)
        trainer.add_hook(trace, every=1)
    return ClosingHooks(evaluate, trace)


class Evaluation:
    """The validation loss of a step, once: every figure a mean over the sequences with density, each weighing the same.

    Sums and their count are what a batch gives, so the figures are those of the set, whatever the batch, the devices
    and the rows that fill the last batch up (`evaluation_sums` has the rule). Logged under `eval/validation/`: `loss`
    and the metrics of `density_loss`; `sequences`, those that counted; and `sequences_without_density`, the fraction of
    the rows read that did not. `trainer.max_eval_batches` limits batches, so with it the rows read depend on the batch.

    On a single host it is abandoned, and logged for no step, if half of the grace after SIGTERM has passed: the
    checkpoint needs the other half. Several hosts cannot agree on that within a batch, so there it is finished.
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
        """Evaluate after the step of `info`, unless that was done, with `force` too: so a run's end calls its hooks."""
        del force
        if info.step == self._last_step:
            return
        try:
            with progress_event_scope(
                info.emit_event, ProgressEvent.EVALUATION_STARTED, ProgressEvent.EVALUATION_FINISHED
            ):
                figures = self._figures(info.eval_model)
            levanter.tracker.log({f"eval/validation/{name}": x for name, x in figures.items()}, step=info.step)
        except _Abandoned:
            if jax.process_index() == 0:
                console.print(
                    f"{self._stop.cause}: the evaluation of step {info.step} is abandoned, so that the step is saved."
                )
            self._folder.record("evaluation_abandoned", info.next_step)
        self._last_step = info.step

    def _figures(self, model: LmHeadModel) -> dict[str, float]:
        """Means over the set, and what it took."""
        sums: dict[str, float] = defaultdict(float)
        load_seconds = loss_seconds = 0.0
        batches, n_batches = iter(self), 0
        while n_batches != self._folder.config.trainer.max_eval_batches:
            began = time.monotonic()
            if (batch := next(batches, None)) is None:
                break
            loaded = time.monotonic()
            for name, value in jax.device_get(self._sums_of_batch(model, batch)).items():
                sums[name] += float(value)
            load_seconds += loaded - began
            loss_seconds += time.monotonic() - loaded
            n_batches += 1
        rows = min(n_batches * self._batch_size, self._rows)
        sequences = sums.pop("sequences", 0.0)
        if sequences == 0:
            raise TomatError(
                f"none of the {rows} validation rows read has a density token; check data.validation, or set "
                "trainer.max_eval_batches: 0 to train without a validation loss."
            )
        return {name: total / sequences for name, total in sums.items()} | {
            "sequences": sequences,
            "sequences_without_density": 1.0 - sequences / rows,
            "timing/load_time": load_seconds,
            "timing/loss_time": loss_seconds,
            "timing/num_batches": float(n_batches),
        }

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if jax.process_count() == 1 and self._stop.remaining_seconds < self._stop.grace_seconds / 2:
                raise _Abandoned
            yield batch


class _Abandoned(Exception):
    """The evaluation makes room for the checkpoint."""
