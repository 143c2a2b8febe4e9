"""Every kernel in bfloat16 against its plain formula in float32, in Pallas' interpreter of a TPU: its memories, whose
buffers begin as NaN, its copies, which happen as late as they may, and every pair of accesses that nothing orders."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import loss_batches
import numpy as np
import pytest
from attention_cases import heads, plain, values_and_gradients
from haliax import NamedArray
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from levanter.layers.attention import AttentionMask
from plain_loss import plain_loss

from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget
from tomat.model.norm_rotary import Rotary, norm_rotate
from tomat.model.splash import splash_attention, whole_head_attention
from tomat.model.tiles import LossTiles, QkRotaryConfig, SplashBlockSizes, WholeHeadConfig

POSITIONS, SIZE = 256, 128
TPU = pltpu.InterpretParams(detect_races=True)
RACE = "RACE DETECTED"
BF16_ERROR = 2.0**-8
"""Of one rounding to bfloat16, relative."""


@pytest.fixture(autouse=True)
def interpreted():
    with pltpu.force_tpu_interpret_mode(TPU):
        yield
    pltpu.reset_tpu_interpret_mode_state()


def held(found: list[jax.Array], expected: list[jax.Array], capfd: pytest.CaptureFixture, error: float = 8) -> None:
    """Each array is the expected one within so many roundings of its largest number, and nothing was a race."""
    for got, wanted in zip(found, expected, strict=True):
        got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
        assert np.isfinite(got).all()
        np.testing.assert_allclose(got, wanted, atol=error * BF16_ERROR * np.abs(wanted).max())
    out, err = capfd.readouterr()
    assert RACE not in out + err


def splash(**sizes: Any) -> Callable[..., NamedArray]:
    blocks = SplashBlockSizes(*(SIZE,) * 6, **sizes)
    return lambda q, k, v: splash_attention(q, k, v, AttentionMask.causal(), blocks)


WHOLE_HEAD = WholeHeadConfig(SIZE, SIZE, SIZE, SIZE)
ATTENTION = {
    "splash": splash(block_q_dq=SIZE, block_kv_dq=SIZE),
    "splash, one backward kernel": splash(use_fused_bwd=True),
    "whole head": lambda q, k, v: whole_head_attention(q, k, v, WHOLE_HEAD),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, capfd):
    arrays = heads(1, 1, POSITIONS, SIZE, jnp.bfloat16)
    arrays = [array["batch", 0:1] for array in arrays]
    found = values_and_gradients(ATTENTION[name], arrays)
    wide = [array.astype(jnp.float32) for array in arrays]
    held(found, values_and_gradients(plain, wide), capfd)


def rotary() -> tuple[Rotary, jax.Array, jax.Array]:
    """Weights and a table; its cosines and sines, `[S, SIZE / 2]`."""
    angles = np.outer(np.arange(POSITIONS), 200.0 ** -np.linspace(0, 1, SIZE // 2))
    cos, sin = jnp.asarray(np.cos(angles), jnp.float32), jnp.asarray(np.sin(angles), jnp.float32)
    weights = [1.0 + 0.2 * jax.random.normal(jax.random.PRNGKey(seed), (SIZE,)) for seed in (1, 2)]
    return Rotary(*weights, jnp.concatenate([cos, sin], axis=1), 1e-6), cos, sin


def turned(x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """The formula of `norm_rotate`, of `[..., S, SIZE]`."""
    n = weight * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    a, b = jnp.split(n, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def test_attention_that_norms_and_rotates(capfd):
    with_table, cos, sin = rotary()
    arrays = [array["batch", 0:1] for array in heads(1, 1, POSITIONS, SIZE, jnp.bfloat16)]

    def formula(q: NamedArray, k: NamedArray, v: NamedArray) -> NamedArray:
        q = NamedArray(turned(q.array, with_table.q_weight, cos, sin), q.axes)
        return plain(q, NamedArray(turned(k.array, with_table.k_weight, cos, sin), k.axes), v)

    found = values_and_gradients(lambda *qkv: whole_head_attention(*qkv, WHOLE_HEAD, rotary=with_table), arrays)
    expected = values_and_gradients(formula, [array.astype(jnp.float32) for array in arrays])
    held(found, expected, capfd)


def test_norm_and_rotary_embedding(capfd):
    with_table, cos, sin = rotary()
    x = jax.random.normal(jax.random.PRNGKey(0), (1, 2, POSITIONS, SIZE)).astype(jnp.bfloat16)
    by_out = jax.random.normal(jax.random.PRNGKey(3), x.shape)
    config = QkRotaryConfig("pallas", block_positions=SIZE)

    def both(of: Callable[..., jax.Array], x: jax.Array) -> list[jax.Array]:
        def scalar(x: jax.Array, weight: jax.Array) -> jax.Array:
            return (of(x, weight).astype(jnp.float32) * by_out).sum()

        out = of(x, with_table.q_weight)
        return [out, *jax.jit(jax.grad(scalar, argnums=(0, 1)))(x, with_table.q_weight)]

    found = both(lambda x, weight: norm_rotate(x, weight, with_table.table, 1e-6, config), x)
    held(found, both(lambda x, weight: turned(x, weight, cos, sin), x.astype(jnp.float32)), capfd)


def test_loss(capfd):
    bins = 200
    target = DensityTarget(bins, np.linspace(0.0, 6.0, bins, dtype=np.float32), loss_batches.START)
    ids = loss_batches.START + bins + 4
    hidden, head, tokens = loss_batches.make_batch(0, 2, 37, bins=bins, width=SIZE, ids=ids, scale=0.5)
    config = LossConfig(
        kind="ce_emd", vocabulary="full", preamble_weight=0.4, kernel="pallas", tiles=LossTiles(64, 32, 128, 16),
        interpret=True, emd_weight=0.7,
    )  # fmt: skip

    def both(loss: Callable[..., Any], hidden: jax.Array, head: jax.Array) -> list[jax.Array]:
        def scalar(hidden: jax.Array, head: jax.Array) -> jax.Array:
            return loss(hidden, head, tokens, config=config, target=target)[0]

        value, gradients = jax.jit(jax.value_and_grad(scalar, argnums=(0, 1)))(hidden, head)
        return [value, *gradients]

    found = both(density_loss, hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16))
    rounded = [array.astype(jnp.bfloat16).astype(jnp.float32) for array in (hidden, head)]
    held(found, both(plain_loss, *rounded), capfd)


def test_a_race_would_be_seen(capfd):
    """Two cores that write the same block."""

    def kernel(out_ref) -> None:
        out_ref[...] = jnp.full_like(out_ref, pl.program_id(0))

    two_cores = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    with pltpu.force_tpu_interpret_mode(two_cores):
        made = pl.pallas_call(
            kernel,
            grid=(2,),
            out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        )()
        jax.block_until_ready(made)
    assert RACE in capfd.readouterr().out
