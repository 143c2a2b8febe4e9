"""Batches for the loss on density tokens, and how near two results have to be."""

import jax
import jax.numpy as jnp
import numpy as np

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
