"""What happens between the steps of a run besides its guards: logging, evaluation, the profiler."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import haliax as hax
import jax
import levanter.callbacks
from levanter.data.loader import DataLoader
from levanter.models.lm_model import LmHeadModel
from levanter.tracker.telemetry import capture_stall_diagnostics
from levanter.trainer import Trainer

from tomat.reporting import console
from tomat.training.config import TrainConfig
from tomat.training.datasets import Datasets
from tomat.training.history import append_event
from tomat.training.loader import ShardDataset, token_loader
from tomat.training.phases import PhaseClock
from tomat.training.preemption import StopRequest

DATA_KEY = 2
"""What a run's seed is increased by for the data order."""


def make_loader(trainer: Trainer, dataset: ShardDataset, batch_size: int) -> DataLoader:
    """Batches of `dataset` for the trainer's devices.

    `Trainer.data_loader` asks for 32 batches at once (Levanter 0.2.227), so that the first one would wait for nearly a
    whole shuffle window.
    """
    return token_loader(dataset, batch_size, mesh=trainer.device_mesh, axis_resources=trainer.compute_axis_mapping)


def add_hooks(
    config: TrainConfig, trainer: Trainer, datasets: Datasets, clock: PhaseClock, run_dir: Path, stop: StopRequest
) -> list[Callable[..., Any]]:
    """Everything that happens between steps, each part timed by `clock` under its own name.

    Returns:
        What is to be called once more after the last step, with `force=True`.
    """
    closing: list[Callable[..., Any]] = []
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
        evaluation = Evaluation(trainer, validation, config.trainer.max_eval_batches, run_dir, stop)
        closing.append(clock.timed("eval_seconds", evaluation))
        trainer.add_hook(closing[-1], every=config.trainer.steps_per_eval)
    profiler = config.trainer.profiler
    profile_steps = profiler.resolve_num_profile_steps(config.trainer.num_train_steps) if profiler.is_enabled else 0
    if profile_steps > 0:
        hook = profiler.build(str(run_dir / "profiler"), run_id=config.run_name, num_steps=profile_steps)
        closing.append(clock.timed("profiler_seconds", hook))
        trainer.add_hook(closing[-1], every=1)
    return closing


class Evaluation:
    """The validation loss of a step, once.

    On a single host it is abandoned, and logged for no step, if half of the grace after SIGTERM has passed: the
    checkpoint needs the other half. Several hosts cannot agree on that within a batch, so there it is finished.
    """

    def __init__(
        self, trainer: Trainer, dataset: ShardDataset, max_batches: int | None, run_dir: Path, stop: StopRequest
    ):
        self._run_dir = run_dir
        self._stop = stop
        self._loader = make_loader(trainer, dataset, trainer.EvalBatch.size)
        self._last_step: int | None = None

        @hax.named_jit(axis_resources=trainer.parameter_axis_mapping)
        def validation_loss(model: LmHeadModel, batch: Any) -> Any:
            return trainer.loss_fn(model, batch, key=None)

        self._hook = levanter.callbacks.compute_validation_loss(
            cast(Any, validation_loss),  # its protocol asks for *inputs, which one batch satisfies
            cast(Any, self),  # iterated over, as the loader would be
            max_batches=max_batches,
            name="validation",
        )

    def __call__(self, info: Any, force: bool = False) -> None:
        """Evaluate after the step of `info`, unless that was done; `force` is for the trainer's sake."""
        del force
        if info.step == self._last_step:
            return
        try:
            self._hook(info)
        except _Abandoned:
            if jax.process_index() == 0:
                console.print(f"SIGTERM: the evaluation of step {info.step} is abandoned, so that the step is saved.")
                append_event(self._run_dir, "evaluation_abandoned", info.next_step)
        self._last_step = info.step

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if jax.process_count() == 1 and self._stop.remaining_seconds < self._stop.grace_seconds / 2:
                raise _Abandoned
            yield batch


class _Abandoned(Exception):
    """The evaluation makes room for the checkpoint."""
