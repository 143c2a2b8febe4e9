"""The permutation is a bijection, and the one that it always was: how well it mixes cannot change either."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.data.tokens.shuffle import TABLE_SIZE, KeyedPermutation, derive_key

KEYS = st.integers(min_value=0, max_value=2**128 - 1)

GOLDEN_KEY = 184494047784459354343227201038837791419
GOLDEN_TABLE = [9, 28, 52, 34, 45, 66]
GOLDEN_FEISTEL = [838623, 124836, 587287, 324197, 565946, 387914]


@pytest.mark.parametrize("n", [1, 2, 3, 63, 64, TABLE_SIZE, TABLE_SIZE + 1, 10_007, 65_536, 65_537, 262_145])
def test_bijection_with_inverse(n: int) -> None:
    permutation = KeyedPermutation(n, derive_key(7, "test", n))
    images = permutation(np.arange(n))
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(n))
    np.testing.assert_array_equal(permutation.inverse(images), np.arange(n))
    for outside in (-1, n):
        with pytest.raises(IndexError, match=rf"\[0, {n}\)"):
            permutation(np.array([0, outside]))


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
