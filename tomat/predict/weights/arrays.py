"""A model as arrays with names, and back.

The names are those that Levanter gives its models for Hugging Face (`model.layers.0.self_attn.q_proj.weight`), also
where Hugging Face has no such architecture; matrices are [out, in], as there. What tomat adds to the decoder,
`model.environment`, has the paths of its fields (`environment.network.layers.0.weight`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, cast

import equinox as eqx
import jax
import numpy as np
from haliax.partitioning import ResourceMapping
from haliax.state_dict import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.train.restore import model_initialiser, rearrange
from tomat.train.settings.config import TrainConfig

Part = Literal["mlp", "attention", "embedding", "environment"]
PARTS: tuple[Part, ...] = ("mlp", "attention", "embedding", "environment")
"""Where the matrices of a decoder are."""

ENVIRONMENT = "environment."
SMALLEST_MATRIX = 1024
"""Numbers below which an array stays as it is: norms, biases and small tables. (A choice.)"""


def named_arrays(model: LmHeadModel) -> dict[str, np.ndarray]:
    """Every array of a model by name, as it is computed with; layers one by one."""
    environment = getattr(model, "environment", None)
    if environment is None:
        return _on_host(to_torch_compatible_state_dict(model))
    # Haliax 0.2.227 names no array inside a tuple, as the layers of the environment's network are.
    bare = dataclasses.replace(cast(Any, model), environment=None)
    return _on_host(to_torch_compatible_state_dict(bare)) | _on_host(
        {_name(path): leaf for path, leaf in tree_flatten_with_path(eqx.filter(environment, eqx.is_array))[0]}
    )


def model_of(
    arrays: Mapping[str, np.ndarray], config: TrainConfig, axis_mapping: ResourceMapping, mesh: Mesh
) -> LmHeadModel:
    """The model of `config` that has these arrays."""
    wanted = eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))
    _check_shapes({name: array.shape for name, array in arrays.items()}, wanted)
    # Haliax 0.2.227 reads arrays into stacked layers alone; `rearrange` takes them apart where the run has them so.
    return rearrange(stacked_model({name: jax.numpy.asarray(array) for name, array in arrays.items()}, config),
                     wanted, axis_mapping, mesh)  # fmt: skip


def check_arrays(shapes: Mapping[str, tuple[int, ...]], config: TrainConfig) -> None:
    _check_shapes(shapes, eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0))))


def stacked_model(arrays: Mapping[str, jax.Array], config: TrainConfig) -> LmHeadModel:
    """The model of `config` with its layers stacked; also of arrays that are being traced, with their gradients. They
    are all of the model's, on a device: Haliax 0.2.227 would place arrays of the host on a mesh of no devices."""
    stacked = dataclasses.replace(config, model=dataclasses.replace(cast(Any, config.model), scan_layers=True))
    shapes = eqx.filter_eval_shape(model_initialiser(stacked, jax.random.PRNGKey(0)))
    environment = getattr(shapes, "environment", None)
    if environment is None:
        return from_torch_compatible_state_dict(shapes, dict(arrays))
    paths, structure = tree_flatten_with_path(environment)
    leaves = [arrays[_name(path)] if eqx.is_array_like(leaf) or _is_shape(leaf) else leaf for path, leaf in paths]
    own = {name: array for name, array in arrays.items() if not name.startswith(ENVIRONMENT)}
    model = from_torch_compatible_state_dict(dataclasses.replace(cast(Any, shapes), environment=None), own)
    return dataclasses.replace(cast(Any, model), environment=tree_unflatten(structure, leaves))


def part_of(name: str, shape: tuple[int, ...]) -> Part | None:
    """Where a matrix is in the decoder; None for what is no matrix, or too small to be worth fewer bits."""
    if len(shape) != 2 or math.prod(shape) < SMALLEST_MATRIX:
        return None
    if name.startswith(ENVIRONMENT):
        return "environment"
    if ".mlp." in name:
        return "mlp"
    if ".self_attn." in name:
        return "attention"
    return "embedding" if "embed" in name or name.startswith("lm_head") else None


def arrays_sha256(arrays: Mapping[str, np.ndarray]) -> str:
    """Hexadecimal digits of names, types, shapes and contents."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {list(array.shape)}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _check_shapes(found: Mapping[str, tuple[int, ...]], wanted: LmHeadModel) -> None:
    expected = {name: array.shape for name, array in _shapes(wanted).items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise TomatError(
                f"the array {name} is {_shape(found.get(name))}; the model of its configuration has "
                f"{_shape(expected.get(name))} there."
            )


def _shapes(model: Any) -> dict[str, np.ndarray]:
    """As `named_arrays` of a model of shapes; the arrays hold nothing."""
    empty = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape) if _is_shape(leaf) else leaf, model)
    return named_arrays(empty)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "not there" if shape is None else str(list(shape))


def _name(path: tuple[Any, ...]) -> str:
    """`.network.layers[0].weight[<flat index 0>]`, the path of a named array, as a name."""
    text = re.sub(r"\[<flat index \d+>\]", "", keystr(path))
    return ENVIRONMENT + re.sub(r"\[(\d+)\]", r".\1", text).lstrip(".")


def _on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in arrays.items()}
