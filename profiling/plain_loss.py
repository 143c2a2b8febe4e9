"""The training loss, written directly from its formulas, as a reference for the loss used in training."""

import jax
import jax.numpy as jnp
from haliax import NamedArray

from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import loss_metrics, prepared
from tomat.model.loss.interface import DensityTarget, PositionTerms, weighted_sums


def plain_loss(
    hidden: jax.Array | NamedArray,
    head: jax.Array | NamedArray,
    tokens: jax.Array | NamedArray,
    *,
    config: LossConfig,
    target: DensityTarget,
    scale: jax.Array | NamedArray | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`density_loss` as the formulas in `LossConfig`, differentiated by JAX.
    It needs memory for several float32 arrays `[batch, position, ids]`."""
    spec, x, constant_metrics = prepared(hidden, head, tokens, config, target, None, scale)
    v, t = x.tables.values, jnp.clip(x.rows - spec.first_bin, 0, spec.n_bins - 1)
    if x.scale is not None:
        v = x.scale[..., None] * v - spec.offset_e_per_a3
        r = jnp.take_along_axis(v, t[..., None], axis=-1)
    else:
        r = v[t][..., None]
    logits = jnp.einsum("bpe,re->bpr", x.hidden, x.head, preferred_element_type=jnp.float32)
    density_logits = logits[..., spec.first_bin : spec.first_bin + spec.n_bins]
    log_p = jax.nn.log_softmax(density_logits)
    p = jnp.exp(log_p)
    bins = jnp.arange(spec.n_bins)
    cross_entropy = -jnp.take_along_axis(log_p, t[..., None], axis=-1)[..., 0]
    emd = jnp.sum(p * jnp.abs(v - r), axis=-1)
    best = density_logits == jnp.max(density_logits, axis=-1, keepdims=True)
    top1 = jnp.take_along_axis(best, t[..., None], axis=-1)[..., 0] / jnp.sum(best, axis=-1)

    if config.kind == "cross_entropy":
        loss = cross_entropy
    elif config.kind == "soft_cross_entropy":
        if config.target_space == "bin":
            q = jnp.exp(-(((bins - t[..., None]) / config.target_sigma) ** 2) / 2)
        else:
            q = x.tables.widths * jnp.exp(-(((v - r) / config.target_sigma) ** 2) / 2)
        q = q / jnp.sum(q, axis=-1, keepdims=True)
        loss = -jnp.sum(q * log_p, axis=-1)
    elif config.kind == "ce_emd":
        loss = cross_entropy + config.emd_weight * emd
    elif config.kind == "emd":
        loss = emd
    elif config.kind == "l1_mean":
        loss = jnp.abs(jnp.sum(p * (v - r), axis=-1))
    else:  # crps
        step = (bins >= t[..., None]).astype(jnp.float32)
        loss = jnp.sum((jnp.cumsum(p, axis=-1) - step)[..., :-1] ** 2 * jnp.diff(v), axis=-1)

    other_cross_entropy = other_z_loss = jnp.zeros_like(loss)
    if config.vocabulary == "full":
        not_density = jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(density_logits, axis=-1)
        loss, cross_entropy = loss + not_density, cross_entropy + not_density
    if config.preamble_weight > 0:
        log_p_all = jax.nn.log_softmax(logits)
        other_cross_entropy = -jnp.take_along_axis(log_p_all, x.rows[..., None], axis=-1)[..., 0]
        other_z_loss = config.z_loss_weight * jax.nn.logsumexp(logits, axis=-1) ** 2
    logits_in_use = logits if config.vocabulary == "full" else density_logits
    loss = loss + config.z_loss_weight * jax.nn.logsumexp(logits_in_use, axis=-1) ** 2

    sums = weighted_sums(x.weights, PositionTerms(loss, cross_entropy, emd, top1, r[..., 0], other_cross_entropy))
    return sums.loss + jnp.sum(x.weights.other * other_z_loss), loss_metrics(spec, sums, constant_metrics)
