"""A curve of a million points as one of some thousands that looks the same: no peak and no dip is lost."""

from __future__ import annotations

import numpy as np

BUCKETS = 600
"""Stretches of a curve that is thinned: one or two pixels of a figure each."""


def kept_points(values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Which points of a curve to draw: of each of `buckets` equal stretches the smallest and the largest, and the ends.

    Args:
        values: `[n]`, finite, in the order of the curve.
        buckets: Stretches; a curve of at most twice as many points is kept whole.

    Returns:
        Indices, rising; at most `2 * buckets + 2`.
    """
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    size = -(-n // buckets)
    # The last stretch is filled up with the last point, whose place is then cut back to it.
    stretches = np.pad(values, (0, size * buckets - n), mode="edge").reshape(buckets, size)
    starts = np.arange(buckets) * size
    found = np.concatenate([starts + stretches.argmin(axis=1), starts + stretches.argmax(axis=1), [0, n - 1]])
    return np.unique(np.minimum(found, n - 1))
