"""Loss curves of a row against its base's, seed by seed: whether they differ by rounding alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class CurveComparison:
    """A row's loss curves against the base's of the same seeds.

    A curve is cut into windows of steps and averaged over each. The noise of a window is the standard deviation of the
    base's averages over its seeds, which differ in initial weights and order of the data.
    """

    first_step_relative_difference: float
    """|row - base| / base of the first step, the largest over seeds: the same weights and data, so only rounding
    where the change is exact."""
    first_window_relative_difference: float
    """The same over the first window."""
    largest_relative_difference: float
    """The same over all steps. Rounding grows with the steps, as any difference does in training."""
    window_relative_differences: np.ndarray
    """|row - base| / base of the window averages, the largest over seeds; [windows]."""
    largest_window_difference_over_noise: float
    """|mean over seeds of (row - base)| / noise, the largest of all windows."""
    same_curve: bool
    """Whether the mean curve lies within the noise in every window and the first step differs by rounding alone."""


def window_means(losses: np.ndarray, window_steps: int) -> np.ndarray:
    """Averages of losses [..., steps] over windows, [..., windows], at least one; what is left at the end belongs to
    the last."""
    steps = losses.shape[-1]
    starts = np.arange(max(1, steps // window_steps)) * window_steps
    lengths = np.diff([*starts, steps])
    return np.add.reduceat(losses, starts, axis=-1) / lengths


def window_noise(base: np.ndarray, window_steps: int) -> np.ndarray:
    """Standard deviation over seeds of the averages of the base's losses [seeds, steps] (of a sample: n - 1),
    [windows].

    It is the root mean square over a window and its two neighbours, because the deviation of three seeds alone is
    uncertain by half of itself.
    """
    variance = window_means(base, window_steps).var(axis=0, ddof=1)
    # Not `mode="same"`, which gives three windows for one.
    total, counts = (np.convolve(values, np.ones(3))[1:-1] for values in (variance, np.ones_like(variance)))
    return np.sqrt(total / counts)


def compare_curves(
    base: np.ndarray, row: np.ndarray, window_steps: int, first_step_tolerance: float
) -> CurveComparison | None:
    """A row's curves [seeds, steps] against the base's of the same seeds; None of fewer than two seeds, or where a loss
    is not a positive number. The tolerance is what rounding alone may make of the first step, relatively."""
    both = np.stack([base, row])
    if base.shape[0] < 2 or not np.isfinite(both).all() or (both <= 0).any():
        return None
    relative = np.abs(row - base) / base
    windows, base_windows = window_means(row, window_steps), window_means(base, window_steps)
    difference = windows - base_windows
    noise = window_noise(base, window_steps)
    shift = np.abs(difference.mean(axis=0))
    # No spread and no difference is agreement; no spread and a difference is none.
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
