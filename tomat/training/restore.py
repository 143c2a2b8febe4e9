"""A run's state, or its weights alone, from a checkpoint.

Two things are decided here that Levanter's loading leaves open. A checkpoint may hold the layers stacked in one array
(`model.scan_layers`) where the run has them unrolled, or the other way round: the numbers are the same, so they are
rearranged. And a run with `trainer.model_averaging` has two sets of weights: whatever is not training uses the average.
"""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.partitioning import ResourceMapping, sharding_for_axis
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten
from jaxtyping import PRNGKeyArray
from levanter.checkpoint import load_checkpoint
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from tomat.base.errors import TomatError
from tomat.runs.checkpoints import AVERAGED, Checkpoint, array_shapes, weights_kind
from tomat.training.config import TrainConfig
from tomat.training.step import model_initialiser

STACKED, UNROLLED = ".stacked", re.compile(r"\.blocks\[(\d+)\]")
"""How the path of an array inside Haliax's `Stacked` and `BlockSeq` (0.2.227) says which layers it holds."""


MODEL_KEY, TRAINING_KEY = 0, 1
"""What a run's seed is folded with for the weights and the training step."""


def initial_state(
    config: TrainConfig, trainer: Trainer, source: Checkpoint | None, weights: Checkpoint | None
) -> TrainerState:
    """The state that a run begins with: a checkpoint's, fresh, or fresh but for the weights of a checkpoint.

    Args:
        config: The run.
        trainer: Its trainer, entered.
        source: Holds the whole state; the checkpoint that the trainer's configuration names.
        weights: Holds the weights; None where there is a `source`.

    Raises:
        TomatError: A checkpoint of another model or optimizer, or of one whose layers cannot be rearranged to the run's
            `model.scan_layers`.
    """
    seed_key = jax.random.PRNGKey(config.trainer.seed)
    training_key, model_key = (jax.random.fold_in(seed_key, number) for number in (TRAINING_KEY, MODEL_KEY))
    loaded = source or weights
    try:
        if weights is None:
            return _restored_or_fresh(config, trainer, None if source is None else source.path, training_key, model_key)
        model, _ = load_weights(config, weights.path, trainer.parameter_axis_mapping, trainer.device_mesh)
        return begin_with_weights(trainer, training_key, model)
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise TomatError(
            f"the checkpoint {loaded.path if loaded else ''} does not hold this model and optimizer ({error}); use the "
            "run's own settings, or another run_name."
        ) from error


def _restored_or_fresh(
    config: TrainConfig, trainer: Trainer, checkpoint: str | None, training_key: PRNGKeyArray, model_key: PRNGKeyArray
) -> TrainerState:
    """The state of the checkpoint that the trainer's configuration names, or a fresh one."""
    initialiser = model_initialiser(config, model_key)
    stored = config if checkpoint is None else _as_stored(config, checkpoint)
    if stored is config:
        return trainer.initial_state(training_key, model_init=initialiser)

    def fresh() -> TrainerState:
        return TrainerState.init(
            trainer.optimizer,
            initialiser(),
            key=training_key,
            mp=trainer.mp,
            quantization=trainer.config.quantization,
            model_averaging=trainer.config.model_averaging,
        )

    wanted = eqx.filter_eval_shape(fresh)
    # Without a name here: `rearrange` is to be the only one that holds it.
    return rearrange(
        trainer.initial_state(training_key, model_init=model_initialiser(stored, model_key)),
        wanted,
        trainer.parameter_axis_mapping,
        trainer.device_mesh,
    )


def load_weights(
    config: TrainConfig, checkpoint: str, axis_mapping: ResourceMapping, mesh: Mesh
) -> tuple[LmHeadModel, str]:
    """The weights of a checkpoint as a model of `config`, the averaged ones where it has any, and their kind.

    Raises:
        ValueError, KeyError, FileNotFoundError: The checkpoint holds another model.
    """
    key = jax.random.PRNGKey(0)
    kind = weights_kind(checkpoint)
    wanted = eqx.filter_eval_shape(model_initialiser(config, key))
    stored = _as_stored(config, checkpoint)

    def load() -> LmHeadModel:
        return load_checkpoint(
            wanted if stored is config else eqx.filter_eval_shape(model_initialiser(stored, key)),
            checkpoint,
            subpath="model_averaging/model" if kind == AVERAGED else "model",
            axis_mapping=axis_mapping,
            mesh=mesh,
        )

    return load() if stored is config else rearrange(load(), wanted, axis_mapping, mesh), kind


def begin_with_weights(trainer: Trainer, training_key: PRNGKeyArray, model: LmHeadModel) -> TrainerState:
    """The trainer's fresh state around weights that are there already."""
    state = trainer.initial_state(training_key, model=model)
    if state.model_averaging is None:
        return state
    # The average begins as the weights themselves, in the same buffers, which the step may not be given twice.
    copied = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state.model_averaging)
    return dataclasses.replace(state, model_averaging=copied)


def rearrange(loaded: Any, wanted: Any, axis_mapping: ResourceMapping, mesh: Mesh) -> Any:
    """`loaded` in the structure of `wanted`, with the arrays of layers stacked or taken apart as that has them.

    One array after another, so that little more than `loaded` is in memory at any time, if nothing else holds it.

    Args:
        loaded: A model, or a training state, of arrays.
        wanted: The same with shapes for arrays, and `Stacked` for `BlockSeq` or the other way round.
        axis_mapping: Where the axes of the result lie.
        mesh: On which devices.

    Raises:
        TomatError: Something of a layer has no counterpart in the other form.
    """
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(loaded, is_leaf=_is_named)[0]}
    del loaded
    shapes, structure = tree_flatten_with_path(wanted, is_leaf=_is_named)
    unstacked: dict[str, list[Any]] = {}
    result = []
    for path, shape in shapes:
        key = keystr(path)
        layer = UNROLLED.search(key)
        if key in leaves:
            array = _array(leaves.pop(key))
        elif layer is not None:
            stacked = UNROLLED.sub(STACKED, key)
            if stacked not in unstacked:
                if stacked not in leaves:
                    raise _no_counterpart(key)
                unstacked[stacked] = _take_apart(leaves.pop(stacked), shape, axis_mapping, mesh)
            index = int(layer.group(1))
            if index >= len(unstacked[stacked]):
                raise _no_counterpart(key)
            array, unstacked[stacked][index] = unstacked[stacked][index], None
        elif STACKED in key:
            array = _stack(leaves, key, shape, axis_mapping, mesh)
        else:
            raise _no_counterpart(key)
        if array.shape != _array(shape).shape:
            raise _no_counterpart(key)
        result.append(NamedArray(array, shape.axes) if _is_named(shape) else array)
    left = [
        f"layer {i} of {key}" for key, parts in unstacked.items() for i, part in enumerate(parts) if part is not None
    ]
    if leaves or left:
        raise _no_counterpart(next(iter([*leaves, *left])))
    return tree_unflatten(structure, result)


def _as_stored(config: TrainConfig, checkpoint: str) -> TrainConfig:
    """`config` with the layers as the checkpoint has them; `config` itself where that is no change."""
    names = list(array_shapes(checkpoint))
    stacked = any("/stacked/" in name for name in names)
    unrolled = any("/blocks/0/" in name for name in names)
    scan_layers = getattr(config.model, "scan_layers", None)
    if scan_layers is None or stacked == unrolled or scan_layers == stacked:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=stacked))


def _is_named(leaf: Any) -> bool:
    return isinstance(leaf, NamedArray)


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, NamedArray) else leaf


def _layer_axis(stacked: Any, layer: Any) -> int:
    """Which axis of `stacked` counts the layers; the first where axes have no names."""
    if not isinstance(stacked, NamedArray):
        return 0
    names = {axis.name for axis in layer.axes}
    return next(index for index, axis in enumerate(stacked.axes) if axis.name not in names)


def _take_apart(stacked: Any, layer: Any, axis_mapping: ResourceMapping, mesh: Mesh) -> list[jax.Array]:
    axis, array = _layer_axis(stacked, layer), _array(stacked)
    sharding = sharding_for_axis(layer.axes if isinstance(layer, NamedArray) else (), axis_mapping, mesh)

    def take(x: jax.Array) -> list[jax.Array]:
        return [jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]

    return jax.jit(take, out_shardings=sharding)(array)


def _stack(leaves: dict[str, Any], key: str, shape: Any, axis_mapping: ResourceMapping, mesh: Mesh) -> jax.Array:
    prefix, suffix = key.split(STACKED, 1)
    layers = []
    while (name := f"{prefix}.blocks[{len(layers)}]{suffix}") in leaves:
        layers.append(leaves.pop(name))
    if not layers:
        raise _no_counterpart(key)
    axis = _layer_axis(shape, layers[0])
    sharding = sharding_for_axis(shape.axes if isinstance(shape, NamedArray) else (), axis_mapping, mesh)
    return jax.jit(lambda x: jnp.stack(x, axis), out_shardings=sharding)([_array(layer) for layer in layers])


def _no_counterpart(name: str) -> TomatError:
    return TomatError(
        f"{name} has no counterpart under the other model.scan_layers, which the checkpoint has or the run asks for: "
        "this state cannot be rearranged. Set model.scan_layers as the run began."
    )
