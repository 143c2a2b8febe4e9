"""Whether a row is faster than its base: ratios of windows that were measured beside each other, with an interval."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from tomat.base.records import Positive

LEVEL = 0.95
"""Of the interval."""

FASTER, SLOWER, BETTER, WORSE, SAME = "faster", "slower", "better", "worse", "within noise"


@dataclass(frozen=True)
class _Mean:
    """Of pairs, with its interval at `LEVEL`."""

    mean: float
    low: float
    high: float
    pairs: int


class Ratio(_Mean):
    """Tokens a second of a row over those of its base; the mean is geometric."""

    @property
    def verdict(self) -> str:
        return SAME if self.low <= 1.0 <= self.high else FASTER if self.mean > 1.0 else SLOWER


def ratio_of(ratios: Sequence[float]) -> Ratio | None:
    """The mean of paired ratios and Student's interval around it, both of their logarithms; None of fewer than two.

    A drift of the machine that both halves of a pair saw cancels; what one half alone saw is the noise. Pairs count as
    independent.
    """
    found = difference_of([math.log(ratio) for ratio in ratios])
    if found is None:
        return None
    return Ratio(math.exp(found.mean), math.exp(found.low), math.exp(found.high), found.pairs)


@dataclass(frozen=True)
class StartNoise:
    """By how much the logarithm of a ratio differs from one start of a row and its base to the next."""

    variance: Annotated[float, Meta(ge=0, le=100)]
    degrees: Positive
    """Of freedom: starts beyond the first, of all rows."""


def start_noise(rows: Iterable[Sequence[Sequence[float]]]) -> StartNoise | None:
    """The noise of a start, of all rows of a sweep together, since one row has too few.

    A process keeps its speed for its life: on two quiet processors starts of one setting differed by 3 % (standard
    deviation), windows of one start by 1 to 3 %. `rows` has of each row, of each of its starts, the ratios of its pairs
    of windows. None where no row was started twice.
    """
    squares, degrees = 0.0, 0
    for starts in rows:
        means = _start_means(starts)
        squares += sum((one - statistics.fmean(means)) ** 2 for one in means)
        degrees += max(0, len(means) - 1)
    return StartNoise(squares / degrees, degrees) if degrees else None


def ratio_of_starts(starts: Sequence[Sequence[float]], noise: StartNoise | None) -> Ratio | None:
    """The mean over starts of a row; its interval is the wider of that of its pairs and that of the noise of a start.
    Without noise every row was started once, and what a process keeps is not in it. None of fewer than two pairs."""
    of_pairs = ratio_of([ratio for start in starts for ratio in start])
    if of_pairs is None or noise is None:
        return of_pairs
    means = _start_means(starts)
    mean, of_starts = statistics.fmean(means), math.sqrt(noise.variance / len(means))
    half = max(math.log(of_pairs.high / of_pairs.mean), _student(noise.degrees) * of_starts)
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), of_pairs.pairs)


def _start_means(starts: Sequence[Sequence[float]]) -> list[float]:
    """Of the logarithms, of each start."""
    return [statistics.fmean(map(math.log, start)) for start in starts if start]


def _student(degrees: int) -> float:
    """Half the width of an interval at `LEVEL`, in standard errors."""
    from scipy.special import stdtrit  # the inverse of Student's distribution; scipy.stats takes a second to import

    return float(stdtrit(degrees, 0.5 + LEVEL / 2))


class Difference(_Mean):
    """A figure of a row less that of its base; lower is better."""

    @property
    def verdict(self) -> str:
        return SAME if self.low <= 0.0 <= self.high else WORSE if self.mean > 0 else BETTER


def difference_of(values: Sequence[float]) -> Difference | None:
    """The mean of paired differences and Student's interval around it; None of fewer than two.

    Pairs are of seeds: the weights at the start and the order of the data are those of both halves.
    """
    if len(values) < 2:
        return None
    n, mean = len(values), statistics.fmean(values)
    half = _student(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)
