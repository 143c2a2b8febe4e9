"""Steps that are dispatched before the loss of an earlier one is read, so that no device waits for the host.

Levanter's loop (0.2.227) reads every loss at once: the devices have nothing to do while hooks run and the next step is
dispatched. Here the next steps are queued by then. The compiled step is Levanter's own, so that every number is too.
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
    """Levanter's training step and the state between two of them; the buffers of that to begin with are taken.

    `named_jit` (marin-haliax 0.2.227) looks its program up anew at each call: it splits every tree and infers every
    sharding. The first call goes that way, and compiles; all others give that program its arrays. With a decoder of 4
    layers, 43 arrays, a dispatch took 13.9 ms of Python before and 4.8 so, on a core that its step needs on a CPU.
    """

    def __init__(self, trainer: Trainer, state: TrainerState):
        self._trainer = trainer
        self._arrays, self._static = eqx.partition(state, eqx.is_array)
        self._compiled: jax.stages.Compiled | None = None
        self._in_tree: Any = None
        self._batch_types: list[Any] = []

    @property
    def state(self) -> TrainerState:
        """After the steps so far; the next call takes its buffers."""
        return eqx.combine(self._arrays, self._static)

    def __call__(self, batch: TokenExample) -> tuple[Any, dict[str, Any], Any]:
        """Take a step: its loss, its metrics and the optimizer's state after it (its arrays alone, None in the place of
        all else), all of them still to be computed."""
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
    """What is logged and judged of a step whose state the next step has taken; on the host."""

    step: int
    """Steps done, as in Levanter's state."""
    opt_state: GuardedState
    """Of the optimizer's own state (`inner`) the hyperparameters alone."""


@dataclass(frozen=True)
class _InFlight:
    """A step that is dispatched and not read; `done` steps are done after it."""

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

    Hooks, log and `StepInfo` come step by step and in order, as without; a hook that raises ends the run, whatever is
    dispatched by then. Most steps have a `ReadState`. At a pause everything in flight is read, and the last step read
    has its whole state, from which it may be saved. Pauses come after the first step of a process, which compiles, and
    after the last one, where `pauses_after` says, and as soon as a process asks.

    `step_duration` goes from the loss before, or from the dispatch where nothing was in flight, to the step's own loss.

    Args:
        trainer: Entered, without hooks inside the compiled step.
        ahead: 0: Levanter's own loop.
        pauses_after: Given how many steps are done, whether to pause there; the same on every process.
        asks: Whether this process wants a pause. Several hosts make it after the same step, at most `ahead` + 1 steps
            after those that are dispatched as one of them asks.
        rest: When the devices are left to others for a while; everything in flight is read before.
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
        # What is read of the step is on its way to the host from here on.
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
    """Whether any process says yes, bool `[]`, after the steps dispatched so far; all ask between the same steps."""
    if jax.process_count() == 1:
        return np.bool_(mine)
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return _any(jax.make_array_from_process_local_data(everywhere, np.full(jax.local_device_count(), mine)))
