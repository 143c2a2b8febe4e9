"""Figures of merit for electron densities, their spread over materials, and paired comparisons.

Every density is in e/Å³. Sums are computed in float64 whatever the input, because a cell has 10^6 voxels and the errors
that matter are below 1 % of the sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import counted

BOOTSTRAP_SAMPLES = 10_000
"""Resamples behind a confidence interval; its end points then move by about 1 % of the interval from seed to seed."""


def _flat_pair(values: np.ndarray, reference: np.ndarray, what: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Both arrays as flat float64, and `sum |reference|`; refuses inputs for which the ratio has no meaning."""
    if values.shape != reference.shape:
        said = f"{what} has shape {values.shape} and the reference density {reference.shape}"
        raise TomatError(f"{said}; they must hold the same voxels. Evaluate both on the same patches.")
    flat, flat_reference = (np.asarray(a, dtype=np.float64).ravel() for a in (values, reference))
    for name, array in ((what, flat), ("the reference density", flat_reference)):
        if bad := np.count_nonzero(~np.isfinite(array)):
            raise TomatError(f"{name} has {bad} of {array.size} values that are not finite; check the model and input.")
    total = float(np.abs(flat_reference).sum())
    if total == 0.0:
        said = f"the reference density is zero on all {flat.size} voxels evaluated, so a normalised error is undefined"
        raise TomatError(f"{said}. Evaluate more patches of this material, or the whole cell.")
    return flat, flat_reference, total


def nmae(predicted: np.ndarray, reference: np.ndarray) -> float:
    """Normalised mean absolute error, `sum |predicted - reference| / sum |reference|`, as a fraction.

    Both arrays are densities of the same shape, in e/Å³. This is the error that DeepDFT (arXiv 2112.09692) and
    ChargE3Net (arXiv 2312.05388) quote in per cent.
    """
    flat, flat_reference, total = _flat_pair(predicted, reference, "the predicted density")
    return float(np.abs(flat - flat_reference).sum() / total)


def nemd(expected_absolute_error: np.ndarray, reference: np.ndarray) -> float:
    """Normalised earth mover's distance, `sum E_{v~p} |v - reference| / sum |reference|`, as a fraction.

    `expected_absolute_error` holds the expectation for each voxel over the predicted distribution, in e/Å³, in the
    shape of `reference`. No decoder is involved. The 1-Wasserstein distance to a point mass is just this expectation.
    """
    flat, _, total = _flat_pair(expected_absolute_error, reference, "the expected absolute error")
    return float(flat.sum() / total)


@dataclass(frozen=True)
class Spread:
    """The distribution of a figure over the materials of a split, which one number alone would hide."""

    materials: int
    median: float
    mean: float
    p10: float
    p90: float


def spread(values: Sequence[float]) -> Spread:
    """Median, mean, and 10th and 90th percentile (linear interpolation) of one figure per material."""
    array = np.asarray(values, dtype=np.float64)
    if array.size == 0:
        raise TomatError("no material to evaluate; choose a split or input that has at least one.")
    p10, median, p90 = np.percentile(array, [10, 50, 90])
    return Spread(array.size, float(median), float(array.mean()), float(p10), float(p90))


MOST_COMPOUNDS = 8
"""Most compounds that a headline names with their figures. If there are more, it names the worst ones."""


def headline(rows: Sequence[tuple[str, str, float]]) -> str:
    """The NMAE over materials and by compound, in words: a median hides the worst compounds, and ten strained cells of
    one crystal are not ten crystals. A row has an id, a compound (empty: not known) and an NMAE as a fraction."""
    over = spread([value for *_, value in rows])
    worst_id, _, worst = max(rows, key=lambda row: row[2])
    words = (
        f"median {100 * over.median:.2f} %, mean {100 * over.mean:.2f} %, worst {100 * worst:.2f} % ({worst_id}) of "
        f"{counted(over.materials, 'material')}"
    )
    if not all(compound for _, compound, _ in rows):
        return words
    by_compound: dict[str, list[float]] = {}
    for _, compound, value in rows:
        by_compound.setdefault(compound, []).append(value)
    means = sorted(((float(np.mean(each)), name) for name, each in by_compound.items()), reverse=True)
    shown = ", ".join(f"{name} {100 * mean:.2f} %" for mean, name in means[:MOST_COMPOUNDS])
    more = ", ..." if len(means) > MOST_COMPOUNDS else ""
    mean = 100 * float(np.mean([each for each, _ in means]))
    return f"{words}; {counted(len(means), 'compound')}, mean {mean:.2f} %: {shown}{more}"


@dataclass(frozen=True)
class PairedComparison:
    """Two sets of figures (lower is better) of the same materials, compared material by material."""

    materials: int
    mean_difference: float
    """Mean of first - second, in the unit of the figures; negative when the first is better."""
    mean_difference_ci95_low: float
    mean_difference_ci95_high: float
    median_difference: float
    first_better: int
    second_better: int
    sign_test_p_value: float
    """Two-sided sign test without ties: the probability of a split at least this uneven if neither were better."""

    @property
    def decided(self) -> bool:
        """Whether the 95 % interval of the mean difference excludes zero."""
        return self.mean_difference_ci95_low > 0 or self.mean_difference_ci95_high < 0


def compare_paired(first: Mapping[str, float], second: Mapping[str, float]) -> PairedComparison:
    """Compare two figures per material, e.g. the NMAE of two checkpoints, by their differences.

    Materials differ far more than checkpoints do, so unpaired means over a few hundred materials vary by more than the
    effect that is sought. The interval is a percentile bootstrap over materials (Efron and Tibshirani, 1993).
    """
    if first.keys() != second.keys():
        lonely = sorted(first.keys() ^ second.keys())
        said = f"a paired comparison needs the same materials on both sides; {len(lonely)} are on one side only"
        raise TomatError(f"{said}, first {lonely[0]!r}. Evaluate both on the same split.")
    from scipy.stats import binomtest

    names = sorted(first)
    difference = np.array([first[name] - second[name] for name in names], dtype=np.float64)
    generator = np.random.Generator(np.random.Philox(key=0))  # the same input gives the same interval
    # In blocks, so that 4,000 materials need 32 MB rather than 320.
    means = [
        difference[generator.integers(0, difference.size, size=(BOOTSTRAP_SAMPLES // 10, difference.size))].mean(axis=1)
        for _ in range(10)
    ]
    low, high = np.percentile(np.concatenate(means), [2.5, 97.5])
    first_better, second_better = int((difference < 0).sum()), int((difference > 0).sum())
    untied = first_better + second_better
    p_value = float(binomtest(first_better, untied).pvalue) if untied else 1.0
    mean, median = float(difference.mean()), float(np.median(difference))
    return PairedComparison(
        len(names), mean, float(low), float(high), median, first_better, second_better, sign_test_p_value=p_value
    )
