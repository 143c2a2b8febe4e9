"""Checks the first logged loss: if a loss runs that is not the one configured, its first value shows it.

Before the first update the prediction is near uniform, and there each loss has its own known value, such as log K nats
for a cross-entropy over K bins, or the mean |v - r| for an EMD.
"""

import math

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import MAX_IDS
from tomat.model.loss.config import CROSS_ENTROPY_KINDS, LossConfig
from tomat.model.loss.interface import DensityTarget

UNTIED_LOGIT_STD = 1.0
"""Standard deviation of the logits of a fresh model with an output embedding of its own. Measured with Levanter's
Qwen3, 512 x 6: 0.99 (rows are drawn with embed^-1/2, and the last norm gives each hidden component unit variance)."""

TIED_LOGIT_STD = 0.1
"""The same for tied embeddings, whose rows are drawn with 1/embed. Measured: 0.044 at 512 x 6."""


def uniform_loss(config: LossConfig, tokens: np.ndarray, *, target: DensityTarget, vocab_size: int) -> float:
    """The configured loss, in its unit, of these tokens, integer `[batch, position]`, for a uniform prediction."""
    config.check_layout(target.tokens_per_voxel)
    targets = np.asarray(tokens)[:, 1:].astype(np.int64)
    n_bins = target.n_density_tokens
    per_bin = _uniform_loss_per_bin(config, target)
    if config.vocabulary == "full":
        per_bin = per_bin + math.log(vocab_size / n_bins)
    log_ids = math.log(vocab_size if config.vocabulary == "full" else n_bins)
    per_bin = per_bin + config.z_loss_weight * log_ids**2
    per_other = math.log(vocab_size) + config.z_loss_weight * math.log(vocab_size) ** 2
    total = 0.0
    for row in targets:
        bins = row[(row >= target.density_start) & (row < target.density_end)] - target.density_start
        if bins.size == 0:
            continue
        other = config.preamble_weight * (np.count_nonzero(row != target.pad_id) - bins.size)
        total += (per_bin[bins].sum() + other * per_other) / (bins.size + other)
    return float(total / len(targets))


def _uniform_loss_per_bin(config: LossConfig, target: DensityTarget) -> np.ndarray:
    """Loss over the density bins alone, for each target bin, float64 `[n_density_tokens]`."""
    n_bins = target.n_density_tokens
    cross_entropy = np.full(n_bins, math.log(n_bins))
    if config.kind in ("cross_entropy", "soft_cross_entropy"):
        return cross_entropy
    v = target.values
    if config.kind == "l1_mean":
        return np.abs(v.mean() - v)
    if config.kind == "crps":
        cumulative = np.arange(1, n_bins) / n_bins
        # Below the target F^2, from it on (F - 1)^2.
        squares = (cumulative**2, (1.0 - cumulative) ** 2)
        below, above = (np.concatenate([[0.0], np.cumsum(each * np.diff(v))]) for each in squares)
        return below + (above[-1] - above)
    # mean |v - v_t| = (sum of (v_t - v) below t + sum of (v - v_t) above t) / K, by prefix sums.
    prefix, index = np.cumsum(v), np.arange(n_bins)
    emd = ((index + 1) * v - prefix + (prefix[-1] - prefix) - (n_bins - 1 - index) * v) / n_bins
    return emd if config.kind == "emd" else cross_entropy + config.emd_weight * emd


def _tolerance(config: LossConfig, expected: float, target: DensityTarget, logit_std: float) -> float:
    """How far the first loss of a fresh model may be from `uniform_loss`, in `config.unit`.

    Independent logits of standard deviation s change a cross-entropy by s^2 / 2 in the mean (the log-mean of a
    log-normal) and by up to s more through the logits of the targets, where many positions share one target bin; a soft
    target and a preamble only average that. An expectation over the bins changes by its sampling error, std_k |v_k - r|
    exp(s^2 / 2) / sqrt(K), and |.| being 1-Lipschitz, std |v - r| <= std v: four of those are allowed, twice that for
    the CRPS, whose square has slope 2. 2 % more covers bfloat16 logits.
    """
    tolerance = 0.02 * abs(expected)
    if config.kind in CROSS_ENTROPY_KINDS or config.vocabulary == "full" or config.preamble_weight > 0:
        tolerance += logit_std**2 / 2 + logit_std
    if target.has_values and config.kind not in ("cross_entropy", "soft_cross_entropy"):
        sampling = float(np.std(target.values)) * math.exp(logit_std**2 / 2)
        slope = {"crps": 2.0, "ce_emd": config.emd_weight}.get(config.kind, 1.0)
        tolerance += 4.0 * slope * sampling / math.sqrt(target.n_density_tokens)
    # Spread logits add s^2 / 2 to z, which is at most the logarithm of the number of ids.
    log_ids, shift = math.log(MAX_IDS), logit_std**2 / 2
    return tolerance + config.z_loss_weight * ((log_ids + shift) ** 2 - log_ids**2)


def check_first_loss(
    config: LossConfig, measured: float, expected: float, *, target: DensityTarget, logit_std: float = UNTIED_LOGIT_STD
) -> None:
    """Stop a run of a model with freshly drawn weights whose first logged loss, before its first update, is not what
    the configured loss gives. `logit_std` is `TIED_LOGIT_STD` or `UNTIED_LOGIT_STD`."""
    tolerance = _tolerance(config, expected, target, logit_std)
    if abs(measured - expected) <= tolerance:  # False for NaN
        return
    said = f"the first loss is {measured:.4g} {config.unit}, and {config.kind} over the {config.vocabulary} vocabulary"
    raise TomatError(
        f"{said} gives {expected:.4g} +- {tolerance:.2g} for a model that has learnt nothing. Another loss ran, or "
        "its first logits are far from uniform: check the step's loss function, and the model's initial weights."
    )
