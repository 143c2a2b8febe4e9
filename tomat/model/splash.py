"""Causal attention by the Pallas splash kernels of JAX for TPUs, every tile size of theirs in the configuration.

Levanter's wrapper of the same kernels takes one block size for all eight and never uses the fused backward kernel.

Axis letters: B batch, H query heads, S positions, D head size.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask

from tomat.base.config_keys import key
from tomat.base.errors import TomatError
from tomat.model.tiles import LANES

ATTENTION_OUTPUT = "attention_output"
"""Checkpoint name of what attention yields before its output projection, and of the residuals (the log-sum-exp of each
row of scores) that its backward needs."""

DEFAULT_SPLASH_BLOCK = 512
"""Tile where none is set: Levanter's `DEFAULT_SPLASH_BLOCK_SIZE`."""

QkvLayout = Literal["head_dim_minor", "seq_minor"]


@dataclass(frozen=True)
class SplashBlockSizes:
    """Tile sizes of the splash attention kernels. They change the speed, not (beyond rounding) the values.

    A size of None becomes the largest multiple of 128 up to 512 that divides the sequence; a `compute` size of None
    becomes that of its memory block. Sizes count positions.
    """

    block_q: int | None = key(None, free="rounding")
    """Queries per step of the forward kernel."""
    block_kv: int | None = key(None, free="rounding")
    """Keys fetched per step of the forward kernel."""
    block_kv_compute: int | None = key(None, free="rounding")
    """Keys per inner step of the forward kernel; divides `block_kv`."""
    block_q_dkv: int | None = key(None, free="rounding")
    """Queries per step of the kernel for the gradients of keys and values (all three gradients when fused)."""
    block_kv_dkv: int | None = key(None, free="rounding")
    """Keys fetched per step of that kernel."""
    block_kv_dkv_compute: int | None = key(None, free="rounding")
    """Keys per inner step of that kernel; divides `block_kv_dkv`."""
    block_q_dq: int | None = key(None, free="rounding")
    """Queries per step of the kernel for the gradient of queries; not with `use_fused_bwd`."""
    block_kv_dq: int | None = key(None, free="rounding")
    """Keys per step of that kernel; not with `use_fused_bwd`."""
    use_fused_bwd: bool = key(False, free="rounding")
    """One backward kernel for all three gradients. It writes a gradient of the queries for each block of `block_kv_dkv`
    keys and sums them afterwards, so its memory grows as that block shrinks."""
    q_layout: QkvLayout = key("head_dim_minor", free="rounding")
    """Which dimension of the queries lies innermost in memory."""
    k_layout: QkvLayout = key("head_dim_minor", free="rounding")
    """The same for the keys."""
    v_layout: QkvLayout = key("head_dim_minor", free="rounding")
    """The same for the values."""
    interpret: bool = key(False, free="rounding")
    """Run the kernels in Pallas' interpreter on whatever platform there is: to check values without a TPU, much slower
    than any other backend."""

    def __post_init__(self) -> None:
        for name in _BLOCK_FIELDS:
            size = getattr(self, name)
            if size is not None and (size < LANES or size % LANES):
                raise TomatError(f"model.splash.{name} is {size}; expected a positive multiple of {LANES}.")
        _check_compute_sizes({name: getattr(self, name) for name in _BLOCK_FIELDS})
        if self.use_fused_bwd and not (self.block_q_dq is None and self.block_kv_dq is None):
            raise TomatError(
                f"model.splash.use_fused_bwd is true, yet block_q_dq is {self.block_q_dq} and block_kv_dq "
                f"{self.block_kv_dq}; it has no separate kernel for queries: leave both unset."
            )

    def for_sequence(self, seq_len: int) -> splash_attention_kernel.BlockSizes:
        """The kernels' block sizes for sequences of `seq_len` positions, with every size filled in."""
        if seq_len % LANES:
            said = f"the sequence length is {seq_len}; splash attention expects a multiple of {LANES}"
            raise TomatError(f"{said}. Choose another length, or attn_backend jax_flash or vanilla.")
        default = largest_divisor(seq_len, DEFAULT_SPLASH_BLOCK, LANES)
        sizes: dict[str, int | None] = {}
        for name in _BLOCK_FIELDS:
            size = getattr(self, name)
            if size is None and name.endswith("_compute"):
                size = sizes[name.removesuffix("_compute")]
            sizes[name] = default if size is None else size
        for name, size in sizes.items():
            if size is not None and seq_len % size:
                said = f"model.splash.{name} is {size} and the sequence length is {seq_len}"
                raise TomatError(f"{said}; expected a block that divides the sequence.")
        _check_compute_sizes(sizes, f" for a sequence length of {seq_len}")
        if self.use_fused_bwd:
            sizes["block_q_dq"] = sizes["block_kv_dq"] = None
        layouts = {
            name: splash_attention_kernel.QKVLayout[getattr(self, name).upper()]
            for name in ("q_layout", "k_layout", "v_layout")
        }
        return splash_attention_kernel.BlockSizes(
            **sizes,  # pyright: ignore[reportArgumentType]  (block_q and block_kv are filled in above)
            **layouts,
            use_fused_bwd_kernel=self.use_fused_bwd,
        )


_BLOCK_FIELDS = tuple(field.name for field in dataclasses.fields(SplashBlockSizes) if field.name.startswith("block_"))


def _check_compute_sizes(sizes: Mapping[str, int | None], where: str = "") -> None:
    for compute, memory in (("block_kv_compute", "block_kv"), ("block_kv_dkv_compute", "block_kv_dkv")):
        inner, outer = sizes[compute], sizes[memory]
        if inner is not None and outer is not None and outer % inner:
            said = f"model.splash.{memory} is {outer} and {compute} is {inner}{where}"
            raise TomatError(f"{said}; expected {memory} to be a multiple of {compute}.")


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
    if not is_causal_alone(mask):
        said = "splash attention takes a causal mask with an optional sliding window"
        raise TomatError(f"{said}; use attn_backend jax_flash or vanilla for any other.")
    KvHead, Group, Pos = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "position"))
    scaled = q if q_is_scaled else q * (1 / math.sqrt(q.axis_size("head_size")))
    bhsd, spec = by_heads(scaled, k, v)
    mesh = jax.sharding.get_abstract_mesh()
    head_entry = None if mesh.empty else mesh_axes((KvHead,))
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
        block_sizes=blocks.for_sequence(Pos.size),
        head_shards=head_shards,
        q_seq_shards=1,
        residual_checkpoint_name=ATTENTION_OUTPUT,
        interpret=blocks.interpret,
    )

    attend: Callable[..., jax.Array] = _attend_batch
    if not mesh.empty:
        attend = jax.shard_map(
            attend,
            mesh=mesh,
            in_specs=(
                kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(head_entry, None))),
                spec,
                spec,
                spec,
            ),
            out_specs=spec,
            check_vma=False,  # a Pallas call does not say over which mesh axes its result varies
        )
    out = attend(kernel, *bhsd)
    return hax.named(out.reshape([axis.size for axis in q.axes]), q.axes)


def is_causal_alone(mask: AttentionMask) -> bool:
    """Whether a mask is causal and no more than that, but for a sliding window."""
    others = (mask.explicit_mask, mask.causal_offset, mask.bidirectional_window, mask.segment_ids)
    return mask.is_causal and all(other is None for other in others)


def by_heads(q: NamedArray, k: NamedArray, v: NamedArray) -> tuple[list[jax.Array], PartitionSpec]:
    """Queries, keys and values as kernels take them, q `[B, H, S, D]`, k and v `[B, key heads, S, D]`, and how the mesh
    in scope splits B and heads; empty where there is no mesh."""
    KvHead, Group, Pos = (q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "position"))
    Batch = tuple(axis for axis in q.axes if axis.name not in (KvHead.name, Group.name, Pos.name, "head_size"))
    if any(entry is not None for entry in (*pspec_for_axis(Pos), *pspec_for_axis(k.resolve_axis("key_position")))):
        raise TomatError("the mesh splits `position`, which splash attention cannot do; map it to no mesh axis.")
    arrays = [
        flatten_group(flatten_group(array, heads, "heads"), Batch, "batch").array
        for array, heads in ((q, (KvHead, Group)), (k, (KvHead,)), (v, (KvHead,)))
    ]
    if jax.sharding.get_abstract_mesh().empty:
        return arrays, PartitionSpec()
    return arrays, PartitionSpec(mesh_axes(Batch), mesh_axes((KvHead,)))


def _attend_batch(kernel: splash_attention_kernel.SplashAttentionKernel, q, k, v) -> jax.Array:
    return cast(jax.Array, jax.vmap(kernel)(q, k, v))


def mesh_axes(axes: tuple[Axis, ...]) -> tuple[str, ...] | None:
    """The mesh axes that split a (flattened) group of logical axes; None if there are none."""
    names: list[str] = []
    for entry in pspec_for_axis(axes):
        names += () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(names) or None


def flatten_group(array: NamedArray, axes: tuple[Axis, ...], name: str) -> NamedArray:
    """`array` with `axes` as one axis `name`, a new leading one of size 1 if `axes` is empty."""
    return array.flatten_axes(axes, name) if axes else array.broadcast_axis(Axis(name, 1))


def largest_divisor(n: int, limit: int, multiple_of: int = 1) -> int:
    """The largest multiple of `multiple_of` up to `limit` that divides `n`; `multiple_of` must divide `n`."""
    candidates = range(min(n, limit) // multiple_of * multiple_of, 0, -multiple_of)
    return next(size for size in candidates if n % size == 0)
