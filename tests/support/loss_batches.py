"""Batches for the loss on density tokens, and how near two results have to be."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from tomat.model.loss.config import LossConfig

START = 7
"""The first density id: ids of both other sorts are before and after the bins."""


def make_batch(
    seed: int, batch: int, positions: int, *, bins: int, width: int, ids: int, scale: float = 1.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, head and token rows with a preamble, density tokens, an end token and padding."""
    rng = np.random.default_rng(seed)
    tokens = np.zeros((batch, positions), np.int32)
    for row in tokens:
        preamble = rng.integers(1, max(2, positions // 3))
        length = rng.integers(preamble + 1, positions + 1)
        row[:preamble] = rng.integers(1, START, preamble)
        row[preamble:length] = rng.integers(START, START + bins, length - preamble)
        row[length : length + 1] = ids - 1
    hidden = rng.normal(size=(batch, positions, width)).astype(np.float32) * scale
    head = rng.normal(size=(ids, width)).astype(np.float32)
    return jnp.asarray(hidden), jnp.asarray(head), jnp.asarray(tokens)


def assert_close(got, expected, relative: float, name: str, terms: float = 0.0) -> None:
    """Within `relative` of the largest expected value, since gradients are sums of terms of that size; or of `terms`,
    the size of those that all but cancel."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert np.isfinite(got).all(), name
    largest = max(np.abs(expected).max(), terms, 1e-9)
    assert np.abs(got - expected).max() <= relative * largest, (name, np.abs(got - expected).max(), largest)


def largest_terms(hidden, head, tokens, config: LossConfig, values: np.ndarray) -> tuple[float, float]:
    """Of an expected distance, whose derivative by a logit of probability p is w p (distance - its expectation): the
    largest sums of w p (distance + its expectation), by hidden states and by head. In either formula both round alone.
    Of `crps` the distance of a bin is the derivative by p, 2 sum |F - step| dv over the bins above, in absolute terms.
    """
    weight = {"emd": 1.0, "l1_mean": 1.0, "crps": 1.0, "ce_emd": config.emd_weight}.get(config.kind, 0.0)
    bins = len(values)
    states, rows, ids = (np.asarray(x, np.float64) for x in (hidden, head[START : START + bins], tokens))
    targets = np.pad(ids[:, 1:], ((0, 0), (0, 1))).astype(int) - START
    counts = (targets >= 0) & (targets < bins)
    w = weight * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) / len(ids)
    p = softmax(states @ rows.T, axis=-1)
    if config.kind == "crps":
        off = np.abs(np.cumsum(p, axis=-1) - (np.arange(bins) >= targets[..., None]))
        distance = 2 * np.cumsum((off * np.diff(values, append=values[-1]))[..., ::-1], axis=-1)[..., ::-1]
    else:
        distance = np.abs(values - values[np.clip(targets, 0, bins - 1)][..., None])
    terms = w[..., None] * p * (distance + np.sum(p * distance, axis=-1, keepdims=True))
    return (terms @ np.abs(rows)).max(), np.einsum("bpk,bpe->ke", terms, np.abs(states)).max()
