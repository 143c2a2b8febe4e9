"""Causal attention in plain JAX: Levanter's blockwise algorithm, and one that leaves out what lies above the diagonal.
It takes blocks of queries, each against the keys up to its last.

The second is for CPUs. Levanter's plain attention computes all scores, and its blockwise one all blocks
(`attention.py`): a scan over blocks has one shape and cannot leave any out. Here blocks are written out, so their
number is small. The backward pass is written by hand (Dao et al. 2022, arXiv:2205.14135, without its tiles of keys): it
gets the weights from the log-sum-exp, without sums or a maximum, and has its products in an order for which XLA's CPU
compiler (jaxlib 0.11.1) copies no scores. On two processors, the training step of a decoder of 4 layers of 128 on 2
sequences of 512 tokens took 101 and 102 ms without blocks, 91 and 96 with 2, 90 and 92 with 4, 92 and 91 with 8.
"""

import functools
import math
from typing import Any, cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from haliax.jax_utils import tree_checkpoint_name
from levanter.layers.attention import AttentionMask

from tomat.base.errors import TomatError
from tomat.model.checkpoint_policies import ATTENTION_OUTPUT
from tomat.model.sharding import flatten_group
from tomat.model.tiles import LANES, largest_divisor

MAX_QUERY_BLOCKS = 16
"""Each block is written out in the program; with 16 of them 17/32 of the scores are left, with any number 1/2."""

MASKED = -1e9
"""Score of a position that is not seen, as in Haliax's attention (marin-haliax 0.2.227): its weight is zero."""


def causal_attention(q: NamedArray, k: NamedArray, v: NamedArray, blocks: int) -> NamedArray:
    """Attend, each position to those up to its own, with float32 scores and weights. `q` and the result have the axes
    [..., kv_head, q_heads_per_group, position, head_size], `k` and `v` [..., kv_head, key_position, head_size]. A
    checkpoint policy that keeps `ATTENTION_OUTPUT` keeps the result and its log-sum-exp."""
    shared = tuple(axis for axis in k.axes if axis.name not in ("kv_head", "key_position", "head_size"))
    named = (*shared, *(q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "position", "head_size")))
    queries = flatten_group(q.rearrange(named), shared, "batch").array
    keys, values = (
        flatten_group(each.rearrange((*shared, "kv_head", "key_position", "head_size")), shared, "batch").array
        for each in (k, v)
    )
    out = cast(jax.Array, _attention(blocks, queries, keys, values))
    return hax.named(out.reshape([axis.size for axis in named]), named)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(blocks: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention: q [batch, kv_head, group, query, head_size], k and v [batch, kv_head, key, head_size]."""
    return _forward(blocks, q, k, v)[0]


def _forward(blocks: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result, and the log-sum-exp of each query's scores, float32 [batch, kv_head, group, query, 1]."""
    outs, sums = [], []
    for begin, end in _ranges(blocks, q.shape[3]):
        rows = _rows(q[:, :, :, begin:end])
        scores = _scores(_scaled(rows), k[:, :, :end], begin, end)
        largest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        out = _product(weights.astype(v.dtype), v[:, :, :end], 3, 2) / total
        outs.append(_by_group(out.astype(q.dtype), q.shape[2]))
        sums.append(_by_group(largest + jnp.log(total), q.shape[2]))
    return jnp.concatenate(outs, 3), jnp.concatenate(sums, 3)


def _forward_rule(blocks: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any]:
    # Named here: a name on the result alone would keep the result, yet compute the log-sum-exp again.
    out, log_sum = tree_checkpoint_name(_forward(blocks, q, k, v), ATTENTION_OUTPUT)
    return out, (q, k, v, out, log_sum)


def _backward_rule(blocks: int, kept: Any, d_out: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, out, log_sum = kept
    # For each query, the sum over keys of the weights times their gradients.
    means = (d_out.astype(jnp.float32) * out).sum(-1, keepdims=True)
    d_queries, d_k, d_v = [], jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for begin, end in _ranges(blocks, q.shape[3]):
        rows, d_rows, log_sums, of_rows = (_rows(each[:, :, :, begin:end]) for each in (q, d_out, log_sum, means))
        rows = _scaled(rows)
        weights = jnp.exp(_scores(rows, k[:, :, :end], begin, end) - log_sums)
        d_scores = (weights * (_product(d_rows, v[:, :, :end], 3, 3) - of_rows)).astype(q.dtype)
        d_queries.append(_by_group(_scaled(_product(d_scores, k[:, :, :end], 3, 2)), q.shape[2]))
        # As [head_size, key], transposed at the end: as [key, head_size] each would copy all scores into that order.
        d_k = d_k.at[:, :, :end].add(_product(rows, d_scores, 2, 2).mT)
        d_v = d_v.at[:, :, :end].add(_product(d_rows, weights.astype(v.dtype), 2, 2).mT)
    return jnp.concatenate(d_queries, 3).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype)


_attention.defvjp(_forward_rule, _backward_rule)


def _ranges(blocks: int, positions: int) -> list[tuple[int, int]]:
    size = -(-positions // blocks)
    return [(begin, min(begin + size, positions)) for begin in range(0, positions, size)]


def _rows(x: jax.Array) -> jax.Array:
    """[batch, kv_head, group, query, ...] with group and query as one axis."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _by_group(x: jax.Array, groups: int) -> jax.Array:
    return x.reshape(*x.shape[:2], groups, -1, x.shape[-1])


def _scaled(x: jax.Array) -> jax.Array:
    return x * (1 / math.sqrt(x.shape[-1]))


def _scores(rows: jax.Array, k: jax.Array, begin: int, end: int) -> jax.Array:
    """Scores [batch, kv_head, group x query, key] of the queries from `begin` to `end`."""
    above = jnp.where(jnp.arange(begin, end)[:, None] < jnp.arange(end), MASKED, 0.0)
    groups = rows.shape[2] // (end - begin)
    return _product(rows, k, 3, 3) + jnp.tile(above, (groups, 1))


def _product(one: jax.Array, other: jax.Array, axis: int, other_axis: int) -> jax.Array:
    """Product over one axis of each array, for every sequence and head; float32."""
    dimensions = (((axis,), (other_axis,)), ((0, 1), (0, 1)))
    return jax.lax.dot_general(one, other, dimensions, preferred_element_type=jnp.float32)


def is_causal_alone(mask: AttentionMask) -> bool:
    """Whether a mask is causal, with no more than a sliding window besides."""
    others = (mask.explicit_mask, mask.causal_offset, mask.bidirectional_window, mask.segment_ids)
    return mask.is_causal and all(other is None for other in others)


def flash_attention(
    q: NamedArray, k: NamedArray, v: NamedArray, mask: AttentionMask, block_size: int | None = None
) -> NamedArray:
    """Causal attention by Levanter's blockwise algorithm, with residuals that a checkpoint policy can keep by name;
    shapes as in `splash_attention`. A sliding window masks, but saves no work."""
    Pos, KeyPos, HeadSize = q.resolve_axis("position"), k.resolve_axis("key_position"), q.resolve_axis("head_size")
    block = flash_block(Pos.size, block_size)
    scaled = q * (1 / math.sqrt(HeadSize.size))
    how = {"inference": True, "key": None, "block_size": block, "precision": None, "logits_soft_cap": None}
    return _blockwise((scaled, k, v, None), Pos, KeyPos, HeadSize, mask, None, 0.0, **how)


def flash_block(seq_len: int, block_size: int | None) -> int:
    """Positions per block of `flash_attention`; None: the largest divisor of the sequence length up to 1,024."""
    from tomat.hardware.executed import MAX_FLASH_BLOCK

    if block_size is not None:
        if block_size < 1 or seq_len % block_size:
            said = f"model.flash_attention_block_size is {block_size} and the sequence length is {seq_len}"
            raise TomatError(f"{said}; expected a block that divides the sequence.")
        return block_size
    block = largest_divisor(seq_len, MAX_FLASH_BLOCK)
    if block < min(seq_len, LANES):
        said = f"the sequence length is {seq_len}, whose largest divisor up to {MAX_FLASH_BLOCK} is {block}"
        raise TomatError(f"{said}; jax_flash expects {LANES} or more. Choose another length, or attn_backend vanilla.")
    return block


def _blockwise_forward(*args, **kwargs):
    from tomat.base.ports.levanter import flash_attention_forward

    # Named inside the forward rule: a name on the result alone would keep the output, yet recompute the log-sum-exp,
    # and with it all of attention.
    out, (_, logsumexp) = flash_attention_forward(*args, **kwargs)
    out, logsumexp = tree_checkpoint_name((out, logsumexp), ATTENTION_OUTPUT)
    return out, (out, logsumexp)


def _blockwise_backward(*args, **kwargs):
    from tomat.base.ports.levanter import flash_attention_backward

    return flash_attention_backward(*args, **kwargs)


@eqx.filter_custom_vjp
def _blockwise(qkv, *args, **kwargs):
    from tomat.base.ports.levanter import flash_attention_forward

    return cast(NamedArray, flash_attention_forward(None, qkv, *args, **kwargs)[0])


_blockwise.def_fwd(_blockwise_forward)
_blockwise.def_bwd(_blockwise_backward)
