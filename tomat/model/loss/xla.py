"""The loss over blocks of positions: values and gradients without the logits of all positions at once.

The forward pass of a differentiated call already computes both gradients, block by block, while the block's logits
exist (the idea of Liger Kernel, arXiv 2410.10989); the backward pass only scales them. So the logits are computed
once, and no more than one block of them is ever alive.

Shapes: B batch, P positions, Q positions of a block, E embedding, R rows of the head in use, K density bins (a
contiguous part of the R rows). Everything is float32 except `hidden` and `head`, which keep the compute type.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tomat.model.loss.interface import (
    BinTables,
    BlockSpec,
    LossInputs,
    LossSums,
    PositionTerms,
    PositionWeights,
    weighted_sums,
)


class _Softmax(NamedTuple):
    """Softmax over the last axis, in parts, so that sums over it need one pass over the logits.

    Normalised by its sum, not as exp(logits - log-normaliser): rounding the log-normaliser changes all of p by a common
    factor, which differences in the gradients, such as p (distance - EMD), show when p is nearly one bin (measured at a
    logit spread of 5: errors up to 1.6e-5 of the largest gradient, against 0.5e-5).
    """

    largest: jax.Array
    """Largest logit `[B, Q, 1]`."""
    unnormalised: jax.Array
    """exp(logits - largest)."""
    total: jax.Array

    @classmethod
    def of(cls, logits: jax.Array) -> "_Softmax":
        largest = jnp.max(logits, axis=-1, keepdims=True)
        unnormalised = jnp.exp(logits - largest)
        return cls(largest, unnormalised, _sum(unnormalised))

    @property
    def p(self) -> jax.Array:
        return self.unnormalised / self.total

    @property
    def log_normaliser(self) -> jax.Array:
        return self.largest + jnp.log(self.total)

    def mean(self, values: jax.Array) -> jax.Array:
        """Expectation of `values` `[B, Q, K]` under p, `[B, Q, 1]`."""
        return _sum(self.unnormalised * values) / self.total


def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _density_terms(
    spec: BlockSpec, tables: BinTables, logits: jax.Array, target: jax.Array, scale: jax.Array | None
) -> tuple[PositionTerms, jax.Array]:
    """Terms `[B, Q]` of density positions, over the density bins alone, and the gradient of the loss by the logits `[B,
    Q, K]`; `target` is the bin of each, int32 `[B, Q, 1]`, and `scale`, for a relative codec, `[B, Q, 1]`.

    All sums over the bins depend on nothing but the largest logit, so XLA fuses them into one pass over the logits;
    masked sums stand for gathers, which would need a pass of their own.
    """
    config = spec.config
    softmax = _Softmax.of(logits)
    p, log_normaliser = softmax.p, softmax.log_normaliser
    bins = lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    hit = bins == target
    target_logit = _sum(jnp.where(hit, logits, 0.0))
    cross_entropy = log_normaliser - target_logit
    # Of n equally likely best bins the target is chosen with probability 1 / n.
    n_best = _sum((logits == softmax.largest).astype(jnp.float32))
    top1 = (target_logit == softmax.largest) / n_best

    if spec.has_values:
        rho = tables.values[target]
        offset = tables.values - rho
        if scale is not None:
            rho, offset = scale * rho - spec.offset_e_per_a3, scale * offset
        distance = jnp.abs(offset)
        emd = softmax.mean(distance)
    else:
        rho = offset = distance = emd = jnp.zeros_like(cross_entropy)

    if config.kind == "cross_entropy":
        loss, gradient = cross_entropy, p - hit
    elif config.kind == "soft_cross_entropy":
        if config.target_space == "bin":
            steps = (bins - target).astype(jnp.float32) / config.target_sigma
            q = jnp.exp(-0.5 * steps * steps)
        else:
            steps = offset / config.target_sigma
            q = tables.widths * jnp.exp(-0.5 * steps * steps)
        q_total = _sum(q)
        loss, gradient = log_normaliser - _sum(q * logits) / q_total, p - q / q_total
    elif config.kind == "ce_emd":
        loss = cross_entropy + config.emd_weight * emd
        gradient = p - hit + config.emd_weight * p * (distance - emd)
    elif config.kind == "emd":
        loss, gradient = emd, p * (distance - emd)
    elif config.kind == "l1_mean":
        # sum p (v - r) instead of (sum p v) - r: no cancellation when the prediction is nearly right.
        error = softmax.mean(offset)
        loss, gradient = jnp.abs(error), jnp.sign(error) * p * (offset - error)
    else:  # crps
        gaps = tables.values[1:] - tables.values[:-1]
        if scale is not None:
            gaps = scale * gaps
        excess = jnp.cumsum(p, axis=-1)[..., :-1] - (bins[..., :-1] >= target)
        loss = _sum(excess * excess * gaps)
        # dF_k / dp_j = [k >= j], so the derivative by p_j sums over the k from j on; the last F is 1 whatever p is.
        by_cumulative = jnp.pad(2.0 * excess * gaps, ((0, 0), (0, 0), (0, 1)))
        by_p = lax.cumsum(by_cumulative, axis=2, reverse=True)
        gradient = p * (by_p - _sum(p * by_p))

    if config.z_loss_weight > 0 and config.vocabulary == "density":
        loss = loss + config.z_loss_weight * log_normaliser**2
        gradient = gradient + 2.0 * config.z_loss_weight * log_normaliser * p

    loss, cross_entropy, emd, top1, rho = (x[..., 0] for x in (loss, cross_entropy, emd, top1, rho))
    return PositionTerms(loss, cross_entropy, emd, top1, rho, jnp.zeros_like(loss)), gradient


def _block_terms(
    spec: BlockSpec,
    tables: BinTables,
    logits: jax.Array,
    rows: jax.Array,
    weights: PositionWeights,
    scale: jax.Array | None,
) -> tuple[LossSums, jax.Array]:
    """Sums of one block, and the gradient of its loss by all its logits `[B, Q, R]`; `rows` and `scale` as in
    `LossInputs`."""
    config, n_rows, last = spec.config, logits.shape[-1], spec.first_bin + spec.n_bins
    target = jnp.clip(rows - spec.first_bin, 0, spec.n_bins - 1)[..., None]
    density_logits = lax.slice_in_dim(logits, spec.first_bin, last, axis=2)
    scale = None if scale is None else scale[..., None]
    terms, by_density = _density_terms(spec, tables, density_logits, target, scale)
    gradient = weights.density[..., None] * by_density
    other_z_loss = jnp.zeros_like(terms.loss)

    if config.vocabulary == "full" or config.preamble_weight > 0:
        everything = _Softmax.of(logits)
        log_normaliser = everything.log_normaliser
        z_loss, softmax_share = jnp.zeros_like(terms.loss), 1.0
        if config.z_loss_weight > 0:
            z_loss = config.z_loss_weight * log_normaliser[..., 0] ** 2
            # The gradient of z^2 is 2 z times the softmax.
            softmax_share = 1.0 + 2.0 * config.z_loss_weight * log_normaliser[..., 0]
        pad = ((0, 0), (0, 0), (spec.first_bin, n_rows - last))
        row_weight = jnp.zeros_like(weights.other)
        if config.vocabulary == "full":
            density = _Softmax.of(density_logits)
            # -log(probability of any density token): the chain rule of -log p_t.
            not_density = (log_normaliser - density.log_normaliser)[..., 0]
            terms = terms._replace(
                loss=terms.loss + not_density + z_loss, cross_entropy=terms.cross_entropy + not_density
            )
            gradient = gradient - weights.density[..., None] * density.p
            row_weight = row_weight + weights.density * softmax_share
        gradient = jnp.pad(gradient, pad)
        if config.preamble_weight > 0:
            hit = lax.broadcasted_iota(jnp.int32, logits.shape, 2) == rows[..., None]
            own = (log_normaliser - _sum(jnp.where(hit, logits, 0.0)))[..., 0]
            terms = terms._replace(other_cross_entropy=own)
            gradient = gradient - weights.other[..., None] * hit
            row_weight = row_weight + weights.other * softmax_share
            other_z_loss = z_loss
        gradient = gradient + row_weight[..., None] * everything.p

    sums = weighted_sums(weights, terms)
    return sums._replace(loss=sums.loss + jnp.sum(weights.other * other_z_loss)), gradient


def xla_loss_sums(spec: BlockSpec, differentiate: bool, inputs: LossInputs) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """The sums of all positions on this device, and with `differentiate` the gradients of `sums.loss`: by `hidden`, in
    its type, and by `head`, in float32, because the terms of all blocks are added there."""
    hidden, head, rows, weights, tables, scale = inputs
    positions = hidden.shape[1]
    block = min(spec.config.block_positions, positions)
    n_blocks = -(-positions // block)
    ragged = n_blocks * block != positions
    dtype = jnp.result_type(hidden, head)
    head = head.astype(dtype)

    def step(carry: tuple[LossSums, tuple[jax.Array, ...]], index: jax.Array):
        sums, gradients = carry
        # The last block ends with the sequence; what it shares with the block before has weight 0 in it.
        start = jnp.minimum(index * block, positions - block)

        def cut(x: jax.Array) -> jax.Array:
            return lax.dynamic_slice_in_dim(x, start, block, axis=1)

        h, block_weights = cut(hidden).astype(dtype), PositionWeights(*(cut(w) for w in weights))
        fresh = start + jnp.arange(block) >= index * block
        if ragged:
            block_weights = PositionWeights(*(w * fresh for w in block_weights))
        logits = jnp.einsum("bqe,re->bqr", h, head, preferred_element_type=jnp.float32)
        block_sums, by_logits = _block_terms(
            spec, tables, logits, cut(rows), block_weights, None if scale is None else cut(scale)
        )
        sums = LossSums(*(a + b for a, b in zip(sums, block_sums, strict=True)))
        if differentiate:
            sum_hidden, sum_head = gradients
            # The matmuls of the backward pass run in the compute type, as those of the forward pass do.
            by_logits = by_logits.astype(dtype)
            by_hidden = jnp.einsum("bqr,re->bqe", by_logits, head, preferred_element_type=jnp.float32)
            by_hidden = by_hidden.astype(hidden.dtype)
            if ragged:
                by_hidden = jnp.where(fresh[:, None], by_hidden, cut(sum_hidden))
            gradients = (
                lax.dynamic_update_slice_in_dim(sum_hidden, by_hidden, start, axis=1),
                sum_head + jnp.einsum("bqr,bqe->re", by_logits, h, preferred_element_type=jnp.float32),
            )
        return (sums, gradients), None

    zero = jnp.zeros((), jnp.float32)
    none_yet = (jnp.zeros_like(hidden), jnp.zeros(head.shape, jnp.float32)) if differentiate else ()
    (sums, gradients), _ = lax.scan(step, (LossSums(*(zero,) * len(LossSums._fields)), none_yet), jnp.arange(n_blocks))
    return sums, gradients
