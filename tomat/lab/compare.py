"""Whether a row is faster than its base: ratios of windows that were measured beside each other, with an interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEVEL = 0.95
"""Of the interval."""

FASTER, SLOWER, SAME = "faster", "slower", "within noise"


@dataclass(frozen=True)
class Ratio:
    """Tokens a second of a row over those of its base."""

    mean: float
    """Geometric."""
    low: float
    high: float
    """The interval at `LEVEL`."""
    pairs: int

    @property
    def verdict(self) -> str:
        """`SAME` where the interval holds 1."""
        if self.low <= 1.0 <= self.high:
            return SAME
        return FASTER if self.mean > 1.0 else SLOWER


def ratio_of(ratios: Sequence[float]) -> Ratio | None:
    """The mean of paired ratios and Student's interval around it, both of their logarithms; None of fewer than two.

    A drift of the machine that both halves of a pair saw cancels; what one half alone saw is the noise. Pairs count as
    independent, also those of one start of the row: an effect that a process keeps for its life is not in the interval.
    """
    if len(ratios) < 2:
        return None
    from scipy.special import stdtrit  # the inverse of Student's distribution; scipy.stats takes a second to import

    logs = [math.log(ratio) for ratio in ratios]
    n = len(logs)
    mean = sum(logs) / n
    error = math.sqrt(sum((one - mean) ** 2 for one in logs) / (n - 1) / n)
    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


@dataclass(frozen=True)
class Difference:
    """A figure of a row less that of its base."""

    mean: float
    low: float
    high: float
    """The interval at `LEVEL`."""
    pairs: int

    @property
    def within_noise(self) -> bool:
        """Whether the interval holds 0."""
        return self.low <= 0.0 <= self.high


def difference_of(values: Sequence[float]) -> Difference | None:
    """The mean of paired differences and Student's interval around it; None of fewer than two.

    Pairs are of seeds: the weights at the start and the order of the data are those of both halves.
    """
    if len(values) < 2:
        return None
    from scipy.special import stdtrit

    n = len(values)
    mean = sum(values) / n
    error = math.sqrt(sum((one - mean) ** 2 for one in values) / (n - 1) / n)
    half = float(stdtrit(n - 1, 0.5 + LEVEL / 2)) * error
    return Difference(mean, mean - half, mean + half, n)
