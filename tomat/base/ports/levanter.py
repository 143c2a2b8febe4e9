"""Private names of Levanter (`marin-levanter`), which has no public ones for these."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import jax
from levanter.callbacks import StepInfo
from levanter.checkpoint import Checkpointer
from levanter.layers.flash_attention import _flash_attention_backward, _flash_attention_forward
from levanter.metrics import Metric
from levanter.trainer import Trainer, TrainerConfig

VERSION = "0.2.227.dev40316220070"

flash_attention_forward, flash_attention_backward = _flash_attention_forward, _flash_attention_backward
"""The two halves of the blockwise attention. Its public function does not return the log-sum-exp of the scores."""


def settle(config: TrainerConfig) -> None:
    """Check a trainer's configuration and fill in what depends on the devices. `initialize` does this too, but also
    starts log, trackers and the distributed service."""
    config._validate_and_set_defaults()


def step_without_hooks(trainer: Trainer, *arguments: Any) -> Any:
    """The function that the trainer compiles, not compiled; `train_step` compiles and runs it."""
    return trainer._train_step(*arguments, _no_hooks=True)


def compiled_step(trainer: Trainer) -> Any:
    """The compiled step, to be lowered and called with arrays alone; `train_step` looks its program up at each call."""
    return trainer._jit_train_step_fn_no_hook


def first_step(trainer: Trainer, step: Any, *arguments: Any) -> Any:
    """Take a step as `train_step` does, including what it writes about the first step."""
    return trainer._maybe_save_jaxpr("train_step", step, *arguments, {})


def weighted_mean(total: jax.Array | float, weight: jax.Array) -> Metric:
    """A metric from a sum and its weight. Levanter folds both over microbatches, but makes only metrics of weight 1."""
    return Metric(_value=total, _count=weight)


def value_of(metric: Metric) -> jax.Array | float:
    """The value that a metric was made of."""
    return metric._value


def step_info(state: Any, loss: float, seconds: float, on_event: Callable[..., None]) -> StepInfo[Any]:
    """What hooks are given after a step, with a way to report progress."""
    return StepInfo(state, loss, seconds, _event_handler=on_event)


def kept_every(checkpointer: Checkpointer, step: int) -> int | None:
    """The interval of steps whose checkpoints are kept, at this step; `on_step` asks for it too, but saves."""
    return checkpointer._get_current_step_save_interval(step)


def since_last_save(checkpointer: Checkpointer) -> timedelta:
    """Time since the last save began, by the checkpointer's own clock."""
    return checkpointer._dt_now_injection() - checkpointer._last_save_time


def replace_manager(checkpointer: Checkpointer, manager: Any) -> None:
    """Make a checkpointer write with another of JAX's managers; its constructor makes one of its own."""
    checkpointer._manager = manager
