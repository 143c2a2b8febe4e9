"""From hidden states to per-voxel figures in JAX: a softmax over density bins, its median, mean and mode.

Shapes: B sequence, T position, E embedding, V voxel of a patch, K density bin, C voxels of one block. Logits exist for
one block of C voxels at a time, as float32 [B, C, K]: 8 x 6,859 voxels x 16,384 bins at once would be 3.6 GB.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tomat.predict.inference.choice import quantile_bin


class DecodedVoxels[A](NamedTuple):
    """What a predicted distribution over bins says of each voxel; all of one shape, JAX's or NumPy's."""

    median_bin: A
    """int32: the smallest bin with a cumulative probability of at least 1/2, which minimises the expected error."""
    mode_bin: A
    """int32: the most probable bin."""
    mean_e_per_a3: A
    """float32: expectation over the codec's means."""
    emd_e_per_a3: A
    """float32: `E_{v~p} |v - rho_ref|` over the codec's medians, against the unquantised reference."""
    cross_entropy_nats: A
    """float32: -log p of the true bin."""


def decode_logits(
    logits: Array, reference: Array, true_bins: Array, medians: Array, means: Array
) -> DecodedVoxels[Array]:
    """Decode logits over the density bins.

    Args:
        logits: float32 [..., K].
        reference: float32 [...], e/A^3, the unquantised density.
        true_bins: int32 [...].
        medians, means: float32 [K], e/A^3, the codec's tables; medians increase with the bin.
    """
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)
    distance = jnp.abs(medians - reference[..., None])
    true_logit = jnp.take_along_axis(logits, true_bins[..., None], axis=-1)[..., 0]
    return DecodedVoxels(
        median_bin=quantile_bin(weights, 0.5),
        mode_bin=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        mean_e_per_a3=jnp.sum(weights * means, axis=-1) / total,
        emd_e_per_a3=jnp.sum(weights * distance, axis=-1) / total,
        cross_entropy_nats=jnp.log(total) + logits.max(axis=-1) - true_logit,
    )


def decode_hidden(
    hidden: Array,
    head: Array,
    density_start: Array,
    reference: Array,
    true_bins: Array,
    medians: Array,
    means: Array,
    *,
    block_voxels: int,
) -> DecodedVoxels[Array]:
    """Decode every voxel of a batch of patches, `block_voxels` voxels of each patch at a time.

    The hidden state at position t predicts token t + 1, so voxel v is read at `density_start - 1 + v`. A voxel beyond
    the last position gets some figure, which the caller must not count.

    Args:
        hidden: float [B, T, E], of the causal model.
        head: float [K, E], the rows of the language-model head that belong to density ids.
        density_start: int32 [B], position of each sequence's first density token.
        reference: float32 [B, V], e/A^3.
        true_bins: int32 [B, V].
        medians, means: float32 [K], e/A^3.

    Returns:
        Arrays [B, V].
    """
    n_voxels = reference.shape[1]
    block = min(block_voxels, n_voxels)
    n_blocks = -(-n_voxels // block)

    def in_blocks(array: Array) -> Array:
        padded = jnp.pad(array, ((0, 0), (0, n_blocks * block - n_voxels)))
        return padded.reshape(array.shape[0], n_blocks, block).swapaxes(0, 1)

    def decode_block(inputs: tuple[Array, Array, Array]) -> DecodedVoxels[Array]:
        voxels, block_reference, block_bins = inputs
        positions = jnp.minimum(density_start[:, None] - 1 + voxels[None, :], hidden.shape[1] - 1)
        at_voxels = jnp.take_along_axis(hidden, positions[:, :, None], axis=1)
        logits = jnp.einsum("bce,ke->bck", at_voxels, head, preferred_element_type=jnp.float32)
        return decode_logits(logits, block_reference, block_bins, medians, means)

    voxels = jnp.arange(n_blocks * block, dtype=jnp.int32).reshape(n_blocks, block)
    decoded = jax.lax.map(decode_block, (voxels, in_blocks(reference), in_blocks(true_bins)))
    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(a.shape[1], -1)[:, :n_voxels], decoded)
