"""Levanter's compiled training step, called with arrays alone."""

from typing import Any

import equinox as eqx
import jax
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from tomat.base.ports.levanter import compiled_step, first_step
from tomat.train.loader import TokenExample


class CompiledStep:
    """Levanter's training step and the state between two of them.

    `named_jit` (marin-haliax 0.2.227) looks its program up anew at each call: it splits every tree and infers every
    sharding. The first call goes that way, and compiles; all others give that program its arrays. With a decoder of 4
    layers, 43 arrays, a dispatch took 13.9 ms of Python before and 4.8 so, on a core that its step needs on a CPU.

    Args:
        trainer: Entered, without hooks inside the compiled step.
        state: To begin with; its buffers are taken.
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
        """Take a step: its loss, its metrics and the optimizer's state after it, all of them still to be computed.

        The optimizer's state has its arrays alone, and None in the place of all else.
        """
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
