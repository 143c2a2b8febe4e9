"""Converts a model to named arrays and back. Also makes a model whose matrices stay packed in few bits in memory; they
are unpacked where they are used, a tile of rows at a time.

The names are those that Levanter gives its models for Hugging Face (`model.layers.0.self_attn.q_proj.weight`), even
where Hugging Face has no such architecture; matrices are [out, in], as there. Arrays of `model.environment`, which
tomat adds to the decoder, are named by the paths of their fields (`environment.network.layers.0.weight`).
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from haliax.axis import AxisSpec
from haliax.jax_utils import named_call
from haliax.partitioning import ResourceMapping
from haliax.state_dict import from_torch_compatible_state_dict, to_torch_compatible_state_dict
from haliax.util import ensure_tuple
from jax import lax
from jax.sharding import Mesh
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.model.any_decoder import int8_matmuls_of
from tomat.predict.weights.quantise import Quantised, packed
from tomat.train.restore import model_initialiser, rearrange
from tomat.train.settings.config import TrainConfig

Part = Literal["mlp", "attention", "embedding", "environment"]
"""The part of a decoder that a matrix belongs to. Matrices of a field model's networks are `mlp`."""

ENVIRONMENT = "environment."
SMALLEST_MATRIX = 1024
"""Arrays with fewer numbers are not quantised: norms, biases and small tables. (A choice.)"""


def named_arrays(model: LmHeadModel) -> dict[str, np.ndarray]:
    """Every array of a model by name, in the type that the model holds. Stacked layers are listed one by one."""
    environment, found = getattr(model, "environment", None), {}
    if environment is not None:
        # Haliax 0.2.227 names no arrays inside a tuple, and the environment's network keeps its layers in one.
        model = dataclasses.replace(cast(Any, model), environment=None)
        leaves = tree_flatten_with_path(eqx.filter(environment, eqx.is_array))[0]
        found = {_name(path): leaf for path, leaf in leaves}
    return {name: np.asarray(array) for name, array in (to_torch_compatible_state_dict(model) | found).items()}


def model_of(
    arrays: Mapping[str, np.ndarray], config: TrainConfig, axis_mapping: ResourceMapping, mesh: Mesh
) -> LmHeadModel:
    wanted = check_arrays({name: array.shape for name, array in arrays.items()}, config)
    # Haliax 0.2.227 can only read arrays into stacked layers. `rearrange` splits them if the run has separate layers.
    stacked = stacked_model({name: jnp.asarray(array) for name, array in arrays.items()}, config)
    return rearrange(stacked, wanted, axis_mapping, mesh)


def check_arrays(shapes: Mapping[str, tuple[int, ...]], config: TrainConfig) -> LmHeadModel:
    """The model of `config` as shapes. Refuses `shapes`, by array name, that are not exactly those of its arrays."""
    wanted = eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))
    hollow = jax.tree.map(lambda leaf: np.broadcast_to(np.float32(0), leaf.shape) if _is_shape(leaf) else leaf, wanted)
    expected = {name: array.shape for name, array in named_arrays(hollow).items()}
    for name in sorted(expected.keys() | shapes.keys()):
        if expected.get(name) != shapes.get(name):
            found, right = (list(each[name]) if name in each else "not there" for each in (shapes, expected))
            raise TomatError(f"the array {name} is {found}; the model of its configuration has {right} there.")
    return wanted


def stacked_model(arrays: Mapping[str, jax.Array], config: TrainConfig) -> LmHeadModel:
    """The model of `config` with its layers stacked, made of `arrays`, which may be traced. They must be all arrays of
    the model, on a device: Haliax 0.2.227 would place host arrays on a mesh without devices."""
    stacked = config
    if hasattr(config.model, "scan_layers"):
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
    """The part of the decoder that a matrix belongs to; None for other arrays and matrices too small to quantise."""
    if len(shape) != 2 or math.prod(shape) < SMALLEST_MATRIX:
        return None
    if name.startswith(ENVIRONMENT):
        return "environment"
    if ".mlp." in name or ".network." in name:  # of a field model
        return "mlp"
    if ".self_attn." in name:
        return "attention"
    return "embedding" if "embed" in name or name.startswith("lm_head") else None


def arrays_sha256(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of names, types, shapes and contents, in hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {list(array.shape)}".encode())
        digest.update(array.data)
    return digest.hexdigest()


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _name(path: tuple[Any, ...]) -> str:
    """The name of an array from its path, such as `.network.layers[0].weight[<flat index 0>]`."""
    text = re.sub(r"\[<flat index \d+>\]", "", keystr(path))
    return ENVIRONMENT + re.sub(r"\[(\d+)\]", r".\1", text).lstrip(".")


TILE_ROWS = 256
"""Rows that are unpacked at once in a product. (A choice: 1 MiB in float32 if a row has 1,024 numbers.)"""


class PackedMatrix(eqx.Module):
    """A matrix [out, in], or a stack of matrices with a leading axis, over which a scan over layers runs."""

    codes: jax.Array
    """uint8 [out, bytes of a row]: codes one behind another, lowest bit first (`packed` in `quantise.py`)."""
    scales: jax.Array
    """float [out, in / group]: float16 until a precision policy casts it to the compute type."""
    table: jax.Array
    """float [2^bits], in the compute type."""
    columns: int = eqx.field(static=True)
    bits: int = eqx.field(static=True)

    def rows(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Numbers, [..., in], from rows of codes, uint8 [..., bytes of a row], and scales, [..., in / group]."""
        bits = (codes[..., None] >> jnp.arange(8, dtype=jnp.uint8)) & 1
        bits = bits.reshape(*codes.shape[:-1], -1)[..., : self.columns * self.bits]
        each = bits.reshape(*bits.shape[:-1], self.columns, self.bits).astype(jnp.int32)
        index = jnp.sum(each << jnp.arange(self.bits, dtype=jnp.int32), axis=-1)
        return self.table.astype(scales.dtype)[index] * jnp.repeat(scales, self.columns // scales.shape[-1], axis=-1)

    def whole(self, dtype: jnp.dtype) -> jax.Array:
        return self.rows(self.codes, self.scales.astype(dtype))

    def product(self, x: jax.Array) -> jax.Array:
        """x times the transposed matrix, [n, in] to [n, out], in the type of `x`."""
        rows = self.codes.shape[0]
        scales = self.scales.astype(x.dtype)
        n_tiles = -(-rows // TILE_ROWS)
        if n_tiles == 1:
            return x @ self.rows(self.codes, scales).T
        tile = -(-rows // n_tiles)
        # The last tile ends with the matrix. Rows that it shares with the tile before are computed twice, equally.
        starts = jnp.minimum(jnp.arange(n_tiles) * tile, rows - tile)

        def one(start: jax.Array) -> jax.Array:
            cut = (lax.dynamic_slice_in_dim(each, start, tile, axis=0) for each in (self.codes, scales))
            return x @ self.rows(*cut).T

        parts = lax.map(one, starts)
        out = jnp.zeros((rows, x.shape[0]), x.dtype)
        for index in range(n_tiles):
            start = min(index * tile, rows - tile)
            out = out.at[start : start + tile].set(parts[index].T)
        return out.T


class PackedLinear(eqx.Module):
    """Replaces Haliax's `Linear`, with the same result up to rounding."""

    matrix: PackedMatrix
    bias: NamedArray | None
    In: AxisSpec = eqx.field(static=True)
    Out: AxisSpec = eqx.field(static=True)

    @named_call
    def __call__(self, inputs: NamedArray, *, key=None) -> NamedArray:
        del key
        taken, given = (cast(tuple[Axis, ...], ensure_tuple(axes)) for axes in (self.In, self.Out))
        names = {axis.name for axis in taken}
        rest = tuple(axis for axis in inputs.axes if axis.name not in names)
        x = inputs.rearrange((*rest, *taken)).array.reshape(-1, self.matrix.columns)
        shape = tuple(axis.size for axis in (*rest, *given))
        result = hax.auto_sharded(NamedArray(self.matrix.product(x).reshape(shape), (*rest, *given)))
        return result if self.bias is None else hax.auto_sharded(result + self.bias)


class PackedEmbedding(eqx.Module):
    """Replaces Haliax's `Embedding`. Only the rows of the ids are unpacked; for the head of tied logits, all rows."""

    matrix: PackedMatrix
    Vocab: Axis = eqx.field(static=True)
    Embed: Axis = eqx.field(static=True)

    def __call__(self, input_ids: NamedArray, *, key=None) -> NamedArray:
        return self.embed(input_ids)

    @named_call
    def embed(self, input_ids: NamedArray) -> NamedArray:
        """The rows of ids, integer [...], as [..., embed]."""
        ids, matrix = input_ids.array, self.matrix
        scales = matrix.scales[ids].astype(matrix.table.dtype)
        return NamedArray(matrix.rows(matrix.codes[ids], scales), (*input_ids.axes, self.Embed))

    @property
    def weight(self) -> NamedArray:
        """[vocab, embed]."""
        return NamedArray(self.matrix.whole(self.matrix.table.dtype), (self.Vocab, self.Embed))


LAYER = "{layer}"
"""Stands for the layer's number in the name of a weight of stacked layers."""


def with_packed(model: LmHeadModel, quantised: Mapping[str, Quantised]) -> LmHeadModel:
    """`model` with its linear layers and its embedding packed where they are `quantised`. Layers of a stack that differ
    in bits or group stay whole, and so do other matrices, such as the environment's table of elements."""
    leaves, structure = tree_flatten_with_path(model, is_leaf=_is_layer)
    return tree_unflatten(structure, [_packed(keystr(path), leaf, quantised) for path, leaf in leaves])


def check_compressible(config: TrainConfig, what: str) -> None:
    """Refuse quantised matrices for a model with int8 products, because quantised matrices are multiplied as floats."""
    if (products := int8_matmuls_of(config.model)) is not None:
        said = f"{what} has model.int8_matmuls {products}, but matrices in few bits are multiplied as floats"
        raise TomatError(f"{said}: the result would be another model. Write it whole, with `tomat export`.")


def module_name(path: str) -> str:
    """The name of a layer's weight in a folder, from its path in the model; `{layer}` is the number in a stack."""
    if path.startswith((".environment", ".field")):
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
    names = [name.replace(LAYER, str(layer)) for layer in range(stacked[0].size if LAYER in name else 1)]
    found = [quantised[each] for each in names if each in quantised]
    if len(found) < len(names) or len({(each.bits, each.group, each.shape) for each in found}) > 1:
        return leaf
    first = found[0]

    def together(part: Callable[[Quantised], np.ndarray]) -> jax.Array:
        return jnp.asarray(np.stack([part(each) for each in found]) if LAYER in name else part(first))

    codes = together(lambda each: packed(each.codes, each.bits))
    scales, table = together(lambda each: each.scales), together(lambda each: each.table)
    matrix = PackedMatrix(codes, scales, table, first.shape[1], first.bits)
    if isinstance(leaf, hnn.Linear):
        return PackedLinear(matrix, leaf.bias, leaf.In, leaf.Out)
    return PackedEmbedding(matrix, leaf.Vocab, leaf.Embed)
