"""Linear layers of one input, multiplied as one.

The weights stay apart: parameters, optimizer state and checkpoints are those of the layers as they are, and only the
product joins them, so a run may turn it on and off at any step. What the input's gradient is summed of is then one
product too, over all outputs.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import haliax as hax
import haliax.nn as hnn
from haliax import NamedArray


def joined_product(x: NamedArray, layers: Sequence[Any], axis: str) -> tuple[NamedArray, list[int]]:
    """What Haliax's `Linear` layers of one input, [..., in], give, one behind another along `axis`, from one product;
    and the size of each one's part. Their outputs differ in the size of `axis` alone; without that axis an output
    counts as one along it."""
    weights = [_with_axis(layer.weight, axis, layers[0].weight) for layer in layers]
    biases = [_with_axis(layer.bias, axis, layers[0].bias) for layer in layers if layer.bias is not None]
    weight = hax.concatenate(axis, weights)
    bias = hax.concatenate(axis, biases) if biases else None
    given = tuple(weight.resolve_axis(a.name) for a in hax.axis.ensure_tuple(layers[0].Out))
    sizes = [each.resolve_axis(axis).size for each in weights]
    return replace(layers[0], weight=weight, bias=bias, Out=given)(x), sizes


def parts(joined: NamedArray, axis: str, sizes: Sequence[int]) -> Sequence[NamedArray]:
    # Not `joined[axis, hax.ds(..)]`: that is a gather, its gradient a scatter, each a copy of the whole on a TPU.
    return joined.split(axis, [hax.Axis(axis, size) for size in sizes])


def can_join(layers: Sequence[Any]) -> bool:
    """Whether each is Haliax's own `Linear`. Others, such as layers in few bits (`packed.py`), are multiplied one by
    one, to the same result."""
    return all(type(layer) is hnn.Linear for layer in layers)


def _with_axis(x: NamedArray, axis: str, like: NamedArray) -> NamedArray:
    """`x` with the axes of `like` in its order; `axis` may be new."""
    if all(a.name != axis for a in x.axes):
        x = x.broadcast_axis(hax.Axis(axis, 1))
    return x.rearrange(tuple(a.name for a in like.axes))
