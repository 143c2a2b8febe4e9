"""Attention by the plain formula with its gradients, which kernels are held against, and a mesh of two CPU devices."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AxisType
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention


@contextlib.contextmanager
def two_devices() -> Iterator[None]:
    """A mesh that splits the batch over two CPU devices."""
    with jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))), hax.axis_mapping({"batch": "data"}):
        yield


def heads(n_heads: int, n_kv_heads: int, seq_len: int, head_size: int, dtype: Any = jnp.float32) -> list[NamedArray]:
    """Random queries, keys and values of two sequences."""
    first = Axis("batch", 2), Axis("kv_head", n_kv_heads)
    Size, Group = Axis("head_size", head_size), Axis("q_heads_per_group", n_heads // n_kv_heads)
    queries, keys = (*first, Group, Axis("position", seq_len), Size), (*first, Axis("key_position", seq_len), Size)
    drawn = jax.random.split(jax.random.PRNGKey(0), 3)
    return [hax.random.normal(key, axes).astype(dtype) for key, axes in zip(drawn, (queries, keys, keys), strict=True)]


def plain(q: NamedArray, k: NamedArray, v: NamedArray, mask: AttentionMask | None = None) -> NamedArray:
    """Levanter's formula; `mask`: causal."""
    names = ("position", "key_position", "head_size")
    mask = AttentionMask.causal() if mask is None else mask
    return dot_product_attention(*names, q, k, v, mask, attn_backend=AttentionBackend.VANILLA)


def values_and_gradients(attention: Callable[..., NamedArray], arrays: list[NamedArray]) -> list[jax.Array]:
    """Output, and the gradients by queries, keys and values for a random output gradient."""
    weight = np.random.default_rng(7).normal(size=[axis.size for axis in arrays[0].axes])

    def scalar(*arrays: NamedArray) -> tuple[jax.Array, jax.Array]:
        out = attention(*arrays).rearrange(arrays[0].axes).array.astype(jnp.float32)
        return (out * weight).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [out, *(each.rearrange(array.axes).array for each, array in zip(gradients, arrays, strict=True))]
