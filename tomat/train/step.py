"""The training step: loss, optimizer and Levanter's trainer, built from a `TrainConfig` and nothing else. The planner
compiles the same step for a TPU slice without a TPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from haliax import NamedArray
from haliax.partitioning import ResourceMapping, pspec_for_axis
from haliax.quantization import CustomGradientAccumulation
from jaxtyping import PRNGKeyArray
from levanter.metrics import Metric, ReductionType
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer, TrainerConfig

from tomat.base.errors import TomatError
from tomat.base.ports.levanter import value_of, weighted_mean
from tomat.data.tokens.vocabulary import DENSITY_START, PAD
from tomat.model.any_decoder import environment_of, field_of, hidden_and_head, is_field
from tomat.model.environment import EnvironmentTables
from tomat.model.field import FieldModel
from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget
from tomat.model.nearby_atoms import ScatteredAtoms
from tomat.train.guards.loss import guard_updates
from tomat.train.loader import TokenExample
from tomat.train.settings.config import TrainConfig


@dataclass(frozen=True, eq=False)
class DensityLossFunction:
    """`loss_fn(model, example, key=None) -> (loss, metrics)` as Levanter's trainer calls it."""

    config: LossConfig
    target: DensityTarget
    gather_mapping: ResourceMapping | None
    """Axis mapping under which the parameters are gathered before the forward pass (ZeRO-1); None: left as they are."""
    environment: EnvironmentTables | None = None
    density_dropout: float = 0.0

    def __call__(
        self, model: LmHeadModel, example: TokenExample, *, key: PRNGKeyArray | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """Loss of one (micro)batch, a float32 scalar, and its metrics. `example` has `tokens`, int32 `[batch,
        position]`, and `atoms` for a model that reads them. `key` is the randomness of the model and of
        `density_dropout`; None: every row is read whole."""
        if self.gather_mapping is not None:
            model = _gathered(model, self.gather_mapping)
        tokens, unread, key = self.read(example.tokens, key)
        hidden, head, scale = hidden_and_head(model, tokens, example.atoms, self.environment, key=key)
        given = {"config": self.config, "target": self.target, "unread": unread, "scale": scale}
        loss, metrics = density_loss(hidden, head, example.tokens, **given)
        return loss, mean_metrics(metrics)

    def read(
        self, tokens: NamedArray, key: PRNGKeyArray | None
    ) -> tuple[NamedArray, NamedArray | None, PRNGKeyArray | None]:
        """The ids that the model reads, int32 `[batch, position]`; which rows are without their density (None: none
        is); and the next key. `key` decides which rows; None: every row is read whole."""
        if self.density_dropout == 0 or key is None:
            return tokens, None, key
        rows_key, key = jax.random.split(key)
        batch = tokens.resolve_axis("batch")
        # The number of rows is the share's, rounded up or down at random. Which rows is random too.
        more, order = jax.random.split(rows_key)
        count = jnp.floor(self.density_dropout * batch.size + jax.random.uniform(more))
        unread = NamedArray(jax.random.permutation(order, batch.size) < count, (batch,))
        return without_density(tokens, unread), unread, key


@dataclass(frozen=True, eq=False)
class FieldLossFunction:
    """The loss of a field model, as Levanter's trainer calls it: the NMAE of a row's voxels, averaged over the rows.

    The divisor is the mean density of the cell, not of the voxels, so that a cell's rows average to the cell's NMAE.
    """

    target: DensityTarget
    environment: EnvironmentTables

    def __call__(
        self, model: FieldModel, example: TokenExample, *, key: PRNGKeyArray | None = None
    ) -> tuple[jax.Array, dict[str, Metric]]:
        """The loss, a float32 scalar, and the metrics of `density_loss` that one density has: its EMD is its error."""
        assert isinstance(example.atoms, ScatteredAtoms)  # other layouts are refused earlier
        ids = example.tokens.rearrange(("batch", "position")).array - self.target.density_start
        is_density = (ids >= 0).astype(jnp.float32)
        values = jnp.asarray(self.target.values, jnp.float32)
        members, promolecule = model.densities(example.atoms, self.environment)
        found = jnp.stack([each.rearrange(("batch", "position")).array for each in members])
        promolecule = promolecule.rearrange(("batch", "position")).array
        rho = values[jnp.clip(ids, 0, len(values) - 1)]
        if (offset := self.target.offset_e_per_a3) is not None:
            rho = (promolecule + offset) * rho - offset
        count = is_density.sum(axis=1)

        def mean(of_voxels: jax.Array) -> jax.Array:
            return jnp.sum(of_voxels * is_density, axis=1) / jnp.maximum(count, 1.0)

        # Each member has its own loss; the prediction is the mean of all members.
        mean_density = jnp.maximum(example.atoms.mean_density.array, 1e-6)
        loss = jnp.mean(jnp.stack([mean(jnp.abs(each - rho)) / mean_density for each in found]))
        error = mean(jnp.abs(found.mean(axis=0) - rho))
        metrics = {
            "density_loss": loss,
            "emd_e_per_A3": jnp.mean(error),
            "rho_mean_e_per_A3": jnp.mean(mean(rho)),
            "density_positions": jnp.mean(count),
            "sequences_without_density": jnp.mean((count == 0).astype(jnp.float32)),
        }
        return loss, mean_metrics({name: jax.lax.stop_gradient(value) for name, value in metrics.items()})


def mean_metrics(metrics: Mapping[str, jax.Array]) -> dict[str, Metric]:
    """Metrics as Levanter's trainer takes them: means over sequences, exact over equal microbatches.

    `unread_share` and `unread_density_loss` give `density_loss_unread` and `density_loss_read`: the means over either
    sort of rows of all microbatches. A mean is 0 where a step has no such rows, which `unread_share` says.
    """
    means = {name: Metric.from_value(value, ReductionType.MEAN) for name, value in metrics.items()}
    if "unread_share" in metrics:
        share, unread = metrics["unread_share"], value_of(means.pop("unread_density_loss"))
        means["density_loss_unread"] = weighted_mean(unread, share)
        means["density_loss_read"] = weighted_mean(metrics["density_loss"] - unread, 1.0 - share)
    return means


def without_density(tokens: NamedArray, unread: NamedArray) -> NamedArray:
    """`tokens`, int [batch, position], with padding for the density ids of the rows that are `unread`, bool [batch].

    Otherwise padding stands only after the end of a sequence, so inside one it can mean "not known".
    """
    return hax.where(unread & (tokens >= DENSITY_START), PAD, tokens)


def _gathered(model: LmHeadModel, mapping: ResourceMapping) -> LmHeadModel:
    """`model` with each parameter laid out as `mapping` says, mostly whole on every chip. `haliax.shard` (0.2.227)
    states no constraint where no axis is mapped: XLA gathered such parameters layer by layer, forward and backward."""

    def gather(leaf: NamedArray | object) -> NamedArray | object:
        if not isinstance(leaf, NamedArray):
            return leaf
        spec = pspec_for_axis(leaf.axes, mapping)
        return NamedArray(jax.lax.with_sharding_constraint(leaf.array, spec), leaf.axes)

    return jax.tree.map(gather, model, is_leaf=lambda leaf: isinstance(leaf, NamedArray))


@dataclass(frozen=True, eq=False)
class Subject:
    """What a run trains, if that is not the model of its configuration with weights of its own."""

    model: Any
    """The whole model at the start; parameters that are not trained are taken from here at every start."""
    is_trainable: Any
    loss_of: Callable[[DensityLossFunction], Any]
    record: Mapping[str, Any]
    """Hashes of its parts, which must be the same when the run continues."""


def density_target(
    config: TrainConfig, value_table: np.ndarray | None, offset_e_per_a3: float | None = None
) -> DensityTarget:
    """What a run predicts; `value_table` as for `build_trainer`, and the offset of a relative codec."""
    data = config.data
    tokens = data.sequence_layout.tokens_per_voxel
    return DensityTarget(data.n_density_tokens, value_table, tokens_per_voxel=tokens, offset_e_per_a3=offset_e_per_a3)


def build_trainer(
    config: TrainConfig,
    trainer_config: TrainerConfig,
    value_table: np.ndarray | None,
    environment: EnvironmentTables | None = None,
    subject: Subject | None = None,
) -> Trainer:
    """Levanter's trainer with tomat's loss and the configured optimizer, guarded, without hooks.

    `value_table` is float32 `[n_density_tokens]` in e/Å³ (ratios for a relative codec), or None for two tokens per
    voxel. A model with `model.environment` is refused without the tables in `environment`.
    """
    if subject is None:
        config.check_step()
    quantised = config.trainer.quantization
    if config.guards.on_bad_loss == "skip" and quantised is not None and quantised.fp8:
        raise TomatError(
            "guards.on_bad_loss is skip and trainer.quantization.fp8 is true, whose scales a bad batch changes past "
            "the optimizer: a NaN loss stays in them for amax_history_length steps. Set guards.on_bad_loss: "
            "stop, or leave trainer.quantization out."
        )
    if environment_of(config.model) is not None and environment is None:
        raise TomatError(
            "model.environment needs a promolecule, and the data have none: tokenize them again, with a codec of one "
            "token a voxel, or leave model.environment out."
        )
    offset = environment and environment.offset_e_per_a3
    steps = trainer_config.num_train_steps
    try:
        optimizer = config.optimizer.build(steps)
    except (ValueError, ZeroDivisionError) as error:  # of Levanter's schedules
        said = f"no optimizer can be built for trainer.num_train_steps {steps}: {error}".rstrip(".")
        raise TomatError(f"{said}. Set optimizer's steps and shares (warmup, decay, cycles, ...) anew.") from error
    if config.optimizer_state_dtype is not None:
        optimizer = with_state_dtype(optimizer, config.optimizer_state_dtype)
    if field_of(config.model) is not None:
        optimizer = without_field(optimizer)
    optimizer = guard_updates(optimizer, config.guards)
    gather = config.trainer_config().compute_axis_mapping if config.sharding == "zero1" else None
    target = density_target(config, value_table, offset)
    loss_function: Any
    if is_field(config.model):
        assert environment is not None  # refused above
        loss_function = FieldLossFunction(target, environment)
    else:
        loss_function = DensityLossFunction(config.loss, target, gather, environment, config.density_dropout)
    loss = loss_function if subject is None else subject.loss_of(loss_function)
    # Levanter 0.2.227 types the loss with arguments that its trainer never passes.
    return Trainer(trainer_config, optimizer, cast(Any, loss), add_default_hooks=False)


def check_quantised(config: TrainConfig, model: Any) -> None:
    """Refuse `trainer.quantization.targets` by which no linear layer of `model` is in few bits: without a word it would
    be trained as without them."""
    targets = None if config.trainer.quantization is None else config.trainer.quantization.targets
    if targets is None:
        return
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=lambda leaf: isinstance(leaf, hnn.Linear))
    layers = [(jax.tree_util.keystr(path[-1:], simple=True), leaf) for path, leaf in leaves]
    layers = [(name, layer) for name, layer in layers if isinstance(layer, hnn.Linear)]
    acting = {name for name, layer in layers if isinstance(layer.dot_general, CustomGradientAccumulation)}
    missing = [] if isinstance(targets, str) else [name for name in targets if name not in acting]
    if missing or not acting:
        said = f"trainer.quantization.targets is {targets!r}, and {', '.join(missing) or 'it'} names no linear layer"
        names = ", ".join(sorted({name for name, _ in layers}))
        raise TomatError(f"{said}; expected a list of {names}, or a regular expression such as '.*q_proj'.")


def without_field(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer` with updates of zero for the field model that a decoder begins from: weight decay would change it.
    Levanter (0.2.227) saves no parameter that its trainer is told not to train."""
    inner = optax.with_extra_args_support(optimizer)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any):
        new_updates, new_state = inner.update(updates, state, params, **extra_args)
        unchanged = jax.tree.map(jnp.zeros_like, cast(Any, new_updates).field)
        return replace(cast(Any, new_updates), field=unchanged), new_state

    return optax.GradientTransformationExtraArgs(inner.init, cast(Any, update))


def with_state_dtype(optimizer: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """`optimizer` with the arrays of its state kept as `dtype` between steps; within one they are float32.

    Scalars (learning rates, counters) and whole numbers stay what they are, and updates have the type of the
    parameters. In bfloat16 a moment that changes by less than 1/256 of itself in a step stays what it was.
    """
    inner = optax.with_extra_args_support(optimizer)
    kept = jnp.dtype(dtype)

    def cast_state(state: Any, to: jnp.dtype) -> Any:
        def one(leaf: Any) -> Any:
            is_moment = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 0
            return leaf.astype(to) if is_moment else leaf

        return jax.tree.map(one, state)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any):
        new_updates, new_state = inner.update(updates, cast_state(state, jnp.dtype("float32")), params, **extra_args)
        if params is not None:
            new_updates = jax.tree.map(lambda new, old: new.astype(old.dtype), new_updates, params)
        return new_updates, cast_state(new_state, kept)

    return optax.GradientTransformationExtraArgs(lambda params: cast_state(inner.init(params), kept), cast(Any, update))
