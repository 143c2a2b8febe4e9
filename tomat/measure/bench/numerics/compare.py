"""Loss curves and held-out errors of a variant against the base, seed by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from tomat.base.errors import TomatError


@dataclass(frozen=True, eq=False)
class CurveComparison:
    """A variant's loss curves against the base's of the same seeds.

    A curve is cut into windows of steps and averaged over each. The noise of a window is the standard deviation of the
    base's averages over its seeds, which differ in initial weights and order of the data.
    """

    first_step_relative_difference: float
    """|variant - base| / base of the first step, the largest over seeds: the same weights and data, so only rounding
    where the change is exact."""
    first_window_relative_difference: float
    """The same over the first window."""
    largest_relative_difference: float
    """The same over all steps. Rounding grows with the steps, as any difference does in training."""
    window_relative_differences: np.ndarray
    """|variant - base| / base of the window averages, the largest over seeds; [windows]."""
    largest_window_difference_over_noise: float
    """|mean over seeds of (variant - base)| / noise, the largest of all windows."""
    same_curve: bool
    """Whether the mean curve lies within the noise in every window and the first step differs by rounding alone."""


def window_means(losses: np.ndarray, window_steps: int) -> np.ndarray:
    """Averages over windows of `window_steps`; what is left at the end belongs to the last one.

    Args:
        losses: [..., steps].

    Returns:
        [..., windows], at least one.
    """
    steps = losses.shape[-1]
    starts = np.arange(max(1, steps // window_steps)) * window_steps
    lengths = np.diff([*starts, steps])
    return np.add.reduceat(losses, starts, axis=-1) / lengths


def window_noise(base: np.ndarray, window_steps: int) -> np.ndarray:
    """Standard deviation over seeds of the base's window averages (of a sample: n - 1).

    It is the root mean square over a window and its two neighbours, because the deviation of three seeds alone is
    uncertain by half of itself.

    Args:
        base: Losses, [seeds, steps], of at least two seeds.

    Returns:
        [windows].
    """
    variance = window_means(base, window_steps).var(axis=0, ddof=1)
    # Not `mode="same"`, which gives three windows for one.
    total, counts = (np.convolve(values, np.ones(3))[1:-1] for values in (variance, np.ones_like(variance)))
    return np.sqrt(total / counts)


def compare_curves(
    base: np.ndarray, variant: np.ndarray, window_steps: int, first_step_tolerance: float
) -> CurveComparison:
    """A variant's curves against the base's.

    Args:
        base: Losses, [seeds, steps].
        variant: Losses of the same seeds in the same order, [seeds, steps].
        window_steps: Steps averaged over.
        first_step_tolerance: Largest relative difference of the first step that rounding alone may make.

    Raises:
        TomatError: Fewer than two seeds, curves of other shapes, or a loss that is not finite or not positive.
    """
    if base.shape != variant.shape or base.ndim != 2:
        raise TomatError(f"the curves have shapes {base.shape} and {variant.shape}; expected [seeds, steps] alike.")
    if base.shape[0] < 2:
        raise TomatError("the noise is a spread over seeds; train at least 2.")
    for name, curves in (("base", base), ("variant", variant)):
        if not np.isfinite(curves).all() or (curves <= 0).any():
            raise TomatError(f"a loss of the {name} is not a positive number, so the curves cannot be compared.")
    relative = np.abs(variant - base) / base
    windows, base_windows = window_means(variant, window_steps), window_means(base, window_steps)
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


@dataclass(frozen=True)
class SeedFigure:
    """A held-out error over seeds, a fraction."""

    mean: float
    std: float
    """Over seeds (n - 1)."""


@dataclass(frozen=True)
class PairedFigure(SeedFigure):
    """The same with its difference to the base of the same seed, a fraction too."""

    difference_mean: float
    """Variant minus base."""
    difference_std: float
    """Over seeds (n - 1)."""
    seeds_higher: int
    """Seeds whose error is higher than the base's."""


def seed_figure(values: Sequence[float]) -> SeedFigure:
    """One figure per seed, at least two."""
    return SeedFigure(float(np.mean(values)), float(np.std(values, ddof=1)))


def compare_figure(base: Sequence[float], variant: Sequence[float]) -> PairedFigure:
    """One figure per seed against the base's, both in the same order of seeds.

    Raises:
        TomatError: Fewer than two seeds, or not the same number of both.
    """
    if len(base) != len(variant) or len(base) < 2:
        raise TomatError(f"there are {len(base)} and {len(variant)} seeds; expected the same, at least 2.")
    difference = np.subtract(variant, base)
    return PairedFigure(
        **asdict(seed_figure(variant)),
        difference_mean=float(difference.mean()),
        difference_std=float(difference.std(ddof=1)),
        seeds_higher=int((difference > 0).sum()),
    )
