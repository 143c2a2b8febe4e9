"""Attention in blocks of queries: what it leaves out; `test_attention.py` holds it to the plain formula."""

from functools import partial
from typing import Any, cast

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import heads, plain, values_and_gradients

from tomat.model.causal_blocks import causal_attention
from tomat.model.checkpoint_policies import ATTENTION_OUTPUT

qkv = partial(heads, seq_len=96, head_size=16)


def test_in_bfloat16_scores_and_weights_are_float32():
    """Against float32 it is as near as numbers of 8 binary digits are."""
    expected = values_and_gradients(plain, qkv(4, 2))
    found = values_and_gradients(lambda q, k, v: causal_attention(q, k, v, 4), qkv(4, 2, dtype=jnp.bfloat16))
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one.astype(jnp.float32) - other).max() < 0.02 * np.abs(other).max()
    text = jax.jit(lambda q, k, v: causal_attention(q, k, v, 4)).lower(*qkv(4, 2, dtype=jnp.bfloat16)).as_text()
    assert "bf16" not in "".join(line for line in text.splitlines() if "exponential" in line)


def test_what_lies_above_the_diagonal_is_left_out():
    """Of 4 blocks, 10 parts of 16 are left of each product of scores."""

    def flops(attention: Any) -> float:
        return cast(Any, jax.jit(attention).lower(*qkv(4, 2)).cost_analysis())["flops"]

    whole = flops(lambda q, k, v: causal_attention(q, k, v, 1))
    assert flops(lambda q, k, v: causal_attention(q, k, v, 4)) / whole == pytest.approx(10 / 16, abs=0.02)


def test_a_policy_that_keeps_the_output_computes_no_scores_twice():
    """Products of the gradient: 2 forward and 5 backward in each block, and no forward pass again."""

    def products(policy: Any) -> int:
        def scalar(arrays: list[hax.NamedArray]) -> jax.Array:
            kept = jax.checkpoint(lambda q, k, v: causal_attention(q, k, v, 2).array, policy=policy)
            return jnp.sin(kept(*arrays)).sum()

        return str(jax.make_jaxpr(jax.grad(scalar))(qkv(4, 2))).count("dot_general")

    kept = products(jax.checkpoint_policies.save_only_these_names(ATTENTION_OUTPUT))
    assert kept == 2 * (2 + 5)
    assert products(jax.checkpoint_policies.nothing_saveable) == 2 * (2 + 2 + 5)
