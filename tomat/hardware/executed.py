"""FLOPs that the matrix units execute in a training step. `flops.py` counts the model's work, this the program's.

Attention kernels multiply whole tiles, and in the backward pass compute the scores again. Gradient checkpointing
computes layers again: a layer that keeps only its input runs forward once more, except for its last matrix
multiplication, whose result the backward pass does not need and XLA leaves out (measured: 38 instead of 30 matrix
multiplications for two scanned layers of nine, 47 with nested checkpointing). The products of an optimizer (Muon's) and
of a decoder's `model.environment` or `model.field` are not counted.

These FLOPs over the peak are the hardware FLOPs utilisation, HFU (Chowdhery et al. 2022, arXiv:2204.02311, section
4.1).
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

from tomat.base.errors import TomatError
from tomat.hardware.flops import TRAINING_PASSES, ModelShape, Products

Backend = Literal["vanilla", "query_blocks", "jax_flash", "splash", "cudnn"]

QKV_NAME = "qkv"
ATTENTION_NAME = "attention_output"
OUTPUT_NAME = "attention_projection"
MLP_NAME = "mlp_projections"
"""Checkpoint names of tomat's decoder (`tomat/model/decoder.py`): queries, keys and values; what attention yields;
what its output projection gives; what the MLP's input projections give."""

CUDNN_BLOCK = 128
"""Tile of cuDNN's attention. cuDNN states none; this is FlashAttention-3's (arXiv:2407.08608) for heads of 128."""
DEFAULT_SPLASH_BLOCK = 512
"""Tile of Levanter's splash call where its configuration names none."""
COMPUTE_BYTES = 2
"""Bytes of a number in queries and keys: bfloat16, which TPUs train in."""
MAX_FLASH_BLOCK = 1024
"""Largest block of Levanter's blockwise attention where its configuration names none."""


@dataclass(frozen=True)
class KernelPass:
    n_matmuls: int
    """Matrix multiplications for each query-key pair, of the head size each."""
    block_q: int
    block_kv: int

    def pairs(self, seq_len: int, sliding_window: int | None) -> int:
        """Query-key pairs of one head that lie in a tile with at least one visible pair."""
        window = seq_len if sliding_window is None else min(sliding_window, seq_len)
        total = 0
        for first_query in range(0, seq_len, self.block_q):
            last_query = min(first_query + self.block_q, seq_len) - 1
            first_key = max(0, first_query - window + 1)
            tiles = last_query // self.block_kv - first_key // self.block_kv + 1
            total += tiles * self.block_q * self.block_kv
        return total


@dataclass(frozen=True)
class AttentionKernels:
    backend: Backend
    forward: KernelPass
    backward: tuple[KernelPass, ...]

    def flops(self, shape: ModelShape, seq_len: int, *passes: KernelPass) -> float:
        """FLOPs of some passes of this attention over one sequence, in all layers."""
        positions, heads = shape.heads_in_one * seq_len, shape.num_heads // shape.heads_in_one
        total = 0.0
        for layers, window in shape.windows:
            # These two leave out the tiles outside a sliding window; other backends mask them after multiplying them.
            seen = window if self.backend in ("splash", "cudnn") else None
            per_head = sum(2 * shape.head_dim * step.n_matmuls * step.pairs(positions, seen) for step in passes)
            total += layers * heads * per_head
        return total


def attention_kernels(model_config: Any, seq_len: int, platform: str) -> AttentionKernels:
    """The kernels that a model configuration selects on a platform.

    vanilla: the whole score matrix; 2 multiplications forward (scores, values), 4 backward. vanilla with
    `query_blocks`, and jax_flash: square blocks up to the diagonal, a ragged last one counted whole; 5 backward, since
    the scores are computed again (in unrolled layers without checkpointing XLA keeps the scores of `query_blocks`, and
    this counts one too many). cudnn: the same in tiles of 128. splash: tiles of the configuration's sizes that the mask
    touches; a fused backward pass has 5, a separate one 4 for keys and values (scores, dP, dV, dK) and 3 for queries
    (scores, dP, dQ). splash with `whole_head`: as with a fused backward pass, but the triangle in parts of a block.
    Paired heads: kernels over twice the positions. `platform` (`tpu`, `gpu`, `cpu`) decides if no backend is named.
    """
    seq_len *= 2 if getattr(model_config, "paired_heads", False) else 1
    named = getattr(model_config, "attn_backend", None)
    backend = "default" if named is None else str(getattr(named, "value", named)).lower()
    if backend == "default":
        # tomat's decoder on a GPU: cuDNN's, where it has it.
        fused = platform == "gpu" and hasattr(model_config, "whole_head")
        backend = "splash" if platform == "tpu" else "cudnn" if fused else "jax_flash"
    if backend == "vanilla":
        blocks = getattr(model_config, "query_blocks", 1)
        if blocks <= 1:
            return AttentionKernels("vanilla", KernelPass(2, seq_len, seq_len), (KernelPass(4, seq_len, seq_len),))
        backend, size = "query_blocks", math.ceil(seq_len / blocks)
    elif backend == "jax_flash":
        size = getattr(model_config, "flash_attention_block_size", None) or _largest_divisor(seq_len, MAX_FLASH_BLOCK)
    elif backend == "cudnn":
        size = CUDNN_BLOCK
    elif backend != "splash":
        known = "vanilla, jax_flash, splash or cudnn"
        raise TomatError(f"FLOPs of attention by '{backend}' are not known; expected {known}.")
    if backend != "splash":
        return AttentionKernels(backend, KernelPass(2, size, size), (KernelPass(5, size, size),))
    if getattr(model_config, "whole_head", None) is not None:
        # Each part of a block's queries ends at its own last position, each part of its keys begins at its first one.
        _, rows, _, keys = model_config.whole_head.sizes(seq_len, model_config.actual_head_size)
        forward, backward = KernelPass(2, rows, rows), KernelPass(5, keys, keys)
        return AttentionKernels("splash", forward, (backward,))
    if hasattr(model_config, "splash"):
        b = model_config.splash.for_sequence(seq_len)
        forward = KernelPass(2, b.block_q, b.block_kv)
        dkv, dq, fused = (b.block_q_dkv, b.block_kv_dkv), (b.block_q_dq, b.block_kv_dq), b.use_fused_bwd
    else:
        limit = getattr(model_config, "flash_attention_block_size", None) or DEFAULT_SPLASH_BLOCK
        size = _largest_divisor(seq_len, limit)
        forward, dkv, dq, fused = KernelPass(2, size, size), (size, size), (size, size), False
    backward = (KernelPass(5, *dkv),) if fused else (KernelPass(4, *dkv), KernelPass(3, *dq))
    return AttentionKernels("splash", forward, backward)


def _largest_divisor(n: int, limit: int) -> int:
    return next(size for size in range(min(n, limit), 0, -1) if n % size == 0)


@dataclass(frozen=True)
class Recomputation:
    """Forward passes that the backward pass repeats, for each part of a layer, as a mean over the layers."""

    qkv: float = 0.0
    attention: float = 0.0
    output: float = 0.0
    mlp_in: float = 0.0
    mlp_out: float = 0.0
    first_values: float = 0.0
    """Passes over the first layer's values beside that layer's own ones (`model.value_mix`), forward or backward."""

    @classmethod
    def from_config(cls, model_config: Any, shape: ModelShape, backend: Backend) -> "Recomputation":
        """What the configuration's gradient checkpointing computes again. `backend`: of attention; the vanilla backend
        needs its scores again even if its output was kept."""
        policy = getattr(model_config, "checkpoint_policy", None)
        if policy is None:
            policy = getattr(model_config, "gradient_checkpointing", True)
            if not getattr(model_config, "scan_layers", True) or 0 < shape.full_attention_layers < shape.num_layers:
                # Layers that differ are not scanned, and Haliax's BlockSeq stores the policy and does not apply it.
                policy = False
        first_values = 0.0
        if getattr(model_config, "value_mix", 0.0):
            # In unrolled layers XLA computes the forward product once (measured).
            first_values = TRAINING_PASSES - (0.0 if getattr(model_config, "scan_layers", True) else 1.0)
        kept: tuple[str, ...] = ()
        nested = False
        if policy is False or policy == "save_all":
            return cls(first_values=first_values)
        if isinstance(policy, str):
            if policy not in ("full", "recompute", "offload", "nested"):
                raise TomatError(f"gradient checkpointing policy '{policy}' is not known; FLOPs cannot be counted.")
            nested = policy == "nested"
        elif policy is not True:
            if policy.disable or policy.save_block_internals is True:
                return cls(first_values=first_values)
            nested = bool(policy.nested)
            if not policy.simple:
                kept = (*(policy.save_block_internals or ()), *policy.offload_block_internals)
        # Nested checkpointing runs the layers of a group once more, whole, before it runs each again for its gradient.
        whole = 1.0 if nested else 0.0
        mlp_in = 0.0 if MLP_NAME in kept else 1.0
        mlp_in -= getattr(model_config, "save_mlp_layers", 0) / shape.num_layers
        # If the backward pass computes its scores again, XLA finds those of the repeated forward pass equal (measured).
        qkv, attention = 1.0, 0.5 if backend == "query_blocks" else 1.0
        if QKV_NAME in kept:
            # The kept queries and keys are those after their norm, whose gradient needs those before it.
            heads, kv_heads = shape.num_heads, shape.num_kv_heads
            qkv = (heads + kv_heads) / (heads + 2 * kv_heads) if getattr(model_config, "use_qk_norm", False) else 0.0
        if ATTENTION_NAME in kept:
            attention = 0.5 if backend == "vanilla" else 0.0
        return cls(
            qkv=whole + qkv,
            attention=whole + attention,
            output=whole + (0.0 if OUTPUT_NAME in kept else 1.0),
            mlp_in=whole + mlp_in,
            # Needed again only by a norm that follows it.
            mlp_out=whole + (1.0 if shape.hybrid_norm else 0.0),
            first_values=first_values,
        )


def executed_head_flops(
    shape: ModelShape,
    seq_len: int,
    rows: int,
    block_positions: int | None,
    kernel: Literal["xla", "pallas", "levanter"] = "xla",
) -> float:
    """FLOPs of tomat's loss over one sequence: logits at every position, padding included, and their gradients.
    `block_positions`: positions in a block of the `xla` kernel, whose ragged last block is rounded up; None: all in
    one. `pallas` and `levanter` compute the logits twice; the padding of ids to whole tiles (2 % of 18,570 ids at 512)
    or blocks (32 %) is not counted."""
    positions, passes = seq_len, TRAINING_PASSES + 1
    if kernel == "xla":
        block = seq_len if block_positions is None else min(block_positions, seq_len)
        positions, passes = math.ceil(seq_len / block) * block, TRAINING_PASSES
    return passes * 2 * positions * shape.hidden_dim * rows


def executed_training_products(
    shape: ModelShape, seq_len: int, kernels: AttentionKernels, recomputation: Recomputation, head_flops: float
) -> Products:
    """FLOPs that the matrix units execute in a training step over one sequence, by what is multiplied; padding is
    included. `head_flops`: FLOPs of the loss (`executed_head_flops`)."""
    again = (
        recomputation.qkv * shape.qkv_weights
        + recomputation.output * shape.output_weights
        + recomputation.mlp_in * shape.mlp_in_weights
        + recomputation.mlp_out * shape.mlp_out_weights
    )
    # The first layer's values have both gradients wherever they are computed again.
    values = shape.hidden_dim * shape.head_dim * shape.num_kv_heads
    gradients = min(recomputation.first_values, TRAINING_PASSES - 1) / (TRAINING_PASSES - 1) * values
    first = max(0.0, recomputation.first_values - (TRAINING_PASSES - 1)) * values
    once = shape.num_layers * shape.layer_matmul_weights
    forward = kernels.flops(shape, seq_len, kernels.forward)
    return Products(
        projections=2 * seq_len * (once + shape.num_layers * again + first),
        input_gradients=2 * seq_len * (once + gradients),
        weight_gradients=2 * seq_len * (once + gradients),
        attention=(1 + recomputation.attention) * forward + kernels.flops(shape, seq_len, *kernels.backward),
        head=head_flops,
    )
