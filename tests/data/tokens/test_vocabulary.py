import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.vocabulary import (
    MAX_POSITION_ERROR,
    N_POSITION_IDS,
    Vocabulary,
    decode_positions,
    encode_positions,
)


def test_ids_are_those_of_the_data_that_exists():
    # From the specification of version 3: these ids must never change.
    assert (v.PAD, v.BOS, v.EOS, v.ATOMS_START, v.POSITIONS_START, v.GRID_START) == (0, 1, 2, 3, 5, 7)
    assert (v.SHAPE_START, v.OFFSET_START, v.HIGH_START, v.DENSITY_BLOCK_START) == (9, 11, 13, 15)
    assert (v.NEWLINE, v.LATTICE_START, v.LATTICE_END) == (17, 18, 19)
    assert (v.ELEMENT_START, v.INTEGER_START, v.POSITION_START, v.DENSITY_START) == (20, 138, 1162, 2186)
    assert Vocabulary(16_384).size == 18_570


def test_every_id_has_a_name_of_its_own():
    names = {0: "PAD", 1: "BOS", 8: "/GRID", 19: "/LATTICE", 20: "Z1", 137: "Z118", 138: "int 0", 1161: "int 1023"}
    names |= {1162: "exp 0", 1673: "exp 511", 1674: "mant1 0", 1930: "mant2 0", 2185: "mant2 255", 2186: "rho 0"}
    vocabulary = Vocabulary(10)
    assert {token: vocabulary.name(token) for token in names} == names
    assert len({vocabulary.name(token) for token in range(vocabulary.size)}) == vocabulary.size
    for outside in (-1, 2196):
        with pytest.raises(TomatError, match="ids are 0 to 2,195"):
            vocabulary.name(outside)


def test_number_of_density_ids_that_does_not_fit_is_refused():
    assert Vocabulary(63_350).size == 65_536
    for n_density_tokens in (0, 63_351):
        with pytest.raises(TomatError, match="1 to 63,350"):
            Vocabulary(n_density_tokens)


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
