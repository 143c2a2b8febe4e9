import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.predict.evaluation.metrics import compare_paired, headline, nemd, nmae, spread


def test_figures_by_hand():
    # |1-1| + |3-2| + |0-1| over 1 + 2 + 1.
    assert nmae(np.array([1.0, 3.0, 0.0]), np.array([1.0, 2.0, 1.0])) == 0.5
    # p = (1/4, 3/4) over values (0, 4) against 1 gives 1/4 * 1 + 3/4 * 3 = 2.5; the other voxel is certain and right.
    assert nemd(np.array([2.5, 0.0]), np.array([1.0, 4.0])) == 0.5
    found = spread([float(i) for i in range(11)])
    assert (found.materials, found.median, found.mean, found.p10, found.p90) == (11, 5.0, 5.0, 1.0, 9.0)


def test_sums_are_taken_in_float64():
    # In float32, 2^24 + 1 is 2^24, so a running sum would lose every one of the small voxels.
    reference = np.ones(1 << 12, dtype=np.float32)
    reference[0] = 2.0**24
    predicted = reference.copy()
    predicted[1:] += 1
    assert nmae(predicted, reference) == (reference.size - 1) / (2**24 + reference.size - 1)


@pytest.mark.parametrize(
    ("predicted", "reference", "message"),
    [
        (np.ones((2, 2)), np.ones(4), r"\(2, 2\).*\(4,\)"),
        (np.array([np.nan, 1]), np.ones(2), "1 of 2 values that are not finite"),
        (np.ones(3), np.zeros(3), "zero on all 3 voxels"),
    ],
)
def test_refused(predicted, reference, message):
    with pytest.raises(TomatError, match=message):
        nmae(predicted, reference)


def test_pairing_sees_what_unpaired_spread_hides():
    generator = np.random.default_rng(0)
    hard = generator.lognormal(size=200)
    first = {f"m{i}": float(value) for i, value in enumerate(hard)}
    second = {name: value + 0.01 + 0.001 * float(generator.normal()) for name, value in first.items()}
    paired = compare_paired(first, second)
    assert paired.decided
    assert paired.mean_difference_ci95_low < paired.mean_difference < paired.mean_difference_ci95_high < 0
    assert paired.mean_difference == pytest.approx(-0.01, abs=3e-4)
    assert (paired.first_better, paired.second_better) == (200, 0)
    assert paired.sign_test_p_value < 1e-12
    assert compare_paired(second, first).mean_difference == -paired.mean_difference
    assert compare_paired(first, first).sign_test_p_value == 1.0
    # The same means, unpaired, differ by a hundredth of their spread.
    assert spread(list(first.values())).p90 - spread(list(first.values())).p10 > 100 * 0.01


def test_paired_needs_the_same_materials():
    with pytest.raises(TomatError, match="2 are on one side only, first 'b'"):
        compare_paired({"a": 1.0, "b": 1.0}, {"a": 1.0, "c": 1.0})


def test_a_headline_has_mean_and_median_and_weighs_compounds_alike():
    rows = [(f"GaP-{i}", "GaP", 0.04) for i in range(3)] + [("MgO-0", "MgO", 0.01), ("MgO-1", "MgO", 0.03)]
    told = headline(rows)
    for word in ("median 4.00 %", "mean 3.20 %", "(GaP-0) of 5", "2 compounds, mean 3.00 %", "MgO 2.00 %"):
        assert word in told
    assert "compound" not in headline([*rows, ("x", "", 0.5)])
    many = headline([(f"m{i}", f"C{i}", 0.01 * i) for i in range(20)])
    assert "mean 9.50 %: C19 19.00 %" in many and "C11" not in many and "C12" in many
