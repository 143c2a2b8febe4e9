"""A model whose matrices stay in few bits in memory."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, cast

import equinox as eqx
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from haliax.util import ensure_tuple
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.model.any_decoder import int8_matmuls_of
from tomat.model.packed import PackedEmbedding, PackedLinear, PackedMatrix, packed_rows
from tomat.predict.weights.quantise import Quantised
from tomat.train.settings.config import TrainConfig

LAYER = "{layer}"


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
        raise TomatError(
            f"{what} is of a model with model.int8_matmuls {products}, and matrices in few bits are multiplied as "
            "floats: it would be another model. Write it whole, with `tomat export`."
        )


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
