"""The training step: loss, optimizer and Levanter's trainer, built from a `TrainConfig` and nothing else.

The trainer runs this step; the planner compiles the same one for a TPU slice without a TPU.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from jaxtyping import PRNGKeyArray
from levanter.metrics import Metric, ReductionType
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer, TrainerConfig

from tomat.loss.config import LossConfig
from tomat.loss.density_loss import density_loss
from tomat.loss.target import DensityTarget
from tomat.model.decoder import causal_activations
from tomat.training.config import TrainConfig
from tomat.training.guards.loss import guard_updates
from tomat.training.loader import TokenExample


@dataclass(frozen=True, eq=False)
class DensityLossFunction:
    """`loss_fn(model, example, key=None) -> (loss, metrics)` as Levanter's trainer calls it."""

    config: LossConfig
    target: DensityTarget
    gather_mapping: ResourceMapping | None
    """Axis mapping under which the parameters are gathered before the forward pass (ZeRO-1); None: left as they are."""

    def __call__(
        self, model: LmHeadModel, example: TokenExample, *, key: PRNGKeyArray | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Loss of one (micro)batch, a float32 scalar, and its metrics.

        Args:
            model: The decoder in compute precision.
            example: `tokens`, int32 `[batch, position]`.
            key: Randomness for models that use some.
        """
        if self.gather_mapping is not None:
            model = _gathered(model, self.gather_mapping)
        hidden: NamedArray = causal_activations(model, example.tokens, key=key)
        loss, metrics = density_loss(
            hidden,
            model.get_lm_head(),
            example.tokens,
            config=self.config,
            target=self.target,
        )
        # All are means over sequences, so that their mean over equal microbatches is exact.
        return loss, {name: Metric.from_value(value, ReductionType.MEAN) for name, value in metrics.items()}


def _gathered(model: LmHeadModel, mapping: ResourceMapping) -> LmHeadModel:
    """`model` with each parameter laid out as `mapping` says, which for most of them is whole on every chip.

    `haliax.shard` (0.2.227) states no constraint where no axis is mapped, and leaves it to XLA where to gather: those
    parameters were gathered layer by layer, forward and backward.
    """

    def gather(leaf: NamedArray | object) -> NamedArray | object:
        if not isinstance(leaf, NamedArray):
            return leaf
        spec = pspec_for_axis(leaf.axes, mapping)
        return NamedArray(jax.lax.with_sharding_constraint(leaf.array, spec), leaf.axes)

    return jax.tree.map(gather, model, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


def density_target(config: TrainConfig, value_table: np.ndarray | None) -> DensityTarget:
    """What a run predicts.

    Args:
        config: The run.
        value_table: float32 `[n_density_tokens]`, e/A^3; None for two tokens per voxel.
    """
    data = config.data
    return DensityTarget(data.n_density_tokens, value_table, tokens_per_voxel=data.sequence_layout.tokens_per_voxel)


def build_trainer(config: TrainConfig, trainer_config: TrainerConfig, value_table: np.ndarray | None) -> Trainer:
    """Levanter's trainer with tomat's loss and the configured optimizer, guarded, without hooks.

    Args:
        config: The run.
        trainer_config: `config.trainer_config()`, initialised.
        value_table: float32 `[n_density_tokens]`, e/A^3; None for two tokens per voxel.
    """
    optimizer = guard_updates(config.optimizer.build(trainer_config.num_train_steps), config.guards)
    gather = config.trainer_config().compute_axis_mapping if config.sharding == "zero1" else None
    loss_function = DensityLossFunction(config.loss, density_target(config, value_table), gather)
    # Levanter 0.2.227 types the loss with arguments that its trainer never passes.
    return Trainer(trainer_config, optimizer, cast(Any, loss_function), add_default_hooks=False)


def model_initialiser(config: TrainConfig, key: PRNGKeyArray) -> Callable[[], LmHeadModel]:
    """A function without arguments that builds the model with freshly drawn weights."""
    vocab = Axis("vocab", config.data.model_vocabulary)
    return lambda: config.model_config().build(vocab, key=key)
