"""Causal attention by Pallas kernels for TPUs, over haliax arrays and a mesh: JAX's splash kernels, and tomat's own
that hold a whole head in VMEM (`whole_head_kernels.py`). All their sizes are in the configuration.

Levanter's wrapper of the splash kernels takes one block size for all eight and never uses the fused backward kernel.

Axis letters: B batch, H query heads, S positions, D head size.
"""

import math
from functools import partial
from typing import cast

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask

from tomat.model.checkpoint_policies import ATTENTION_OUTPUT
from tomat.model.devices import traced_device_kind
from tomat.model.norm_rotary import Rotary
from tomat.model.sharding import by_heads, on_mesh, split_over
from tomat.model.tiles import SPLASH_BLOCKS, SplashBlockSizes, WholeHeadConfig
from tomat.model.vmem import head_tiles
from tomat.model.whole_head_kernels import attend

LOG2_E = math.log2(math.e)
"""Factor that turns scores of base e into scores of base 2."""


def splash_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    mask: AttentionMask,
    blocks: SplashBlockSizes,
    *,
    q_is_scaled: bool = False,
) -> NamedArray:
    """Causal attention by JAX's splash kernel, in a `shard_map` over the mesh in scope: q and the result [..., kv_head,
    q_heads_per_group, position, head_size], k and v [..., kv_head, key_position, head_size]. The mask is causal, with
    or without a sliding window; queries are divided by sqrt(head_size) here unless `q_is_scaled`."""
    KvHead, Group, Pos = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "position"))
    scaled = q if q_is_scaled else q * (1 / math.sqrt(q.axis_size("head_size")))
    bhsd, spec, axes = by_heads(scaled, k, v, "splash attention")
    mesh = jax.sharding.get_abstract_mesh()
    head_entry = None if mesh.empty else split_over((KvHead,))
    head_shards = math.prod(mesh.shape[name] for name in head_entry or ())

    window = mask.sliding_window
    shape = (Pos.size, Pos.size)
    # LocalMask with nothing to the right is causal itself. A conjunction of a causal and a local mask, which has no
    # closed form in the kernel, would be read from HBM block by block.
    head_mask = (
        splash_attention_mask.CausalMask(shape)
        if window is None or window >= Pos.size
        else splash_attention_mask.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    )
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([head_mask] * (KvHead.size * Group.size)),
        block_sizes=kernel_sizes(blocks, Pos.size),
        head_shards=head_shards,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION_OUTPUT,
        interpret=blocks.interpret,
    )

    of_kernel = None
    if not mesh.empty:
        of_kernel = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(head_entry, None)))
    out = on_mesh(_attend_batch, (of_kernel, spec, spec, spec), spec)(kernel, *bhsd)
    return hax.named(out.reshape([axis.size for axis in axes]), axes)


def whole_head_attention(
    q: NamedArray,
    k: NamedArray,
    v: NamedArray,
    config: WholeHeadConfig,
    *,
    q_is_scaled: bool = False,
    rotary: Rotary | None = None,
) -> NamedArray:
    """Causal attention, without a window, in a `shard_map` over the mesh in scope; shapes as in `splash_attention`. The
    kernels rotate queries and keys first where there is a `rotary`; queries are scaled by log2(e) / sqrt(head_size)
    unless `q_is_scaled`."""
    Pos, HeadSize = q.resolve_axis("position"), q.resolve_axis("head_size")
    eps = None if rotary is None else rotary.eps
    kind = None if config.interpret else traced_device_kind()
    itemsize = q.array.dtype.itemsize
    tiles = head_tiles(config, Pos.size, HeadSize.size, itemsize, rotate=rotary is not None, eps=eps, device_kind=kind)
    scaled = q if q_is_scaled or rotary is not None else q * (LOG2_E / math.sqrt(HeadSize.size))
    arrays, spec, axes = by_heads(scaled, k, v, "splash attention")
    if rotary is not None:
        weights = jnp.stack([rotary.q_weight * (LOG2_E / math.sqrt(HeadSize.size)), rotary.k_weight])
        arrays += [weights[:, None], rotary.table]
    specs = (spec, spec, spec) + (() if rotary is None else (PartitionSpec(), PartitionSpec()))
    run = on_mesh(partial(attend, tiles), specs, spec)
    return hax.named(run(*arrays).reshape([axis.size for axis in axes]), axes)


def kernel_sizes(blocks: SplashBlockSizes, seq_len: int) -> splash_attention_kernel.BlockSizes:
    filled = blocks.for_sequence(seq_len)
    layouts = (splash_attention_kernel.QKVLayout[getattr(filled, f"{name}_layout").upper()] for name in "qkv")
    sizes = {name: getattr(filled, name) for name in SPLASH_BLOCKS}
    return splash_attention_kernel.BlockSizes(
        **sizes,
        **dict(zip(("q_layout", "k_layout", "v_layout"), layouts, strict=True)),
        use_fused_bwd_kernel=filled.use_fused_bwd,
    )


def _attend_batch(kernel: splash_attention_kernel.SplashAttentionKernel, q, k, v) -> jax.Array:
    return cast(jax.Array, jax.vmap(kernel)(q, k, v))
