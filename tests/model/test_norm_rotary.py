"""The norm and rotary kernel, in Pallas' interpreter, against its formula and against Levanter's layers."""

import contextlib
import dataclasses
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import two_devices
from haliax import Axis
from levanter.layers.attention import AttentionBackend, AttentionMask
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, Llama3RotaryEmbeddingsConfig

from tomat.base.errors import TomatError
from tomat.model.attention import DensityAttention
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.norm_rotary import norm_rotate
from tomat.model.tiles import QkRotaryConfig, SplashBlockSizes, WholeHeadConfig

SEQ_LEN = 128


def attention_config(**fields) -> DensityDecoderConfig:
    sizes = dict(hidden_dim=64, intermediate_dim=64, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128)
    splash = SplashBlockSizes(128, 128, interpret=True)
    values = dict(max_seq_len=SEQ_LEN, attn_backend=AttentionBackend.SPLASH, splash=splash)
    return DensityDecoderConfig(**{**sizes, **values, **fields})


def attention_and_gradient(config: DensityDecoderConfig):
    """Output and gradients by parameters and input of one attention layer with random weights."""
    layer = DensityAttention.init(config.attention_config(), key=jax.random.PRNGKey(0))
    rng = np.random.default_rng(1)
    arrays, static = eqx.partition(layer, eqx.is_array)
    arrays = jax.tree.map(lambda a: a + jnp.asarray(rng.normal(scale=0.2, size=a.shape), a.dtype), arrays)
    x = hax.named(
        jnp.asarray(rng.normal(size=(2, SEQ_LEN, 64)), jnp.float32),
        (Axis("batch", 2), Axis("position", SEQ_LEN), config.Embed),
    )
    weight = rng.normal(size=x.array.shape)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(arrays_and_x):
        arrays, x = arrays_and_x
        out = eqx.combine(arrays, static)(x, AttentionMask.causal()).rearrange(("batch", "position", "embed")).array
        return (out * weight).sum(), out

    (_, out), gradients = run((arrays, x))
    return out, gradients


IN_ATTENTION = {
    "qk_rotary": QkRotaryConfig("attention"),
    "whole_head": WholeHeadConfig(128, 128, 128, 128, interpret=True),
}


@pytest.mark.parametrize(
    ("rope", "use_qk_norm", "mesh", "fields"),
    [
        (DefaultRotaryEmbeddingsConfig(theta=200), False, contextlib.nullcontext, {}),
        (Llama3RotaryEmbeddingsConfig(), True, two_devices, {}),
        (DefaultRotaryEmbeddingsConfig(theta=200), False, contextlib.nullcontext, IN_ATTENTION),
        (Llama3RotaryEmbeddingsConfig(), True, two_devices, IN_ATTENTION | {"head_dim": 256}),
    ],
)
def test_attention_with_the_kernel_is_levanters(rope, use_qk_norm, mesh, fields):
    block = 192 if use_qk_norm else 64  # more positions than there are, or two blocks
    config = attention_config(
        rope=rope, use_qk_norm=use_qk_norm, **{k: v for k, v in fields.items() if k == "head_dim"}
    )
    fused = dataclasses.replace(config, **{"qk_rotary": QkRotaryConfig("pallas", block, interpret=True)} | fields)
    with mesh():
        out, gradients = attention_and_gradient(fused)
        expected_out, expected_gradients = attention_and_gradient(config)
    np.testing.assert_allclose(out, expected_out, atol=1e-5 * float(jnp.abs(expected_out).max()))
    got, expected = jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients)
    assert len(got) == (7 if use_qk_norm else 5)  # four projections, two norms, the input
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.abs(b).max()))


def test_what_the_kernel_cannot_do_is_refused():
    def asked(*rotary, **fields):
        attention_and_gradient(attention_config(qk_rotary=QkRotaryConfig(*rotary), **fields))

    for rotary, fields, message in (
        (("pallas",), {"head_dim": 64}, "head size is 64; expected a multiple of 128"),
        (("pallas", 100), {}, "block_positions is 100; expected a positive multiple of 64"),
        (("triton",), {}, "kernel is 'triton'; expected one of xla, pallas, attention"),
        (("attention",), {}, "kernel is attention and model.whole_head is not set; only its kernels rotate"),
        (("pallas",), {"attn_backend": AttentionBackend.JAX_FLASH}, "backend is .*jax_flash.*qk_rotary.kernel: xla"),
    ):
        with pytest.raises(TomatError, match=message):
            asked(*rotary, **fields)
    with pytest.raises(TomatError, match="got 96 positions; expected a multiple of 64"):
        norm_rotate(jnp.zeros((1, 1, 96, 128)), jnp.ones(128), jnp.zeros((96, 128)), None, QkRotaryConfig("pallas"))
