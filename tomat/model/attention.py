"""Causal attention with a choice of kernel.

- `vanilla`: one matrix of scores per head, or with `query_blocks` those of a block of queries and the keys that it
  sees (`causal_blocks.py`); memory grows with the square of the sequence.
- `jax_flash`: Levanter's blockwise attention in plain JAX, for any platform.
- `cudnn`: cuDNN's fused kernels, for NVIDIA GPUs (`cudnn.py`).
- `splash`: Pallas kernels for TPUs, those of JAX or, where the configuration has their sizes, tomat's own that
  hold a whole head in VMEM (`splash.py`).

The backend follows the platform of the mesh that the step is traced for, which may be a TPU topology on a machine that
has none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, cast

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import maybe_rng_split, named_call, tree_checkpoint_name
from jax.sharding import PartitionSpec
from levanter.layers.attention import (
    Attention,
    AttentionBackend,
    AttentionConfig,
    AttentionMask,
    dot_product_attention,
    materialize_mask,
)
from levanter.layers.rotary import RotaryEmbeddings

from tomat.base.errors import TomatError
from tomat.model.causal_blocks import MASKED, causal_attention, flash_attention, is_causal_alone
from tomat.model.checkpoint_policies import ATTENTION_OUTPUT, ATTENTION_PROJECTION, QKV
from tomat.model.devices import traced_device_kind
from tomat.model.sharding import flatten_group, on_mesh, split_over
from tomat.model.tiles import QkRotaryConfig, RotaryKernel, SplashBlockSizes, WholeHeadConfig

if TYPE_CHECKING:  # kernels for TPUs, and what only decoding keeps
    from tomat.model.kv_cache import KvCache
    from tomat.model.norm_rotary import Rotary


class Backend(StrEnum):
    """Levanter's `AttentionBackend`, without Transformer Engine, and with cuDNN."""

    DEFAULT = "default"
    VANILLA = "vanilla"
    JAX_FLASH = "jax_flash"
    SPLASH = "splash"
    CUDNN = "cudnn"


BACKENDS = tuple(backend for backend in Backend if backend is not Backend.DEFAULT)


def traced_platform() -> str | None:
    """The platform ("cpu", "gpu", "tpu") of the mesh in scope, which may be a TPU topology on a machine without one;
    None if that mesh names no device. With no mesh in scope: JAX's default platform here."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.default_backend()
    return None if mesh.abstract_device is None else mesh.abstract_device.platform


def resolve_backend(
    backend: str | None,
    platform: str | None,
    *,
    interpret: bool = False,
    head_size: int = 128,
    dtype: Any = jnp.bfloat16,
) -> Backend:
    """The backend to use on `platform`. None is an unknown platform: a backend that is set is taken to fit it, and the
    default is jax_flash. With `interpret` the splash kernels run in Pallas' interpreter, on any platform."""
    unset = backend is None or backend == Backend.DEFAULT
    if unset and platform == "tpu":
        return Backend.SPLASH
    if unset and platform in ("cpu", None):
        return Backend.JAX_FLASH
    if unset or backend == Backend.CUDNN:
        from tomat.model.cudnn import lacks_cudnn

        lacks = lacks_cudnn(platform, head_size, dtype)
        if lacks is not None and not unset:
            raise TomatError(f"model.attn_backend is cudnn, but {lacks}: use jax_flash or vanilla.")
        return Backend.CUDNN if lacks is None else Backend.JAX_FLASH
    if backend == Backend.SPLASH and platform not in ("tpu", None) and not interpret:
        said = f"model.attn_backend is splash, but the step is for {platform}"
        raise TomatError(f"{said}; splash needs a TPU: use jax_flash or vanilla.")
    return Backend(backend)


@dataclass(frozen=True)
class DensityAttentionConfig(AttentionConfig):
    """Levanter's attention configuration with the TPU kernels' settings."""

    splash: SplashBlockSizes = SplashBlockSizes()
    whole_head: WholeHeadConfig | None = None
    qk_rotary: QkRotaryConfig = QkRotaryConfig()
    fused_qkv: bool = False
    value_mix: float = 0.0
    paired_heads: bool = False
    query_blocks: int = 1

    @property
    def heads_in_one(self) -> int:
        """Number of key heads that attention takes as one, with their positions interleaved."""
        return 2 if self.paired_heads else 1

    @property
    def interpret(self) -> bool:
        return self.splash.interpret if self.whole_head is None else self.whole_head.interpret


class DensityAttention(Attention):
    """Causal self-attention: Levanter's projections, norms and rotary embedding around tomat's choice of kernel. `x` is
    [..., position, embed], and so is the result."""

    config: DensityAttentionConfig = eqx.field(static=True)
    first_values: NamedArray | None = None
    """Projected values of the first layer, for one call (`DensityDecoderLayer`); with `value_mix` alone."""

    @staticmethod
    def init(config: DensityAttentionConfig, *, key) -> "DensityAttention":
        base = Attention.init(config, key=key)
        return DensityAttention(
            config, base.q_proj, base.k_proj, base.v_proj, base.o_proj, base.q_norm, base.k_norm, base.rot_embs
        )

    @named_call
    def __call__(
        self, x: NamedArray, mask: NamedArray | AttentionMask | None, *, key=None, pos_ids: NamedArray | None = None
    ) -> NamedArray:
        kernel = self.config.qk_rotary.kernel
        return self._whole(x, mask, key=key, pos_ids=pos_ids, kernel=kernel)[0]

    def _whole(
        self,
        x: NamedArray,
        mask: NamedArray | AttentionMask | None,
        *,
        key,
        pos_ids: NamedArray | None,
        kernel: RotaryKernel,
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """The result, and keys and values of all positions as attention takes them; with the kernel `attention` the
        keys are not rotated yet."""
        if not isinstance(mask, AttentionMask) or not is_causal_alone(mask):
            said = "attention was called with a mask that is not causal, with or without a sliding window"
            raise TomatError(f"{said}; call the model through tomat.model.any_decoder.causal_activations.")
        if self.config.sliding_window is not None:
            mask = mask.with_sliding_window(self.config.sliding_window)
        paired = self.config.paired_heads
        no_window = paired or self.config.query_blocks > 1 or self.config.whole_head is not None
        if no_window and mask.sliding_window is not None:
            said = f"attention was called with a sliding window of {mask.sliding_window}"
            raise TomatError(f"{said}; model.paired_heads, query_blocks and whole_head take none: leave it out.")
        key_proj, key_o = maybe_rng_split(key, 2)
        if kernel != "xla":
            self._check_kernel(kernel, pos_ids)
        match kernel:
            case "xla":
                q, k, v = tree_checkpoint_name(self._compute_qkv(x, key=key_proj, pos_ids=pos_ids), QKV)
            case "pallas":
                q, k, v = tree_checkpoint_name(self._compute_qkv_in_kernel(x, key=key_proj), QKV)
            case "attention":
                q, k, v = self._project(x, key=key_proj, name=QKV)
        q = q.rearrange((..., "kv_head", "q_heads_per_group", "position", "head_size"))
        k = k.rearrange((..., "kv_head", "position", "head_size")).rename({"position": "key_position"})
        v = self._mixed(v).rearrange((..., "kv_head", "position", "head_size")).rename({"position": "key_position"})
        if paired:
            q, k, v = paired_up(q, "position"), paired_up(k, "key_position"), paired_up(v, "key_position")
        attended = self._attend(q, k, v, mask, jnp.float32 if self.config.upcast_attn else x.dtype, kernel)
        if paired:
            attended = heads_apart(attended)
        attended = attended.flatten_axes(("kv_head", "q_heads_per_group"), "heads").astype(x.dtype)
        return tree_checkpoint_name(self.o_proj(attended, key=key_o), ATTENTION_PROJECTION), k, v

    def decode(self, x: NamedArray, cache: "KvCache", position: jax.Array) -> "tuple[NamedArray, KvCache]":
        """Attend to the cached positions, and add the new ones to the cache. `x`, [batch, position, embed], is all
        positions of the cache, or one; `position`, an int scalar, is its first: 0 for all. Norm and rotary embedding of
        one position, with `qk_rotary.kernel: attention` of all, are Levanter's (`QkRotaryConfig` says what differs)."""
        Pos, KeyPos = x.resolve_axis("position"), cache.keys.resolve_axis("key_position")
        if Pos.size * self.config.heads_in_one == KeyPos.size:
            kernel = "pallas" if self.config.qk_rotary.kernel == "pallas" else "xla"
            out, k, v = self._whole(x, AttentionMask.causal(), key=None, pos_ids=None, kernel=kernel)
            return out, cache.written(k, v, position)
        q, k, v = self._compute_qkv(x, key=None, pos_ids=NamedArray(position[None], (Pos,)))
        k, v = (each.rename({"position": "key_position"}) for each in (k, self._mixed(v)))
        last: Any = position
        if self.config.paired_heads:
            q, k, v = paired_up(q, "position"), paired_up(k, "key_position"), paired_up(v, "key_position")
            position = 2 * position
            last = (position + hax.arange(q.resolve_axis("position"))).broadcast_axis(KeyPos)
            last = last.rearrange(("position", "key_position"))
        cache = cache.written(k, v, position)
        at = hax.arange(KeyPos)
        seen = at <= last
        if self.config.sliding_window is not None:
            seen = seen & (at > position - self.config.sliding_window)
        q = q.rearrange((..., "kv_head", "q_heads_per_group", "position", "head_size"))
        attended = cache.attended(q, seen, jnp.float32 if self.config.upcast_attn else x.dtype)
        if self.config.paired_heads:
            attended = heads_apart(attended)
        attended = attended.flatten_axes(("kv_head", "q_heads_per_group"), "heads").astype(x.dtype)
        return self.o_proj(attended), cache

    def _mixed(self, v: NamedArray) -> NamedArray:
        share = self.config.value_mix
        if share == 0:
            return v
        if self.first_values is None:
            said = f"model.value_mix is {share}, and attention was called without the values of the first layer"
            raise TomatError(f"{said}; call the model whole, through tomat.model.any_decoder.causal_activations.")
        return (1 - share) * v + share * self.first_values

    def _check_kernel(self, kernel: RotaryKernel, pos_ids: NamedArray | None) -> None:
        """Refuse a `qk_rotary.kernel` other than `xla` that cannot run here, or not with this model."""
        config = self.config
        backend = resolve_backend(config.attn_backend, traced_platform(), interpret=config.interpret)
        what = None
        if pos_ids is not None:
            what = "positions were given; it takes positions that count from 0"
        elif self.rot_embs is None:
            what = "there is no rotary embedding"
        elif backend != Backend.SPLASH:
            what = f"the attention backend is {backend}; it runs beside splash attention on a TPU"
        if what is not None:
            raise TomatError(f"model.qk_rotary.kernel is {kernel}, but {what}. Use model.qk_rotary.kernel: xla.")

    def _project(self, x: NamedArray, *, key, name: str | None = None) -> tuple[NamedArray, NamedArray, NamedArray]:
        """Queries, keys and values as they are projected; `name` is the checkpoint name of what is kept of them."""

        def named[T](tree: T) -> T:
            return tree if name is None else tree_checkpoint_name(tree, name)

        if self._fused:
            # Kept as one array: its parts would be copies.
            axis = "q_heads_per_group"
            joined, sizes = joined_product(x, (self.q_proj, self.k_proj, self.v_proj), axis)
            q, k, v = parts(named(joined), axis, sizes)
            return q, k[axis, 0], v[axis, 0]
        key_q, key_k, key_v = maybe_rng_split(key, 3)
        return named((self.q_proj(x, key=key_q), self.k_proj(x, key=key_k), self.v_proj(x, key=key_v)))

    @property
    def _fused(self) -> bool:
        return self.config.fused_qkv and can_join((self.q_proj, self.k_proj, self.v_proj))

    def _compute_qkv(
        self, x: NamedArray, *, key, pos_ids: NamedArray | None = None
    ) -> tuple[NamedArray, NamedArray, NamedArray]:
        """As Levanter's, which cannot project in one product (marin-levanter 0.2.227)."""
        if not self._fused:
            return super()._compute_qkv(x, key=key, pos_ids=pos_ids)
        q, k, v = self._project(x, key=key)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rot_embs is not None:
            pos_ids = hax.arange(x.resolve_axis("position")) if pos_ids is None else pos_ids
            q, k = (self.rot_embs(each, pos_ids).astype(each.dtype) for each in (q, k))
        return q, k, v

    def _compute_qkv_in_kernel(self, x: NamedArray, *, key) -> tuple[NamedArray, NamedArray, NamedArray]:
        """As `_compute_qkv`, with norm, rotary embedding and the scale of the queries in one kernel."""
        config = self.config
        q, k, v = self._project(x, key=key)
        HeadSize = q.resolve_axis("head_size")
        rotary = self._rotary(x.resolve_axis("position"), HeadSize)
        scale = (1.0 if config.whole_head is None else math.log2(math.e)) / math.sqrt(HeadSize.size)
        q = _norm_rotate_named(q, rotary.q_weight * scale, rotary, config.qk_rotary)
        return q, _norm_rotate_named(k, rotary.k_weight, rotary, config.qk_rotary), v

    def _attend(
        self, q: NamedArray, k: NamedArray, v: NamedArray, mask: AttentionMask, dtype, kernel: RotaryKernel
    ) -> NamedArray:
        config, platform, size = self.config, traced_platform(), q.axis_size("head_size")
        match resolve_backend(config.attn_backend, platform, interpret=config.interpret, head_size=size, dtype=dtype):
            case Backend.SPLASH:
                scaled = kernel == "pallas"
                q, k, v = q.astype(dtype), k.astype(dtype), v.astype(dtype)
                if config.whole_head is not None:
                    from tomat.model.splash import whole_head_attention

                    rotary = None
                    if kernel == "attention":
                        Pos, HeadSize = q.resolve_axis("position"), q.resolve_axis("head_size")
                        rotary = self._rotary(Pos, HeadSize, in_attention=True)
                    return whole_head_attention(q, k, v, config.whole_head, q_is_scaled=scaled, rotary=rotary)
                from tomat.model.splash import splash_attention

                return splash_attention(q, k, v, mask, config.splash, q_is_scaled=scaled)
            case Backend.CUDNN:
                from tomat.model.cudnn import cudnn_attention

                return cudnn_attention(q.astype(dtype), k.astype(dtype), v.astype(dtype), mask.sliding_window)
            case Backend.JAX_FLASH:
                block = config.flash_attention_block_size
                return flash_attention(q.astype(dtype), k.astype(dtype), v, mask, block)
            case _ if config.query_blocks > 1:
                return causal_attention(q.astype(dtype), k.astype(dtype), v, config.query_blocks)
            case _:
                # The mask is added, not selected by: a masked weight is zero either way, and on a CPU this saves 3 % of
                # the first demo's step, since XLA (jaxlib 0.11.1) fuses its softmax with a sum alone.
                seen = materialize_mask(mask, q.resolve_axis("position"), k.resolve_axis("key_position"))
                assert seen is not None  # it is causal: `_whole`
                names = "position", "key_position", "head_size"
                bias = hax.where(seen, 0.0, MASKED).astype(dtype)
                how = {"attention_dtype": dtype, "attn_backend": AttentionBackend.VANILLA}
                out = dot_product_attention(*names, q, k, v, bias=bias, **how)
                return tree_checkpoint_name(out, ATTENTION_OUTPUT)

    def _rotary(self, Pos: Axis, HeadSize: Axis, *, in_attention: bool = False) -> "Rotary":
        """Norm and rotary embedding of queries and keys, as a kernel takes them; with `in_attention` the interleaved
        heads of a pair are rotated alike."""
        from tomat.model.norm_rotary import Rotary

        heads = self.config.heads_in_one if in_attention else 1
        assert self.rot_embs is not None  # `_check_kernel`
        norms = [
            None if norm is None or norm.weight is None else norm.weight.array for norm in (self.q_norm, self.k_norm)
        ]
        q, k = (jnp.ones(HeadSize.size) if weight is None else weight.astype(jnp.float32) for weight in norms)
        eps = None if self.q_norm is None else self.q_norm.eps
        table = rotary_table(self.rot_embs, Pos.resize(Pos.size // heads), HeadSize)
        return Rotary(q, k, table if heads == 1 else jnp.repeat(table, heads, axis=0), eps)

    def paged_decode(self, x, kv_cache, batch_info, *, pos_ids, key=None):
        """`decode` at position `batch_info`: Levanter's layer calls this, its norms and MLP around it."""
        from tomat.model.kv_cache import KvCache

        if not isinstance(kv_cache, KvCache):
            raise TomatError("density_decoder is decoded from a KvCache, and not from Levanter's pages.")
        return self.decode(x, kv_cache, cast(jax.Array, batch_info))


def paired_up(x: NamedArray, axis: str) -> NamedArray:
    """Neighbouring key heads, of [..., kv_head, ..., axis, head_size], as one head twice as long: position t of the
    first becomes 2 t, that of the second 2 t + 1. What is causal in these positions is then causal in t."""
    Heads = x.resolve_axis("kv_head")
    apart = x.unflatten_axis(Heads, (Heads.resize(Heads.size // 2), Axis("of_pair", 2)))
    return apart.rearrange((..., axis, "of_pair", "head_size")).flatten_axes((axis, "of_pair"), axis)


def heads_apart(x: NamedArray) -> NamedArray:
    """Undoes `paired_up` for what attention gives: [..., kv_head, q_heads_per_group, position, head_size]."""
    Pos = x.resolve_axis("position")
    apart = x.unflatten_axis(Pos, (Pos.resize(Pos.size // 2), Axis("of_pair", 2)))
    apart = apart.rearrange((..., "kv_head", "of_pair", "q_heads_per_group", "position", "head_size"))
    return apart.flatten_axes(("kv_head", "of_pair"), "kv_head")


def rotary_table(rotary: RotaryEmbeddings, Pos: Axis, HeadSize: Axis) -> jax.Array:
    """Cosines and, in the second half, sines of any rotary embedding, float32 `[position, head_size]`. Whatever its
    frequencies, it turns the halves (a, b) of a vector into (a cos - b sin, b cos + a sin): (1, 0) into (cos, sin)."""
    first = hax.arange(HeadSize) < HeadSize.size // 2
    turned = rotary(first.astype(jnp.float32).broadcast_axis(Pos), hax.arange(Pos))
    return turned.rearrange((Pos, HeadSize)).array


def _norm_rotate_named(x: NamedArray, weight: jax.Array, rotary: "Rotary", config: QkRotaryConfig) -> NamedArray:
    """`norm_rotate` of queries or keys in a `shard_map` over the mesh in scope, the positions after the heads."""
    from tomat.model.norm_rotary import norm_rotate
    from tomat.model.vmem import check_rotary

    Pos, HeadSize = x.resolve_axis("position"), x.resolve_axis("head_size")
    Heads = tuple(axis for axis in x.axes if axis.name in ("kv_head", "q_heads_per_group"))
    Batch = tuple(axis for axis in x.axes if axis not in (*Heads, Pos, HeadSize))
    axes = (*Batch, *Heads, Pos, HeadSize)
    bhsd = flatten_group(flatten_group(x.rearrange(axes), Heads, "heads"), Batch, "batch")
    check_rotary(config, Pos.size, HeadSize.size, x.array.dtype.itemsize, traced_device_kind())

    def rotate(x: jax.Array, weight: jax.Array, table: jax.Array) -> jax.Array:
        return norm_rotate(x, weight, table, rotary.eps, config)

    whole = split = PartitionSpec()
    if not jax.sharding.get_abstract_mesh().empty:
        split = PartitionSpec(split_over(Batch), split_over(Heads))
    out = on_mesh(rotate, (split, whole, whole), split)(bhsd.array, weight, rotary.table)
    return hax.named(out.reshape([axis.size for axis in axes]), axes)


def joined_product(x: NamedArray, layers: Sequence[Any], axis: str) -> tuple[NamedArray, list[int]]:
    """The outputs of Haliax's `Linear` layers of one input, [..., in], from one product, one behind another along
    `axis`; and the size of each part. The outputs differ in the size of `axis` alone; one without that axis counts as
    size 1. The weights stay apart: parameters, optimizer state and checkpoints are those of the layers as they are, and
    only the product joins them, so a run may turn it on and off at any step. The input's gradient is then one product
    too, over all outputs."""
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
    """Whether each layer is Haliax's own `Linear`. Others, such as layers in few bits, are multiplied one by one, to
    the same result."""
    return all(type(layer) is hnn.Linear for layer in layers)


def _with_axis(x: NamedArray, axis: str, like: NamedArray) -> NamedArray:
    """`x` with the axes of `like` in its order; `axis` may be new."""
    if all(a.name != axis for a in x.axes):
        x = x.broadcast_axis(hax.Axis(axis, 1))
    return x.rearrange(tuple(a.name for a in like.axes))
