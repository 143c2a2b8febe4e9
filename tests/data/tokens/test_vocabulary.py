import pytest

from tomat.base.errors import TomatError
from tomat.data.tokens import vocabulary as v
from tomat.data.tokens.vocabulary import Vocabulary


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
