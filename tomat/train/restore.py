"""A run's state, or its weights alone, from a checkpoint.

A checkpoint may hold the layers stacked in one array (`model.scan_layers`) where the run has them unrolled, or the
reverse; they are rearranged. With `trainer.model_averaging` it has two sets of weights; only training uses the last.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import equinox as eqx
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping, sharding_for_axis
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten
from jaxtyping import PRNGKeyArray
from levanter.checkpoint import load_checkpoint
from levanter.models.lm_model import LmHeadModel
from levanter.trainer import Trainer
from levanter.trainer_state import TrainerState

from tomat.base.errors import TomatError
from tomat.model.any_decoder import field_of
from tomat.train.runs.checkpoints import AVERAGED, LAST, Checkpoint, array_shapes, weights_kind
from tomat.train.settings.config import TrainConfig

if TYPE_CHECKING:
    from tomat.train.step import Subject

STACKED, BLOCK = ".stacked", ".blocks[{}]"
"""How the path of an array inside Haliax's `Stacked` and `BlockSeq` (0.2.227) says which layers it holds."""

SUBPATHS = {AVERAGED: "model_averaging/model", LAST: "model"}
"""Where in a checkpoint the weights of each kind are."""

MODEL_KEY, TRAINING_KEY = 0, 1
"""Numbers that are folded into a run's seed for the weights and for the training step."""


def initial_state(
    config: TrainConfig,
    trainer: Trainer,
    source: Checkpoint | None,
    weights: Checkpoint | None,
    field: Checkpoint | None = None,
    subject: "Subject | None" = None,
) -> TrainerState:
    """The state that a run begins with. It is that of `source`, the checkpoint that the trainer's configuration names,
    or a fresh one, whose weights may come from `weights`, or those of `model.field` from `field`. `subject` is what is
    trained, if that is not the model of the configuration alone."""
    seed_key = jax.random.PRNGKey(config.trainer.seed)
    training_key, model_key = (jax.random.fold_in(seed_key, number) for number in (TRAINING_KEY, MODEL_KEY))
    loaded = source or weights or field
    try:
        if subject is not None:
            # It is the argument of a compiled function, so that the first step gets what every later one gets: given as
            # `model`, the step was compiled twice.
            begin = jax.tree_util.Partial(lambda model: model, subject.model)
            return trainer.initial_state(training_key, model_init=begin, is_trainable=subject.is_trainable)
        if weights is not None:
            model, _ = load_weights(config, weights.path, trainer.parameter_axis_mapping, trainer.device_mesh)
            state = trainer.initial_state(training_key, model=model)
            # An average begins as the weights themselves, in the same buffers, and a step cannot take a buffer twice.
            average = jax.tree.map(lambda leaf: leaf.copy() if eqx.is_array(leaf) else leaf, state.model_averaging)
            return dataclasses.replace(state, model_averaging=average)
        if field is not None:
            from tomat.model.field import field_model

            shape, vocab = field_of(config.model), Axis("vocab", config.data.model_vocabulary)
            assert shape is not None
            fresh = partial(field_model, vocab, shape, key=model_key)
            known = _load(fresh, field.path, trainer.parameter_axis_mapping, trainer.device_mesh)
            initialise = model_initialiser(config, model_key)
            begin = jax.tree_util.Partial(lambda known: dataclasses.replace(initialise(), field=known), known)
            return trainer.initial_state(training_key, model_init=begin)
        stored = config if source is None else _as_stored(config, source.path)
        if stored is config:
            return trainer.initial_state(training_key, model_init=model_initialiser(config, model_key))
        kept = {"quantization": trainer.config.quantization, "model_averaging": trainer.config.model_averaging}
        initialise = partial(TrainerState.init, key=training_key, mp=trainer.mp, **kept)
        wanted = eqx.filter_eval_shape(lambda: initialise(trainer.optimizer, model_initialiser(config, model_key)()))
        # The loaded state has no name here, so that only `rearrange` holds it.
        return rearrange(
            trainer.initial_state(training_key, model_init=model_initialiser(stored, model_key)),
            wanted,
            trainer.parameter_axis_mapping,
            trainer.device_mesh,
        )
    except (ValueError, KeyError, FileNotFoundError) as error:
        if loaded is None:
            said = f"the first weights cannot be made as configured ({error})"
            raise TomatError(f"{said}; check model, trainer.quantization and trainer.mesh.") from error
        said = f"the checkpoint {loaded.path} does not hold this model and optimizer ({error})"
        raise TomatError(f"{said}; use the run's own settings, or another run_name.") from error


def model_initialiser(config: TrainConfig, key: PRNGKeyArray) -> Callable[[], LmHeadModel]:
    vocab = Axis("vocab", config.data.model_vocabulary)
    return lambda: config.model_config().build(vocab, key=key)


def load_weights(
    config: TrainConfig, checkpoint: str, axis_mapping: ResourceMapping, mesh: Mesh
) -> tuple[LmHeadModel, str]:
    """The weights of a checkpoint as a model of `config` (the averaged ones, if there are any), and their kind. A
    checkpoint of another model raises ValueError, KeyError or FileNotFoundError."""
    kind, stored = weights_kind(checkpoint), _as_stored(config, checkpoint)
    wanted, there = (model_initialiser(of, jax.random.PRNGKey(0)) for of in (config, stored))
    if stored is config:
        return _load(there, checkpoint, axis_mapping, mesh), kind
    shapes = eqx.filter_eval_shape(wanted)
    return rearrange(_load(there, checkpoint, axis_mapping, mesh), shapes, axis_mapping, mesh), kind


def _load(build: Callable[[], Any], checkpoint: str, axis_mapping: ResourceMapping, mesh: Mesh) -> Any:
    """The model that `build` makes, with the weights of a checkpoint, the averaged ones if there are any."""
    shapes, subpath = eqx.filter_eval_shape(build), SUBPATHS[weights_kind(checkpoint)]
    return load_checkpoint(shapes, checkpoint, subpath=subpath, axis_mapping=axis_mapping, mesh=mesh)


def rearrange(loaded: Any, wanted: Any, axis_mapping: ResourceMapping, mesh: Mesh) -> Any:
    """`loaded` in the structure of `wanted`, which has shapes for arrays, and `Stacked` for `BlockSeq` or the other way
    round. Arrays go one after another: if nothing else holds `loaded`, little more than it is in memory at any time."""
    flattened = partial(tree_flatten_with_path, is_leaf=lambda leaf: isinstance(leaf, NamedArray))
    leaves = {keystr(path): leaf for path, leaf in flattened(loaded)[0]}
    del loaded
    paths, structure = flattened(wanted)
    shapes = {keystr(path): shape for path, shape in paths}
    for key in [key for key in leaves if STACKED in key and key not in shapes]:
        first = key.replace(STACKED, BLOCK.format(0))
        if first not in shapes:
            raise _no_counterpart(key)
        for index, layer in enumerate(_take_apart(leaves.pop(key), shapes[first], axis_mapping, mesh)):
            leaves[key.replace(STACKED, BLOCK.format(index))] = layer
    for key in [key for key in shapes if STACKED in key and key not in leaves]:
        leaves[key] = _stack(leaves, key, shapes[key], axis_mapping, mesh)
    result = []
    for key, shape in shapes.items():
        array = _array(leaves.pop(key, None))
        if array is None or array.shape != _array(shape).shape:
            raise _no_counterpart(key)
        result.append(NamedArray(array, shape.axes) if isinstance(shape, NamedArray) else array)
    if leaves:
        raise _no_counterpart(next(iter(leaves)))
    return tree_unflatten(structure, result)


def _as_stored(config: TrainConfig, checkpoint: str) -> TrainConfig:
    """`config` with the layers as the checkpoint has them; `config` itself where that is no change."""
    names = array_shapes(checkpoint)
    stacked, unrolled = (any(part in name for name in names) for part in ("/stacked/", "/blocks/0/"))
    scan_layers = getattr(config.model, "scan_layers", None)
    if scan_layers is None or stacked == unrolled or scan_layers == stacked:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, scan_layers=stacked))


def _array(leaf: Any) -> Any:
    return leaf.array if isinstance(leaf, NamedArray) else leaf


def _layer_axis(stacked: Any, layer: Any) -> int:
    """Which axis of `stacked` counts the layers; the first where axes have no names."""
    if not isinstance(stacked, NamedArray):
        return 0
    names = {axis.name for axis in layer.axes}
    return next(index for index, axis in enumerate(stacked.axes) if axis.name not in names)


def _take_apart(stacked: Any, layer: Any, axis_mapping: ResourceMapping, mesh: Mesh) -> list[jax.Array]:
    axis = _layer_axis(stacked, layer)
    sharding = sharding_for_axis(layer.axes if isinstance(layer, NamedArray) else (), axis_mapping, mesh)
    return jax.jit(lambda x: list(jnp.moveaxis(x, axis, 0)), out_shardings=sharding)(_array(stacked))


def _stack(leaves: dict[str, Any], key: str, shape: Any, axis_mapping: ResourceMapping, mesh: Mesh) -> jax.Array:
    layers = []
    while (name := key.replace(STACKED, BLOCK.format(len(layers)))) in leaves:
        layers.append(leaves.pop(name))
    if not layers:
        raise _no_counterpart(key)
    axis = _layer_axis(shape, layers[0])
    sharding = sharding_for_axis(shape.axes if isinstance(shape, NamedArray) else (), axis_mapping, mesh)
    return jax.jit(lambda x: jnp.stack(x, axis), out_shardings=sharding)([_array(layer) for layer in layers])


def _no_counterpart(name: str) -> TomatError:
    said = f"model.scan_layers differs between the checkpoint and the run, and {name} has no counterpart"
    return TomatError(f"{said}. Set model.scan_layers as it was when the run began.")
