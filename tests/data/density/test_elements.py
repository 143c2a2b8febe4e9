import pytest

from tomat.data.density.elements import SYMBOLS, atomic_number, fewest_valence_electrons, symbol_of


def test_symbols_are_those_of_pymatgen():
    from pymatgen.core import Element

    assert [Element.from_Z(number).symbol for number in range(1, 119)] == list(SYMBOLS)
    assert all(atomic_number(symbol_of(number)) == number for number in range(1, 119))
    assert [atomic_number(symbol) for symbol in ("D", "O2-", "Fe3+")] == [1, 8, 26]


@pytest.mark.parametrize(
    ("symbol", "valence"),
    [("H", 1), ("He", 2), ("Na", 1), ("Ca", 2), ("F", 7), ("Ti", 4), ("Fe", 8), ("Cu", 1), ("Zn", 2), ("Ga", 3)]
    + [("Gd", 3), ("Hf", 4), ("W", 6), ("Pb", 4), ("U", 3), ("Xe", 8)],
)
def test_fewest_valence_electrons(symbol, valence):
    assert fewest_valence_electrons(atomic_number(symbol)) == valence
