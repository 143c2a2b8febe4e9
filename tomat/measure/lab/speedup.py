"""Whether a row is faster than its base: ratios of windows that were measured side by side, with an interval."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from tomat.base.records import Positive

LEVEL = 0.95
"""Confidence level of the interval."""

FASTER, SLOWER, BETTER, WORSE, SAME = "faster", "slower", "better", "worse", "within noise"


@dataclass(frozen=True)
class _Mean:
    """The mean over pairs, with its interval at `LEVEL`."""

    mean: float
    low: float
    high: float
    pairs: int


class Ratio(_Mean):
    """Ratio of a row's tokens a second to its base's; the mean is geometric."""

    @property
    def verdict(self) -> str:
        return SAME if self.low <= 1.0 <= self.high else FASTER if self.mean > 1.0 else SLOWER


def ratio_of(ratios: Sequence[float]) -> Ratio | None:
    """The mean of paired ratios and Student's interval, both computed on logarithms; None for fewer than two pairs.

    A drift of the machine that affects both windows of a pair cancels. An effect on only one of them is noise. Pairs
    count as independent.
    """
    found = difference_of([math.log(ratio) for ratio in ratios])
    if found is None:
        return None
    return Ratio(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.pairs)


@dataclass(frozen=True)
class StartNoise:
    """Variation of the logarithm of the ratio between starts of a row and its base."""

    variance: Annotated[float, Meta(ge=0, le=100)]
    degrees: Positive
    """Degrees of freedom: the starts beyond the first, summed over all rows."""


def start_noise(rows: Iterable[Sequence[Sequence[float]]]) -> StartNoise | None:
    """The noise of a start, pooled over all rows of a sweep, because one row has too few starts.

    A process keeps its speed for its life: on two quiet processors, starts of one setting differed by 3 % (standard
    deviation) and windows of one start by 1 to 3 %. `rows` has for each row and each of its starts the ratios of its
    pairs of windows. None if no row was started twice.
    """
    squares, degrees = 0.0, 0
    for starts in rows:
        means = _start_means(starts)
        squares += sum((one - statistics.fmean(means)) ** 2 for one in means)
        degrees += max(0, len(means) - 1)
    return StartNoise(squares / degrees, degrees) if degrees else None


def ratio_of_starts(starts: Sequence[Sequence[float]], noise: StartNoise | None) -> Ratio | None:
    """The mean over a row's starts. Its interval is the wider of two: from its pairs, or from the noise of a start. If
    no row was started twice (`noise` None), the variation of processes is not in it. None for fewer than two pairs."""
    of_pairs = ratio_of([ratio for start in starts for ratio in start])
    if of_pairs is None or noise is None:
        return of_pairs
    means = _start_means(starts)
    mean, of_starts = statistics.fmean(means), math.sqrt(noise.variance / len(means))
    half = max(math.log(of_pairs.high / of_pairs.mean), _student(noise.degrees) * of_starts)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), of_pairs.pairs)


def _start_means(starts: Sequence[Sequence[float]]) -> list[float]:
    """Mean of the logarithms for each start."""
    return [statistics.fmean(map(math.log, start)) for start in starts if start]


def _student(degrees: int) -> float:
    """Half the width of Student's interval at `LEVEL`, in standard errors."""
    from scipy.special import stdtrit  # the inverse of Student's distribution; scipy.stats takes a second to import

    return float(stdtrit(degrees, 0.5 + LEVEL / 2))


class Difference(_Mean):
    """A figure of a row minus the base's; lower is better."""

    @property
    def verdict(self) -> str:
        return SAME if self.low <= 0.0 <= self.high else WORSE if self.mean > 0 else BETTER


def difference_of(values: Sequence[float]) -> Difference | None:
    """The mean of paired differences and Student's interval around it; None for fewer than two pairs.

    In a quality study, both runs of a pair have the same seed: the same initial weights and order of the data.
    """
    if len(values) < 2:
        return None
    n, mean = len(values), statistics.fmean(values)
    half = _student(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)
