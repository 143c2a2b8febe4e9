"""Compares the loss curves of a row with its base's, seed by seed: do they differ only by rounding?"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class CurveComparison:
    """A row's loss curves against the base's of the same seeds.

    A curve is cut into windows of steps and averaged over each. The noise of a window is the standard deviation of the
    base's averages over its seeds, which differ in initial weights and order of the data.
    """

    first_step_relative_difference: float
    """|row - base| / base of the first step, the largest over seeds. Weights and data are the same there, so an exact
    change differs only by rounding."""
    first_window_relative_difference: float
    """The same over the first window."""
    largest_relative_difference: float
    """The same over all steps. In training, rounding differences grow with the steps, like any difference."""
    window_relative_differences: np.ndarray
    """|row - base| / base of the window averages, the largest over seeds; [windows]."""
    largest_window_difference_over_noise: float
    """|mean over seeds of (row - base)| / noise, the largest of all windows."""
    same_curve: bool
    """Whether the mean curve is within the noise in every window and the first step differs only by rounding."""


def window_means(losses: np.ndarray, window_steps: int) -> np.ndarray:
    """Averages of losses [..., steps] over windows, [..., windows], at least one. Steps left over at the end belong to
    the last window."""
    steps = losses.shape[-1]
    starts = np.arange(max(1, steps // window_steps)) * window_steps
    lengths = np.diff([*starts, steps])
    return np.add.reduceat(losses, starts, axis=-1) / lengths


def window_noise(base: np.ndarray, window_steps: int) -> np.ndarray:
    """Standard deviation over seeds (of a sample: n - 1) of the window averages of the base's losses [seeds, steps],
    [windows].

    Each value is the root mean square over a window and its two neighbours, because the deviation of only three seeds
    is uncertain by half of itself.
    """
    variance = window_means(base, window_steps).var(axis=0, ddof=1)
    # Not `mode="same"`, which gives three values for a single window.
    total, counts = (np.convolve(values, np.ones(3))[1:-1] for values in (variance, np.ones_like(variance)))
    return np.sqrt(total / counts)


def compare_curves(
    base: np.ndarray, row: np.ndarray, window_steps: int, first_step_tolerance: float
) -> CurveComparison | None:
    """Compare a row's curves [seeds, steps] with the base's of the same seeds; None for fewer than two seeds or another
    number of steps, or if a loss is not a positive number. `first_step_tolerance` is the relative difference that
    rounding may cause."""
    if base.shape != row.shape:
        return None
    both = np.stack([base, row])
    if base.shape[0] < 2 or not np.isfinite(both).all() or (both <= 0).any():
        return None
    relative = np.abs(row - base) / base
    windows, base_windows = window_means(row, window_steps), window_means(base, window_steps)
    difference = windows - base_windows
    noise = window_noise(base, window_steps)
    shift = np.abs(difference.mean(axis=0))
    # Without noise, no difference is agreement (0), and any difference is infinitely large.
    over = np.where(shift > 0, np.inf, 0.0)
    np.divide(shift, noise, out=over, where=noise > 0)
    first, over_noise = float(relative[:, 0].max()), float(over.max())
    return CurveComparison(
        first_step_relative_difference=first,
        first_window_relative_difference=float(relative[:, :window_steps].max()),
        largest_relative_difference=float(relative.max()),
        window_relative_differences=(np.abs(difference) / base_windows).max(axis=0),
        largest_window_difference_over_noise=over_noise,
        same_curve=over_noise <= 1.0 and first <= first_step_tolerance,
    )
