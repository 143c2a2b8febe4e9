"""Levanter's blockwise attention in plain JAX, with residuals that a checkpoint policy can keep by name."""

import math
from typing import cast

import equinox as eqx
from haliax import NamedArray
from haliax.jax_utils import tree_checkpoint_name
from levanter.layers.attention import AttentionMask

from tomat.base.errors import TomatError
from tomat.base.ports.levanter import flash_attention_backward, flash_attention_forward
from tomat.hardware.executed import MAX_FLASH_BLOCK
from tomat.model.splash import ATTENTION_OUTPUT, LANES, largest_divisor


def flash_attention(
    q: NamedArray, k: NamedArray, v: NamedArray, mask: AttentionMask, block_size: int | None = None
) -> NamedArray:
    """Causal attention by Levanter's blockwise algorithm, with residuals that a checkpoint policy can keep by name.

    Shapes as in `splash_attention`. A sliding window masks, but saves no work: every block up to the diagonal is
    computed.

    Args:
        block_size: Positions per block; None: the largest divisor of the sequence length up to 1,024.
    """
    Pos, KeyPos, HeadSize = q.resolve_axis("position"), k.resolve_axis("key_position"), q.resolve_axis("head_size")
    block = flash_block(Pos.size, block_size)
    scaled = q * (1 / math.sqrt(HeadSize.size))
    return _blockwise(
        (scaled, k, v, None),
        Pos,
        KeyPos,
        HeadSize,
        mask,
        None,
        0.0,
        inference=True,
        key=None,
        block_size=block,
        precision=None,
        logits_soft_cap=None,
    )


def flash_block(seq_len: int, block_size: int | None) -> int:
    """Positions per block of `flash_attention`; raises TomatError as that says."""
    if block_size is not None:
        if block_size < 1 or seq_len % block_size:
            raise TomatError(
                f"model.flash_attention_block_size is {block_size} and the sequence length is {seq_len}; expected a "
                "block that divides the sequence."
            )
        return block_size
    block = largest_divisor(seq_len, MAX_FLASH_BLOCK)
    if block < min(seq_len, LANES):
        raise TomatError(
            f"the sequence length is {seq_len}, whose largest divisor up to {MAX_FLASH_BLOCK} is {block}; jax_flash "
            f"expects one of at least {LANES}. Choose another length, or attn_backend vanilla."
        )
    return block


def _blockwise_forward(*args, **kwargs):
    # Named inside the forward rule: a name on the result alone would keep the output, yet recompute the log-sum-exp,
    # and with it all of attention.
    out, (_, logsumexp) = flash_attention_forward(*args, **kwargs)
    out, logsumexp = tree_checkpoint_name((out, logsumexp), ATTENTION_OUTPUT)
    return out, (out, logsumexp)


@eqx.filter_custom_vjp
def _blockwise(qkv, *args, **kwargs):
    return cast(NamedArray, flash_attention_forward(None, qkv, *args, **kwargs)[0])


_blockwise.def_fwd(_blockwise_forward)
_blockwise.def_bwd(flash_attention_backward)
