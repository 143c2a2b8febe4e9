"""The permutation is a bijection, is stable, and cannot be told from a true shuffle.

Statistical tests use fixed keys, so they give the same answer in every run. Each rejects at `ALPHA`: a correct
permutation would fail one such test for one choice of keys in 10,000.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tomat.data.tokens.shuffle import TABLE_SIZE, KeyedPermutation, derive_key

ALPHA = 1e-4
KEYS = st.integers(min_value=0, max_value=2**128 - 1)

GOLDEN_KEY = 184494047784459354343227201038837791419
GOLDEN_TABLE = [9, 28, 52, 34, 45, 66]
GOLDEN_FEISTEL = [838623, 124836, 587287, 324197, 565946, 387914]


def assert_plausible(p_value: float) -> None:
    """Neither too far from what is expected nor too close to it."""
    assert ALPHA / 2 < p_value < 1 - ALPHA / 2, f"p = {p_value:.3g}"


def uniformity_p_value(counts: np.ndarray) -> float:
    """Chi-square p-value of equal probability of every cell."""
    return float(stats.chisquare(counts.ravel()).pvalue)


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, TABLE_SIZE, TABLE_SIZE + 1, 10_007, 65_536, 65_537, 262_145])
def test_bijection_with_inverse(n: int) -> None:
    permutation = KeyedPermutation(n, derive_key(7, "test", n))
    images = permutation(np.arange(n))
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(n))
    np.testing.assert_array_equal(permutation.inverse(images), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(min_value=1, max_value=20_000), key=KEYS)
def test_bijection_for_any_size_and_key(n: int, key: int) -> None:
    images = KeyedPermutation(n, key)(np.arange(n))
    np.testing.assert_array_equal(np.sort(images), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(data=st.data(), n=st.integers(min_value=2, max_value=2**63 - 1), key=KEYS)
def test_inverse_on_domains_too_large_to_enumerate(data: st.DataObject, n: int, key: int) -> None:
    indices = np.array(data.draw(st.lists(st.integers(min_value=0, max_value=n - 1), min_size=1, max_size=20)))
    permutation = KeyedPermutation(n, key)
    images = permutation(indices)
    assert images.min() >= 0 and int(images.max()) < n
    np.testing.assert_array_equal(permutation.inverse(images), indices)


@settings(max_examples=20, deadline=None)
@given(n=st.sampled_from([500, 10_007]), key=KEYS)
def test_an_image_does_not_depend_on_what_else_is_asked(n: int, key: int) -> None:
    permutation = KeyedPermutation(n, key)
    together = permutation(np.arange(n))
    alone = [int(permutation(np.array([i]))[0]) for i in range(0, n, n // 7)]
    np.testing.assert_array_equal(together[:: n // 7][: len(alone)], alone)
    np.testing.assert_array_equal(permutation(np.arange(n).reshape(-1, 1)).ravel(), together)


def test_values_are_those_of_earlier_versions() -> None:
    """Runs are resumed by position: another permutation for the same key would repeat and skip data without a word."""
    assert derive_key(0, "window", 3, 5) == GOLDEN_KEY
    assert KeyedPermutation(100, GOLDEN_KEY)(np.arange(6)).tolist() == GOLDEN_TABLE
    assert KeyedPermutation(1_000_003, GOLDEN_KEY)(np.arange(6)).tolist() == GOLDEN_FEISTEL


def test_keys_of_different_contexts_differ() -> None:
    contexts = [("window", e, w) for e in range(30) for w in range(30)] + [("blocks", e) for e in range(30)]
    # Numbers whose digits run together must not collide either.
    contexts += [("window", 1, 23, 4), ("window", 12, 3, 4), ("window", 123, 4), (1, 2), (12,)]
    keys = {derive_key(seed, *context) for seed in (0, 1, 10) for context in contexts}
    assert len(keys) == 3 * len(contexts)


def test_small_permutations_are_all_equally_likely() -> None:
    """All 120 permutations of five elements, 12,000 keys."""
    weights = 5 ** np.arange(5)
    codes = [int(KeyedPermutation(5, derive_key(key))(np.arange(5)) @ weights) for key in range(12_000)]
    _, counts = np.unique(codes, return_counts=True)
    assert counts.size == math.factorial(5)
    assert_plausible(uniformity_p_value(counts))


@pytest.mark.parametrize("n", [TABLE_SIZE + 1, 4096, 65_536, 65_537])
def test_neighbouring_positions_land_independently(n: int) -> None:
    """Images of two neighbouring positions over 4,000 keys fill an 8 x 8 grid of equal cells evenly."""
    counts = np.zeros((8, 8))
    for key in range(4000):
        first, second = KeyedPermutation(n, derive_key(key, n))(np.array([n // 3, n // 3 + 1])) * 8 // n
        counts[first, second] += 1
    assert_plausible(uniformity_p_value(counts))


@pytest.mark.parametrize("n", [TABLE_SIZE + 1, 4096, 65_536, 65_537])
@pytest.mark.parametrize("modulus", [2, 3, 64])
def test_steps_between_neighbours_have_no_favourite_residue(n: int, modulus: int) -> None:
    """(p(i + 1) - p(i)) mod m: a network that mixes high and low bits badly fails in the low ones first."""
    residues = np.bincount(np.arange(n) % modulus, minlength=modulus)
    # Of n (n - 1) ordered pairs of distinct elements, those whose difference is d mod m.
    pairs = np.array([residues @ np.roll(residues, -d) - (n if d == 0 else 0) for d in range(modulus)])
    counts = np.zeros(modulus)
    for key in range(200):
        images = KeyedPermutation(n, derive_key(key, "steps"))(np.arange(1000))
        # Every second pair, so that the steps are independent.
        counts += np.bincount((images[1::2] - images[0::2]) % modulus, minlength=modulus)
    assert_plausible(float(stats.chisquare(counts, counts.sum() * pairs / pairs.sum()).pvalue))


@pytest.mark.parametrize("n", [10, 100_000])
def test_indices_outside_the_domain_are_refused(n: int) -> None:
    permutation = KeyedPermutation(n, 1)
    for bad in (-1, n):
        with pytest.raises(IndexError, match=rf"\[0, {n}\)"):
            permutation(np.array([0, bad]))
        with pytest.raises(IndexError):
            permutation.inverse(np.array([bad]))


def test_impossible_domains_and_keys_are_refused() -> None:
    for n in (0, -5, 2**63):
        with pytest.raises(ValueError, match="1 <= n"):
            KeyedPermutation(n, 0)
    for key in (-1, 2**128):
        with pytest.raises(ValueError, match="derive_key"):
            KeyedPermutation(10, key)
