"""A model as arrays with names, and back; also as one whose matrices stay in few bits in memory.

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
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.partitioning import ResourceMapping
from haliax.state_dict import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from haliax.util import ensure_tuple
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.model.any_decoder import int8_matmuls_of
from tomat.model.packed import PackedEmbedding, PackedLinear, PackedMatrix, packed_rows
from tomat.predict.weights.quantise import Quantised
from tomat.train.restore import model_initialiser, rearrange
from tomat.train.settings.config import TrainConfig

Part = Literal["mlp", "attention", "embedding", "environment"]
"""Where the matrices of a decoder are."""

ENVIRONMENT = "environment."
SMALLEST_MATRIX = 1024
"""Numbers below which an array stays as it is: norms, biases and small tables. (A choice.)"""


def named_arrays(model: LmHeadModel) -> dict[str, np.ndarray]:
    """Every array of a model by name, as it is computed with; layers one by one."""
    environment = getattr(model, "environment", None)
    found = {}
    if environment is not None:
        # Haliax 0.2.227 names no array inside a tuple, as the layers of the environment's network are.
        model = dataclasses.replace(cast(Any, model), environment=None)
        leaves = tree_flatten_with_path(eqx.filter(environment, eqx.is_array))[0]
        found = {_name(path): leaf for path, leaf in leaves}
    return {name: np.asarray(array) for name, array in (to_torch_compatible_state_dict(model) | found).items()}


def model_of(
    arrays: Mapping[str, np.ndarray], config: TrainConfig, axis_mapping: ResourceMapping, mesh: Mesh
) -> LmHeadModel:
    """The model of `config` that has these arrays."""
    wanted = check_arrays({name: array.shape for name, array in arrays.items()}, config)
    # Haliax 0.2.227 reads arrays into stacked layers alone; `rearrange` takes them apart where the run has them so.
    stacked = stacked_model({name: jnp.asarray(array) for name, array in arrays.items()}, config)
    return rearrange(stacked, wanted, axis_mapping, mesh)


def check_arrays(shapes: Mapping[str, tuple[int, ...]], config: TrainConfig) -> LmHeadModel:
    """The model of `config` as shapes; refused are arrays, by name, that are not those that it has."""
    wanted = eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))
    hollow = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape) if _is_shape(leaf) else leaf, wanted)
    expected = {name: array.shape for name, array in named_arrays(hollow).items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            found, right = (list(each[name]) if name in each else "not there" for each in (shapes, expected))
            raise TomatError(f"the array {name} is {found}; the model of its configuration has {right} there.")
    return wanted


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


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _name(path: tuple[Any, ...]) -> str:
    """`.network.layers[0].weight[<flat index 0>]`, the path of a named array, as a name."""
    text = re.sub(r"\[<flat index \d+>\]", "", keystr(path))
    return ENVIRONMENT + re.sub(r"\[(\d+)\]", r".\1", text).lstrip(".")


LAYER = "{layer}"
"""In the name of a layer's weight, of each of a stack."""


def with_packed(model: LmHeadModel, quantised: Mapping[str, Quantised]) -> LmHeadModel:
    """`model` with its linear layers and its embedding in few bits where they are stored so.

    Layers of one stack that are not stored alike (other bits, another group) stay whole, and so do matrices that belong
    to neither, such as the environment's table of elements.
    """
    leaves, structure = tree_flatten_with_path(model, is_leaf=_is_layer)
    return tree_unflatten(structure, [_packed(keystr(path), leaf, quantised) for path, leaf in leaves])


def check_compressible(config: TrainConfig, what: str) -> None:
    """Refuse matrices in few bits for a model whose products are in int8: theirs would be in floats."""
    products = int8_matmuls_of(config.model)
    if products is not None:
        said = f"{what} is of a model with model.int8_matmuls {products}; matrices in few bits are multiplied as floats"
        raise TomatError(f"{said}: another model. Write it whole, with `tomat export`.")


def module_name(path: str) -> str:
    """The name that a layer's weight has in a folder, from its path in the model; `{layer}` for each of a stack."""
    if path.startswith(".environment"):
        return re.sub(r"\[(\d+)\]", r".\1", path).lstrip(".") + ".weight"
    name = path.replace(".embeddings.token_embeddings", ".model.embed_tokens").replace(".transformer", ".model")
    name = name.replace(".layers.stacked", f".layers.{LAYER}")
    return re.sub(r"\.layers\.blocks\[(\d+)\]", r".layers.\1", name).lstrip(".") + ".weight"


def _is_layer(leaf: Any) -> bool:
    return isinstance(leaf, hnn.Linear | hnn.Embedding)


def _packed(path: str, leaf: Any, quantised: Mapping[str, Quantised]) -> Any:
    if not _is_layer(leaf):
        return leaf
    name = module_name(path)
    own = (leaf.In, leaf.Out) if isinstance(leaf, hnn.Linear) else (leaf.Vocab, leaf.Embed)
    inside = {axis.name for axes in own for axis in cast(tuple[Axis, ...], ensure_tuple(axes))}
    stacked = [axis for axis in leaf.weight.axes if axis.name not in inside]
    if LAYER in name:
        every = [quantised.get(name.replace(LAYER, str(layer))) for layer in range(stacked[0].size)]
    else:
        every = [quantised.get(name)]
    found = [each for each in every if each is not None]
    if len(found) < len(every) or len({(each.bits, each.group, each.shape) for each in found}) > 1:
        return leaf
    first = found[0]
    codes = [packed_rows(each.codes, each.bits) for each in found]

    def together(parts: list[np.ndarray]) -> jax.Array:
        return jnp.asarray(np.stack(parts) if LAYER in name else parts[0])

    scales, tables = ([getattr(each, part) for each in found] for part in ("scales", "table"))
    matrix = PackedMatrix(together(codes), together(scales), together(tables), first.shape[1], first.bits)
    if isinstance(leaf, hnn.Linear):
        return PackedLinear(matrix, leaf.bias, leaf.In, leaf.Out)
    return PackedEmbedding(matrix, leaf.Vocab, leaf.Embed)


def memory_bytes(model: Any) -> int:
    """Of a model's arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_array)))
