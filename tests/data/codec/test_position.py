import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import MAX_POSITION_ERROR, N_POSITION_IDS, decode_positions, encode_positions

coordinates = st.floats(0, 1, exclude_max=True, allow_subnormal=False)


@settings(deadline=None)
@given(st.lists(coordinates, min_size=1, max_size=20))
def test_coordinate_comes_back_within_the_stated_precision(values):
    coords = np.array(values)
    back = decode_positions(encode_positions(coords))
    distance = np.abs(back - coords)
    assert np.all(np.minimum(distance, 1 - distance) <= MAX_POSITION_ERROR)
    relative = np.where(coords > 0, distance / np.where(coords > 0, coords, 1), distance)
    # A coordinate that rounds to 1 is the origin; all others keep 16 bits of mantissa.
    assert np.all((relative <= 2.0**-17) | (back == 0) & (coords > 1 - MAX_POSITION_ERROR) | (coords < 2.0**-126))


@settings(deadline=None)
@given(
    st.tuples(st.integers(0, 126), st.integers(0, 255), st.integers(0, 255)).map(
        lambda parts: [parts[0], 512 + parts[1], 768 + parts[2]]
    )
)
def test_every_triple_of_ids_is_its_own_code(ids):
    np.testing.assert_array_equal(encode_positions(decode_positions(np.array(ids))), ids)


def test_ids_are_sign_and_exponent_and_two_bytes():
    ids = encode_positions(np.array([0.0, 0.5, 0.75, 0.5 + 2.0**-17, 0.5 + 2.0**-9]))
    np.testing.assert_array_equal(
        ids, [[0, 512, 768], [126, 512, 768], [126, 512 + 128, 768], [126, 512, 769], [126, 512 + 1, 768]]
    )
    assert ids.dtype == np.uint16 and ids.max() < N_POSITION_IDS


def test_one_is_the_origin_and_what_is_no_place_is_refused():
    np.testing.assert_array_equal(encode_positions(np.array([1.0, 1 - 1e-9, -0.0])), [[0, 512, 768]] * 3)
    for value in (-1e-3, 1.001, np.nan):
        with pytest.raises(TomatError, match=r"expected \[0, 1\)"):
            encode_positions(np.array([0.5, value]))
    for ids in ([512, 512, 768], [126, 511, 768], [126, 512, 1024], [127, 512, 768], [256, 512, 768]):
        with pytest.raises(TomatError, match="damaged"):
            decode_positions(np.array([ids]))
