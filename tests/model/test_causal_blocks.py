"""Attention in blocks of queries: the plain formula, in fewer FLOPs."""

import contextlib
from typing import Any, cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType
from levanter.layers.attention import AttentionBackend, AttentionMask, dot_product_attention

from tomat.model.causal_blocks import causal_attention
from tomat.model.splash import ATTENTION_OUTPUT

SEQ_LEN, HEAD_SIZE = 96, 16


def qkv(heads: int = 4, kv_heads: int = 2, dtype: Any = jnp.float32) -> list[hax.NamedArray]:
    batch = (Axis("batch", 2), Axis("kv_head", kv_heads))
    Pos, KeyPos, Size = Axis("position", SEQ_LEN), Axis("key_position", SEQ_LEN), Axis("head_size", HEAD_SIZE)
    group = Axis("q_heads_per_group", heads // kv_heads)
    keys = jax.random.split(jax.random.PRNGKey(0), 3)
    axes = [(*batch, group, Pos, Size), (*batch, KeyPos, Size), (*batch, KeyPos, Size)]
    return [hax.random.normal(key, each).astype(dtype) for key, each in zip(keys, axes, strict=True)]


def plain(q: hax.NamedArray, k: hax.NamedArray, v: hax.NamedArray) -> hax.NamedArray:
    names = ("position", "key_position", "head_size")
    return dot_product_attention(*names, q, k, v, AttentionMask.causal(), attn_backend=AttentionBackend.VANILLA)


def outputs_and_gradients(attention: Any, arrays: list[hax.NamedArray]) -> list[jax.Array]:
    weight = np.random.default_rng(7).normal(size=[axis.size for axis in arrays[0].axes])

    def scalar(*arrays: hax.NamedArray) -> tuple[jax.Array, jax.Array]:
        out = attention(*arrays).rearrange(arrays[0].axes).array.astype(jnp.float32)
        return (out * weight).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return [out, *(each.rearrange(array.axes).array for each, array in zip(gradients, arrays, strict=True))]


def two_devices() -> Any:
    """A mesh that splits the batch over two CPU devices."""
    stack = contextlib.ExitStack()
    stack.enter_context(jax.set_mesh(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))))
    stack.enter_context(hax.axis_mapping({"batch": "data"}))
    return stack


@pytest.mark.parametrize(
    ("heads", "kv_heads", "blocks", "mesh"),
    [
        pytest.param(2, 2, 4, contextlib.nullcontext, id="even"),
        pytest.param(4, 2, 5, contextlib.nullcontext, id="a-shorter-last-block-and-groups"),
        pytest.param(4, 1, 1, contextlib.nullcontext, id="one-block"),
        pytest.param(2, 1, 2, two_devices, id="two-devices"),
    ],
)
def test_it_is_the_plain_formula(heads, kv_heads, blocks, mesh):
    arrays = qkv(heads, kv_heads)
    with mesh():
        found = outputs_and_gradients(lambda q, k, v: causal_attention(q, k, v, blocks), arrays)
        expected = outputs_and_gradients(plain, arrays)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=5e-6)


def test_in_bfloat16_scores_and_weights_are_float32():
    """Against float32 it is as near as numbers of 8 binary digits are."""
    expected = outputs_and_gradients(plain, qkv())
    found = outputs_and_gradients(lambda q, k, v: causal_attention(q, k, v, 4), qkv(dtype=jnp.bfloat16))
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.astype(jnp.float32) - other).max() < 0.02 * np.abs(other).max()
    text = jax.jit(lambda q, k, v: causal_attention(q, k, v, 4)).lower(*qkv(dtype=jnp.bfloat16)).as_text()
    assert "bf16" not in "".join(line for line in text.splitlines() if "exponential" in line)


def test_what_lies_above_the_diagonal_is_left_out():
    """Of 4 blocks, 10 parts of 16 are left of each product of scores."""

    def flops(attention: Any) -> float:
        return cast(Any, jax.jit(attention).lower(*qkv()).cost_analysis())["flops"]

    whole = flops(lambda q, k, v: causal_attention(q, k, v, 1))
    assert flops(lambda q, k, v: causal_attention(q, k, v, 4)) / whole == pytest.approx(10 / 16, abs=0.02)


def test_a_policy_that_keeps_the_output_computes_no_scores_twice():
    """Products of the gradient: 2 forward and 5 backward in each block, and no forward pass again."""

    def products(policy: Any) -> int:
        def scalar(arrays: list[hax.NamedArray]) -> jax.Array:
            kept = jax.checkpoint(lambda q, k, v: causal_attention(q, k, v, 2).array, policy=policy)
            return jnp.sin(kept(*arrays)).sum()

        return str(jax.make_jaxpr(jax.grad(scalar))(qkv())).count("dot_general")

    kept = products(jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT))
    assert kept == 2 * (2 + 5)
    assert products(jax.checkpoint_policies.nothing_saveable) == 2 * (2 + 2 + 5)
