"""Optimal scalar quantisation of a fine histogram: where to cut, what to reconstruct, how much is lost.

S. P. Lloyd, "Least squares quantization in PCM" (1957; IEEE Trans. Inf. Theory 28, 1982), and J. Max (1960):
alternately cut half-way between reconstructions, and reconstruct by the median (absolute error) or mean (squared error)
of what is between two cuts. It starts from the density of bins that is optimal for many bins, p^(1/2) for absolute and
p^(1/3) for squared error (Panter and Dite, 1951; Gersho, 1979: p^(1/(1+r)) for an error of power r).

Cuts lie on edges of the fine histogram, so that encoding needs no comparison. For 16,384 bins of a log-normal density
(sigma 1.8, 20 M voxels) that costs 1 % of the floor against a histogram twice as fine: 0.01224 % against 0.01211 %.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tomat.codec.histogram import N_FINE_BINS, SHIFT, DensityHistogram, fine_bin_edges

_GROUP_BITS = 5
"""The start smooths the counts over groups of 2^5 fine bins, 256 an octave: counts of 0 and 1 say little about p."""

MAX_ITERATIONS = 300
"""Fits to 16,384 bins stop gaining 1e-6 of the floor a step well before; the cuts then only shuffle by a fine bin."""
TOLERANCE = 1e-7
"""A step that lowers the error by less than this share of it is the last."""


@dataclass(frozen=True, eq=False)
class FineBins:
    """The fine bins that are not empty, ascending, with running sums."""

    bins: np.ndarray
    """int64 [m]: their numbers."""
    counts: np.ndarray
    """int64 [m]."""
    sums: np.ndarray
    """float64 [m]."""

    @classmethod
    def of(cls, histogram: DensityHistogram) -> "FineBins":
        """The bins of a histogram; its zeros are not among them."""
        bins = np.flatnonzero(histogram.counts)
        return cls(bins, histogram.counts[bins], histogram.sums[bins])

    @cached_property
    def lower(self) -> np.ndarray:
        """float64 [m]: lower edges."""
        return fine_bin_edges(self.bins).astype(np.float64)

    @cached_property
    def upper(self) -> np.ndarray:
        """float64 [m]: upper edges; that of the last finite bin is 2^128, which float32 has not."""
        edges = fine_bin_edges(np.minimum(self.bins + 1, N_FINE_BINS - 1)).astype(np.float64)
        return np.where(self.bins + 1 >= N_FINE_BINS, 2.0**128, edges)

    @cached_property
    def centres(self) -> np.ndarray:
        """float64 [m]: mean of each bin."""
        return self.sums / self.counts

    @cached_property
    def running_counts(self) -> np.ndarray:
        """int64 [m + 1]: voxels below each bin."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @cached_property
    def running_sums(self) -> np.ndarray:
        """float64 [m + 1]: sum of the densities below each bin."""
        return np.concatenate([[0.0], np.cumsum(self.sums)])

    def means(self, cuts: np.ndarray) -> np.ndarray:
        """float64 [n]: mean between each two of the n + 1 cuts."""
        return np.diff(self.running_sums[cuts]) / np.diff(self.running_counts[cuts])

    def medians(self, cuts: np.ndarray) -> np.ndarray:
        """float64 [n]: median between each two cuts, each fine bin taken as evenly filled; the mean if it is but "
        "one."""
        counts = self.running_counts
        middle = (counts[cuts[:-1]] + counts[cuts[1:]]) / 2
        at = np.searchsorted(counts, middle, side="left") - 1
        share = (middle - counts[at]) / self.counts[at]
        inside = self.lower[at] + share * (self.upper[at] - self.lower[at])
        return np.where(np.diff(cuts) == 1, self.centres[at], inside)

    def absolute_error(self, cuts: np.ndarray, values: np.ndarray) -> float:
        """Sum of |rho - value| over all voxels; exact but for the fine bin a value lies in, taken as evenly filled.

        Args:
            cuts: int [n + 1], cut k is below fine bin cuts[k].
            values: float64 [n], the reconstructions.
        """
        counts, sums = self.running_counts, self.running_sums
        at = np.clip(np.searchsorted(self.upper, values, side="right"), cuts[:-1], cuts[1:] - 1)
        below = values * (counts[at] - counts[cuts[:-1]]) - (sums[at] - sums[cuts[:-1]])
        above = (sums[cuts[1:]] - sums[at + 1]) - values * (counts[cuts[1:]] - counts[at + 1])
        low, high = self.lower[at], self.upper[at]
        inside = (low < values) & (values < high)
        split = ((values - low) ** 2 + (high - values) ** 2) / (2 * (high - low))
        at_bin = np.where(inside, self.counts[at] * split, np.abs(self.sums[at] - values * self.counts[at]))
        return float((below + above + at_bin).sum())

    def squared_error(self, cuts: np.ndarray, values: np.ndarray) -> float:
        """Sum of (rho - value)^2 over all voxels, less the part inside fine bins, which no cut changes."""
        bin_values = np.repeat(values, np.diff(cuts))
        return float((self.counts * (self.centres - bin_values) ** 2).sum())

    def edges(self, cuts: np.ndarray, values: np.ndarray) -> np.ndarray:
        """float32 [n - 1]: densities to cut at, on fine edges: half-way between reconstructions where no voxel was "
        "seen."""
        inner = cuts[1:-1]
        halfway = ((values[:-1] + values[1:]) / 2).astype(np.float32)
        nearest = (halfway.view(np.uint32).astype(np.int64) + (1 << (SHIFT - 1))) >> SHIFT
        return fine_bin_edges(np.clip(nearest, self.bins[inner - 1] + 1, self.bins[inner]))


def starting_cuts(fine: FineBins, n: int, power: float) -> np.ndarray:
    """int64 [n + 1]: cuts as dense as the `power` of the density of voxels, each two a fine bin apart or more.

    Args:
        fine: at least n bins.
        n: number of intervals.
        power: 1/2 for absolute error, 1/3 for squared error.
    """
    groups = fine.bins >> _GROUP_BITS
    _, first = np.unique(groups, return_index=True)
    counts = np.add.reduceat(fine.counts, first).astype(np.float64)
    widths = fine_bin_edges((groups[first] + 1) << _GROUP_BITS).astype(np.float64) - fine_bin_edges(
        groups[first] << _GROUP_BITS
    )
    running = np.concatenate([[0.0], np.cumsum(counts**power * widths ** (1 - power))])
    bounds = np.append(first, len(fine.bins))
    cuts = np.interp(np.linspace(0, running[-1], n + 1), running, bounds)
    return spread(np.rint(cuts).astype(np.int64), len(fine.bins))


def spread(cuts: np.ndarray, n_fine: int) -> np.ndarray:
    """Non-decreasing cuts moved as little as makes them strictly increasing from 0 to `n_fine`."""
    steps = np.arange(len(cuts))
    cuts = np.maximum.accumulate(cuts - steps) + steps
    last = len(cuts) - 1
    # No cut may come so late that those after it find no bin of their own, nor so early that those before it do not.
    cuts = np.clip(cuts, steps, n_fine - (last - steps))
    cuts[0], cuts[-1] = 0, n_fine
    return cuts


def lloyd(fine: FineBins, n: int, absolute: bool) -> tuple[np.ndarray, int]:
    """Cuts that no step of Lloyd's improves by `TOLERANCE`.

    Args:
        fine: at least n bins.
        n: number of intervals.
        absolute: minimise the absolute error, else the squared error.

    Returns:
        int64 [n + 1] cuts, and the number of steps.
    """

    def error(cuts: np.ndarray) -> float:
        if absolute:
            return fine.absolute_error(cuts, fine.medians(cuts))
        return fine.squared_error(cuts, fine.means(cuts))

    cuts = starting_cuts(fine, n, 1 / 2 if absolute else 1 / 3)
    best = error(cuts)
    for step in range(1, MAX_ITERATIONS + 1):
        values = fine.medians(cuts) if absolute else fine.means(cuts)
        moved = spread(
            np.concatenate([[0], np.searchsorted(fine.centres, (values[:-1] + values[1:]) / 2), [len(fine.bins)]]),
            len(fine.bins),
        )
        now = error(moved)
        if now < best:
            cuts = moved
        if now >= best * (1 - TOLERANCE):
            return cuts, step
        best = now
    return cuts, MAX_ITERATIONS
