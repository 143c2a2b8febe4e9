import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.codec.two_token import N_LEVELS, TwoTokenCodec


@settings(deadline=None)
@given(st.lists(st.floats(10**-4.12, 10**4.96, width=64), min_size=1, max_size=30))
def test_density_comes_back_within_half_a_level(values):
    codec = TwoTokenCodec()
    rho = np.array(values, dtype=np.float32)
    back = codec.decode(codec.encode(rho))
    assert back.dtype == np.float32
    # Half a level is 5.0e-6; rounding to float32 adds 6e-8 on either side.
    np.testing.assert_allclose(back, rho, rtol=10 ** (9.1 / N_LEVELS / 2) - 1 + 1.5e-7)


@settings(deadline=None)
@given(st.integers(1, N_LEVELS - 1))
def test_every_level_is_its_own_code(level):
    codec = TwoTokenCodec(unit="e_per_A3")
    ids = np.array([level // 4096, 512 + level % 4096])
    np.testing.assert_array_equal(codec.encode(codec.decode(ids)), ids)


def test_ends_of_the_range():
    codec = TwoTokenCodec()
    ids = codec.encode(np.array([0.0, 1e-6, 1e6], dtype=np.float32))
    np.testing.assert_array_equal(ids, [[0, 512], [0, 512], [511, 4607]])
    np.testing.assert_array_equal(codec.decode(ids[:2]), [0, 0])
    assert codec.decode(ids[2]) == pytest.approx(10**4.97, rel=1e-5)
    assert ids.dtype == np.uint16 and codec.n_density_tokens == 4608


def test_what_is_no_density_id_or_range_is_refused():
    for value in (-1e-3, np.nan, np.inf):
        with pytest.raises(TomatError, match="negative or not finite"):
            TwoTokenCodec().encode(np.array([1.0, value]))
    with pytest.raises(TomatError, match="damaged"):
        TwoTokenCodec().decode(np.array([[600, 700]]))
    for low, high in ((-np.inf, 4.97), (-4.13, np.inf), (np.nan, 4.97), (4.97, -4.13), (-400, 4.97)):
        with pytest.raises(TomatError, match="log10 range is .* in -38 to 38"):
            TwoTokenCodec(log10_low=low, log10_high=high)
