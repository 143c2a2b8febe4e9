"""Steps that are dispatched before the loss of an earlier one is read, so that no device waits for the host.

Levanter's loop (0.2.227) reads every loss at once: the devices have nothing to do while hooks run and the next step is
dispatched. Here the next steps are queued by then. The compiled step is Levanter's own, so every number is the same.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import levanter.tracker
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.callbacks import ProgressEvent, StepInfo
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from tomat.base.ports.levanter import compiled_step, first_step, step_info
from tomat.train.guards.loss import GuardedState
from tomat.train.loader import TokenExample
from tomat.train.settings.schema import PauseConfig

_copied = jax.jit(partial(jax.tree.map, jnp.copy))
_any = jax.jit(jnp.any)


class CompiledStep:
    """Levanter's training step and the state between two steps. The first call takes the buffers of the initial state.

    `named_jit` (marin-haliax 0.2.227) looks its program up anew at each call: it splits every tree and infers every
    sharding. The first call goes that way, and compiles; later ones pass the arrays straight to the program. With 4
    layers (43 arrays) this cut a dispatch from 13.9 ms of Python to 4.8 ms, on a core that a step on a CPU needs too.
    """

    def __init__(self, trainer: Trainer, state: TrainerState):
        self._trainer = trainer
        self._arrays, self._static = eqx.partition(state, eqx.is_array)
        self._compiled: jax.stages.Compiled | None = None
        self._in_tree: Any = None
        self._batch_types: list[Any] = []

    @property
    def state(self) -> TrainerState:
        """The state after the steps so far; the next call takes its buffers."""
        return eqx.combine(self._arrays, self._static)

    def __call__(self, batch: TokenExample) -> tuple[Any, dict[str, Any], Any]:
        """Take a step. Return its loss, its metrics and the optimizer's state after it (arrays only, None for all
        else), none of them computed yet."""
        batch_arrays = jax.tree.leaves(eqx.filter(batch, eqx.is_array))
        batch_types = [(array.shape, array.dtype, array.sharding) for array in batch_arrays]
        if self._compiled is None or batch_types != self._batch_types:
            step = compiled_step(self._trainer)
            whole = first_step(self._trainer, step, self.state, (batch,))
            self._arrays, self._static = eqx.partition(whole.new_state, eqx.is_array)
            # JAX knows the program by now: 0.03 s, whatever the model.
            compiled = step.lower(self.state, (batch,), {}).compile()
            self._compiled, self._in_tree, self._batch_types = compiled, compiled.in_tree, batch_types
            return whole.loss, whole.loss_metrics, self._arrays.opt_state
        args, _ = jax.tree.unflatten(self._in_tree, [*jax.tree.leaves(self._arrays), *batch_arrays])
        result, _ = self._compiled(*args)
        self._arrays = result.new_state
        return result.loss, result.loss_metrics, self._arrays.opt_state


@dataclass(frozen=True)
class ReadState:
    """The part of a step's state that is logged and checked, on the host: the next step has taken the state itself."""

    step: int
    """Steps done, as in Levanter's state."""
    opt_state: GuardedState
    """The guard's state; its `inner` has the optimizer's hyperparameters alone."""


@dataclass(frozen=True)
class _InFlight:
    """A step that is dispatched but not read yet; `done` is the number of steps done after it."""

    done: int
    scalars: Any
    asked: Any
    began: float
    loading_seconds: float


def training_steps(
    trainer: Trainer,
    state: TrainerState,
    batches: Iterator[TokenExample],
    *,
    ahead: int,
    pauses_after: Callable[[int], bool],
    asks: Callable[[], bool],
    rest: PauseConfig | None = None,
) -> Iterator[StepInfo[Any]]:
    """`Trainer.training_steps` with up to `ahead` steps dispatched beyond the one whose loss is read.

    Hooks, log and `StepInfo` come one step at a time and in order, as in Levanter's loop. A hook that raises ends the
    run, whatever is dispatched by then. The `StepInfo` of most steps has a `ReadState`. At a pause every step in flight
    is read, and the last of them has its whole state, so that it can be saved. A pause comes after the first step of a
    process (which compiles), after the last step, where `pauses_after` says, and as soon as a process asks.

    `step_duration` is the time from the loss before, or from the dispatch if none was in flight, to the step's loss.

    Args:
        trainer: An entered trainer, without hooks inside the compiled step.
        ahead: Steps dispatched beyond the one that is read; 0: Levanter's own loop.
        pauses_after: Given how many steps are done, whether to pause there; the same on every process.
        asks: Whether this process wants a pause. All hosts pause after the same step, at most `ahead` + 1 steps after
            those that are dispatched when one of them asks.
        rest: When to leave the devices to others for a while; every step in flight is read first.
    """
    rest = rest or PauseConfig()
    if ahead == 0:
        for info in trainer.training_steps(state, batches):
            yield info
            if rest.is_after(info.next_step):
                time.sleep(rest.seconds)
        return
    done = first = int(state.step)
    take = CompiledStep(trainer, state)
    flying: deque[_InFlight] = deque()
    last_read, agreed, alone = 0.0, False, jax.process_count() == 1

    def read(one: _InFlight) -> StepInfo[Any]:
        nonlocal last_read, agreed
        loss, metrics, (hyperparams, *judged) = jax.device_get(one.scalars)
        began, last_read = max(one.began, last_read), time.monotonic()
        trainer.hooks.emit_event(ProgressEvent.TRAIN_STEP_FINISHED)
        left: Any = None
        if flying:
            left = ReadState(one.done, GuardedState(SimpleNamespace(hyperparams=hyperparams), *judged))
            agreed = agreed or bool(flying[0].asked)  # an answer older than this loss
        else:
            left = take.state
        info = step_info(left, float(loss), last_read - began, trainer.hooks.emit_event)
        trainer.run_hooks(info)
        metrics["throughput/hook_time"] = time.monotonic() - last_read
        metrics["throughput/loading_time"] = one.loading_seconds
        levanter.tracker.log(metrics, step=info.step)
        return info

    while done < trainer.num_train_steps:
        began = time.monotonic()
        if (batch := next(batches, None)) is None:
            break
        loading_seconds = time.monotonic() - began
        asked = _any_process(asks(), trainer.device_mesh)
        began = time.monotonic()
        trainer.hooks.emit_event(ProgressEvent.TRAIN_STEP_STARTED)
        with jax.profiler.StepTraceAnnotation("train", step_num=done):
            loss, metrics, guarded = take(batch)
            # Copies, since the next step takes the state's buffers.
            scalars = (loss, metrics, _copied((guarded.hyperparams, *guarded[1:])))
        # The values to be read are on their way to the host from here on.
        for scalar in jax.tree.leaves(scalars):
            scalar.copy_to_host_async()
        done += 1
        flying.append(_InFlight(done, scalars, asked, began, loading_seconds))
        while len(flying) > ahead:
            yield read(flying.popleft())
        if done == first + 1 or pauses_after(done) or rest.is_after(done) or agreed or (alone and asks()):
            while flying:
                yield read(flying.popleft())
            agreed = False
            if rest.is_after(done):
                time.sleep(rest.seconds)
    while flying:
        yield read(flying.popleft())


def _any_process(mine: bool, mesh: Mesh) -> Any:
    """Whether any process says yes, bool `[]`, after the steps dispatched so far. All ask between the same steps."""
    if jax.process_count() == 1:
        return np.bool_(mine)
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return _any(jax.make_array_from_process_local_data(everywhere, np.full(jax.local_device_count(), mine)))
