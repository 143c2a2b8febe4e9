import numpy as np

from tomat.data.density.elements import SYMBOLS, atomic_number, plausible_electron_counts, symbol_of


def test_symbols_are_those_of_pymatgen():
    from pymatgen.core import Element

    assert [Element.from_Z(number).symbol for number in range(1, 119)] == list(SYMBOLS)
    assert all(atomic_number(symbol_of(number)) == number for number in range(1, 119))
    assert [atomic_number(symbol) for symbol in ("D", "O2-", "Fe3+")] == [1, 8, 26]


def test_the_least_a_density_holds_is_what_the_largest_cores_leave():
    for symbols, valences in ((("Ti", "O", "O"), 14), (("Gd",), 3), (("U",), 3), (("Rf",), 3)):
        least, most = plausible_electron_counts(np.array([atomic_number(symbol) for symbol in symbols]))
        assert least == 0.75 * valences < most
