import contextlib
import math
from functools import cache, partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import heads, plain, two_devices, values_and_gradients
from haliax import Axis
from haliax.nn.scan import ScanCheckpointPolicy
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
from levanter.layers.attention import AttentionBackend, AttentionMask

from tomat.base.errors import TomatError
from tomat.model.attention import DensityAttention, DensityAttentionConfig, resolve_backend, traced_platform
from tomat.model.causal_blocks import causal_attention, flash_attention, flash_block
from tomat.model.checkpoint_policies import ATTENTION_OUTPUT, QKV
from tomat.model.cudnn import cudnn_attention
from tomat.model.splash import kernel_sizes, splash_attention, whole_head_attention
from tomat.model.tiles import SPLASH_BLOCKS, SplashBlockSizes, WholeHeadConfig

HEAD_SIZE = 16
INTERPRETED = SplashBlockSizes(*(128,) * 8, interpret=True)
MIXED = SplashBlockSizes(256, 256, 128, 128, 256, 128, use_fused_bwd=True, q_layout="seq_minor", interpret=True)
TPU = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
qkv = partial(heads, seq_len=256, head_size=HEAD_SIZE)
POD = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, abstract_device=TPU)


def assert_plain(attention, arrays, mask, atols=(2e-5, 5e-5, 5e-5, 5e-5)) -> None:
    """`attention` against the plain formula: outputs, and gradients for a random output gradient."""
    found, expected = (values_and_gradients(each, arrays) for each in (attention, partial(plain, mask=mask)))
    for one, other, atol in zip(found, expected, atols or (None,) * 4, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()) if atol is None else atol)


def in_blocks(blocks: int, n_heads: int, kv_heads: int, mesh=contextlib.nullcontext):
    arrays = partial(heads, n_heads, kv_heads, 96, 16)
    return lambda q, k, v, mask: causal_attention(q, k, v, blocks), arrays, None, mesh, (5e-6,) * 4


def in_whole_heads(n_heads: int, kv_heads: int, mesh=contextlib.nullcontext, **sizes: int):
    config = WholeHeadConfig(**dict(block=256, rows=128, block_bwd=256, keys_bwd=128) | sizes, interpret=True)
    arrays = partial(heads, n_heads, kv_heads, 512, 128)
    return lambda q, k, v, mask: whole_head_attention(q, k, v, config, q_is_scaled=False), arrays, None, mesh, None


def by(attention, blocks, n_heads: int, kv_heads: int, window: int | None, mesh=contextlib.nullcontext):
    arrays = partial(qkv, n_heads, kv_heads)
    return lambda q, k, v, mask: attention(q, k, v, mask, blocks), arrays, window, mesh, (2e-5, 5e-5, 5e-5, 5e-5)


PROGRAMS = {
    "splash, a window and grouped heads": by(splash_attention, INTERPRETED, 4, 2, 100, two_devices),
    "splash, one backward kernel and mixed tiles": by(splash_attention, MIXED, 2, 1, None),
    "flash, a window": by(flash_attention, 64, 4, 2, 70),
    "flash, one block": by(flash_attention, 256, 4, 2, None),
    "blocks": in_blocks(4, 2, 2),
    "blocks, a shorter last one and groups": in_blocks(5, 4, 2),
    "one block": in_blocks(1, 4, 1),
    "blocks, two devices": in_blocks(2, 2, 1, two_devices),
    "whole head, two devices": in_whole_heads(2, 2, two_devices),
    "whole head, one block": in_whole_heads(2, 1, block=512, rows=512),
    "whole head, mixed": in_whole_heads(1, 1, block=128, block_bwd=512),
}
"""The attention, its arrays, window and mesh, and the bounds of its error; None: in shares of the largest number."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_the_plain_formula(name):
    attention, arrays, window, mesh, atols = PROGRAMS[name]
    mask = AttentionMask.causal(sliding_window=window)
    with mesh():
        assert_plain(partial(attention, mask=mask), arrays(), mask, atols)


@cache
def lowered_for_tpu(blocks: SplashBlockSizes, **mapping: str) -> str:
    """The TPU program of the gradient of splash attention on a mesh of 4 x 2 chips; needs no TPU."""
    shapes = [jax.ShapeDtypeStruct(a.array.shape, jnp.bfloat16) for a in qkv(4, 4, seq_len=1024)]
    axes = [a.axes for a in qkv(4, 4, seq_len=1024)]

    def gradient(*arrays):
        def scalar(*arrays):
            named = [hax.named(array, ax) for array, ax in zip(arrays, axes, strict=True)]
            return splash_attention(*named, AttentionMask.causal(), blocks).array.astype(jnp.float32).sum()

        with hax.axis_mapping(mapping):
            return jax.grad(scalar, argnums=(0, 1, 2))(*arrays)

    with jax.sharding.use_abstract_mesh(POD):
        return jax.jit(gradient).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()


def test_splash_traces_for_a_tpu_mesh_and_splits_heads_over_it():
    text = lowered_for_tpu(SplashBlockSizes(), kv_head="model")
    assert text.count("tpu_custom_call") == 3  # forward, gradients of keys and values, gradient of queries
    # 4 heads over a model axis of 2: each chip runs the kernel on 2 heads.
    assert "tensor<2x2x1024x16xbf16>" in text
    assert "tensor<2x2x1024x16xbf16>" not in lowered_for_tpu(SplashBlockSizes())
    fused = lowered_for_tpu(SplashBlockSizes(use_fused_bwd=True))
    assert fused.count("tpu_custom_call") == 2 and "splash_mha_dq" not in fused


def test_splash_refuses_positions_split_over_the_mesh():
    with pytest.raises(TomatError, match="splits `position`"):
        lowered_for_tpu(SplashBlockSizes(), position="model")


@pytest.mark.parametrize(
    ("fields", "seq_len", "message"),
    [
        ({"block_q": 100}, None, "block_q is 100.*multiple of 128"),
        ({"block_kv_dq": 0}, None, "block_kv_dq is 0"),
        ({"block_kv": 384, "block_kv_compute": 256}, None, "block_kv is 384 and block_kv_compute is 256"),
        ({"use_fused_bwd": True, "block_q_dq": 512}, None, "block_q_dq is 512"),
        ({}, 1000, "1000.*multiple of 128"),
        ({"block_q": 1024}, 4608, "block_q is 1024 and the sequence length is 4608"),
        ({"block_kv_dkv_compute": 1024}, 4096, "sequence length of 4096, .*block_kv_dkv_compute is 1024"),
    ],
)
def test_impossible_block_sizes_are_refused(fields, seq_len, message):
    with pytest.raises(TomatError, match=message):
        SplashBlockSizes(**fields).for_sequence(seq_len)


@given(tiles=st.integers(1, 80), fused=st.booleans())
@settings(max_examples=30, deadline=None)
def test_default_blocks_fit_any_sequence_that_splash_takes(tiles, fused):
    seq_len = 128 * tiles
    sizes = SplashBlockSizes(use_fused_bwd=fused).for_sequence(seq_len)
    for name in SPLASH_BLOCKS:
        if not (fused and name.endswith("_dq")):
            size = getattr(sizes, name)
            assert seq_len % size == 0 and size % 128 == 0 and size <= 512
    assert kernel_sizes(sizes, seq_len).has_backward_blocks and (sizes.block_q_dq is None) == fused


def test_every_splash_knob_reaches_the_kernels():
    blocks = (128, 256, 128, 384, 768, 384, 128, 256)
    for letter in "qkv":
        sizes = kernel_sizes(SplashBlockSizes(*blocks, **{f"{letter}_layout": "seq_minor"}), 768)
        assert tuple(getattr(sizes, name) for name in SPLASH_BLOCKS) == blocks
        assert [each for each in "qkv" if getattr(sizes, f"{each}_layout").name == "SEQ_MINOR"] == [letter]


@given(seq_len=st.integers(1, 9000))
@settings(max_examples=60, deadline=None)
def test_flash_block_divides_the_sequence_or_is_refused(seq_len):
    divisors = [d for d in range(1, min(seq_len, 1024) + 1) if seq_len % d == 0]
    if seq_len > 1024 and max(divisors) < 128:
        with pytest.raises(TomatError, match=f"{seq_len}.*largest divisor up to 1024 is {max(divisors)}"):
            flash_block(seq_len, None)
    else:
        assert flash_block(seq_len, None) == max(divisors)


def test_backend_follows_the_platform_of_the_mesh_and_not_of_this_machine():
    found = {platform: str(resolve_backend(None, platform)) for platform in ("tpu", "cpu", "gpu")}
    assert found == {"tpu": "splash", "cpu": "jax_flash", "gpu": "cudnn"}
    assert resolve_backend(AttentionBackend.DEFAULT, "tpu") == "splash"
    assert resolve_backend(AttentionBackend.VANILLA, "tpu") == "vanilla"
    assert resolve_backend(AttentionBackend.SPLASH, None) == "splash"
    assert traced_platform() == jax.default_backend()
    with jax.sharding.use_abstract_mesh(POD):
        assert traced_platform() == "tpu"


def attention_layer(**fields) -> tuple[DensityAttention, hax.NamedArray]:
    Embed = Axis("embed", 32)
    config = DensityAttentionConfig(**{"Embed": Embed, "num_heads": 2, "num_kv_heads": 1, **fields})
    layer = DensityAttention.init(config, key=jax.random.PRNGKey(0))
    return layer, hax.random.normal(jax.random.PRNGKey(1), (Axis("batch", 1), Axis("position", 32), Embed))


def test_splash_on_a_cpu_is_one_clear_error():
    layer, x = attention_layer(attn_backend=AttentionBackend.SPLASH)
    with pytest.raises(TomatError, match="splash needs a TPU: use jax_flash or vanilla"):
        layer(x, AttentionMask.causal())


def test_attention_with_another_mask_than_a_causal_one_is_refused():
    layer, x = attention_layer()
    causal, both_ways = AttentionMask.causal(), AttentionMask.bidirectional_sliding_window(3)
    ids = hax.named(np.zeros(32, int), "position")
    packed = AttentionMask.causal(segment_ids=(ids, ids))
    plain = hax.ones((Axis("position", 32), Axis("key_position", 32)))
    for mask in (None, AttentionMask(), plain, both_ways, causal & both_ways, AttentionMask.causal(offset=1), packed):
        with pytest.raises(TomatError, match="a mask that is not causal"):
            layer(x, mask)
    for knob in ({"query_blocks": 2}, {"paired_heads": True, "num_kv_heads": 2}, {"whole_head": WholeHeadConfig()}):
        with pytest.raises(TomatError, match="a sliding window of 4; model.paired_heads, query_blocks and whole_head"):
            attention_layer(**knob)[0](x, AttentionMask.causal(sliding_window=4))


def test_layer_applies_its_window_whatever_mask_it_gets():
    windowed, x = attention_layer(sliding_window=10)
    plain, _ = attention_layer()
    expected = plain(x, AttentionMask.causal(sliding_window=10)).array
    np.testing.assert_array_equal(windowed(x, AttentionMask.causal()).array, expected)
    assert not np.array_equal(plain(x, AttentionMask.causal()).array, expected)


H100 = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
GPUS = AbstractMesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, abstract_device=H100)


def lowered_for_gpus(window=None, **mapping: str) -> str:
    """The CUDA program of the gradient of cuDNN's attention, 4 heads of queries on 2 of keys, on a mesh of 2 x 2 GPUs;
    needs no GPU."""
    arrays = heads(4, 2, 512, 128, jnp.bfloat16)

    def gradient(*arrays):
        attend = partial(cudnn_attention, window=window)
        with hax.axis_mapping(mapping):
            return jax.grad(lambda *each: attend(*each).array.astype(jnp.float32).sum(), argnums=(0, 1, 2))(*arrays)

    with jax.sharding.use_abstract_mesh(GPUS):
        return jax.jit(gradient).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


def test_cudnn_traces_for_gpus_with_its_mask_and_splits_heads_over_them():
    text = lowered_for_gpus()
    assert text.count("@__cudnn$fmhaSoftmax(") == text.count("@__cudnn$fmhaSoftmaxBackward(") == 1
    assert text.count(r"mask_type\22: \22CAUSAL") == 2 and text.count(r"sliding_window_length\22: 0") == 2
    # positions before heads, as projections give them; the scale; the log-sum-exp that a policy can keep
    assert "tensor<2x512x4x128xbf16>" in text and "tensor<2x4x512xf32>" in text
    assert text.count(f"fmha_scale\\22: {1 / math.sqrt(128)}") == 2
    assert "tensor<1x512x2x128xbf16>" in lowered_for_gpus(kv_head="model", batch="data")
    windowed = lowered_for_gpus(window=100)
    assert windowed.count(r"sliding_window_length\22: 100") == 2
    with pytest.raises(TomatError, match="splits `position`"):
        lowered_for_gpus(position="model")


@pytest.mark.parametrize(
    ("window", "kv_heads", "mesh"), [(None, 4, False), (None, 2, True), (100, 2, False), (1, 1, False)]
)
def test_jaxs_own_form_of_what_cudnn_is_asked_equals_the_plain_formula(monkeypatch, window, kv_heads, mesh):
    """With XLA in the place of cuDNN: groups of heads, a window that counts the position itself, scale, layout."""

    def same(q, k, v, *, scale, window):
        seen = None if window is None else (window - 1, 0)  # `dot_product_attention` gives cuDNN one more than this
        how = {"scale": scale, "is_causal": True, "local_window_size": seen, "implementation": "xla"}
        return jax.nn.dot_product_attention(q, k, v, **how, return_residual=True)

    def same_backward(kept, d_out, **how):
        return jax.vjp(lambda *qkv: same(*qkv, **how)[0], *kept[:3])[1](d_out)

    monkeypatch.setattr("tomat.model.cudnn.forward", same)
    monkeypatch.setattr("tomat.model.cudnn.backward", same_backward)
    with two_devices() if mesh else contextlib.nullcontext():
        attend = partial(cudnn_attention, window=window)
        assert_plain(attend, qkv(4, kv_heads), AttentionMask.causal(sliding_window=window))


def test_a_policy_that_keeps_cudnns_output_runs_its_forward_kernel_once():
    def text(names: list[str]) -> str:
        layer, x = attention_layer(attn_backend="cudnn", head_dim=64)
        policy = ScanCheckpointPolicy(save_block_internals=names)

        def loss(x):
            return policy.checkpoint("carry", "in", lambda c, m: m(c, AttentionMask.causal()))(x, layer).sum().scalar()

        with jax.sharding.use_abstract_mesh(GPUS):
            traced = jax.jit(jax.value_and_grad(loss)).trace(x.astype(jnp.bfloat16))
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    for kept, forward in (([ATTENTION_OUTPUT], 1), ([QKV], 2), ([QKV, ATTENTION_OUTPUT], 1)):
        assert text(kept).count("@__cudnn$fmhaSoftmax(") == forward, kept


class OtherGpu:
    def __init__(self, kind: str, capability: str):
        self.device_kind, self.compute_capability = kind, capability


@pytest.mark.parametrize(
    ("platform", "gpu", "head_size", "dtype", "said"),
    [
        ("cpu", None, 128, jnp.bfloat16, "the step is for cpu; cudnn needs an NVIDIA GPU"),
        ("tpu", None, 128, jnp.bfloat16, "the step is for tpu"),
        ("gpu", OtherGpu("Tesla V100", "7.0"), 64, jnp.float16, "V100 has compute capability 7.0; cudnn needs 8.0"),
        ("gpu", OtherGpu("A100", "8.0"), 256, jnp.bfloat16, "256 numbers; on A100 .* multiples of 8 up to 128"),
        ("gpu", OtherGpu("H100", "9.0"), 264, jnp.bfloat16, "multiples of 8 up to 256"),
        ("gpu", OtherGpu("H100", "9.0"), 60, jnp.bfloat16, "multiples of 8"),
        ("gpu", OtherGpu("MI300X", "gfx942"), 64, jnp.bfloat16, "MI300X is not an NVIDIA"),
        ("gpu", OtherGpu("H100", "9.0"), 64, jnp.float32, "float32; cudnn takes bfloat16"),
        ("gpu", OtherGpu("A100", "8.0"), 128, jnp.bfloat16, None),
        ("gpu", OtherGpu("H100", "9.0"), 256, jnp.bfloat16, None),
    ],
)
def test_cudnn_is_chosen_where_the_gpu_has_it_and_refused_by_name_elsewhere(
    monkeypatch, platform, gpu, head_size, dtype, said
):
    if gpu is not None:
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "local_devices", lambda: [gpu])
    resolve = partial(resolve_backend, platform=platform, head_size=head_size, dtype=dtype)
    if said is None:
        assert resolve("cudnn") == resolve(None) == "cudnn"
        return
    assert resolve(None) == ("splash" if platform == "tpu" else "jax_flash")
    with pytest.raises(TomatError, match=f"{said}.*: use jax_flash or vanilla"):
        resolve("cudnn")
