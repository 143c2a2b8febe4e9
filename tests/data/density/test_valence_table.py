"""The table of valences is that of the packages that know potentials, and counts mean what they can mean."""

import bz2
import json
import re
from importlib.resources import files

import numpy as np
import pytest

from tomat.data.density.elements import KNOWN_VALENCES, SYMBOLS
from tomat.data.density.valence_table import readings, settled_valences

LEFT_OUT = {("Si", 10.0), ("C", 6.0), ("O", 8.0), ("Ne", 10.0)}
"""Silicon with 10 is what its cores hold; the others are potentials without a core."""


def test_every_potential_of_vasp_is_in_the_table():
    packed = files("pymatgen.io.vasp").joinpath("potcar-summary-stats.json.bz2").read_bytes()
    found = set()
    for titles in json.loads(bz2.decompress(packed)).values():
        for potential in (each for same in titles.values() for each in same):
            symbol = re.match(r"[A-Z][a-z]?", str(potential["symbol"]))
            if symbol and symbol[0] in SYMBOLS and not potential["symbol"].startswith("Free"):
                found.add((symbol[0], potential["ZVAL"]))
    assert len(found) > 240
    whole = {(symbol, valence) for symbol, valence in found if valence == int(valence)} - LEFT_OUT
    assert not {(s, v) for s, v in whole if v not in KNOWN_VALENCES[SYMBOLS.index(s) + 1]}


def test_every_gth_potential_is_in_the_table():
    pytest.importorskip("eminus")
    names = [each.name for group in ("pbe", "pade") for each in files("eminus").joinpath(f"psp/{group}").iterdir()]
    found = [match.groups() for name in names if (match := re.fullmatch(r"([A-Z][a-z]?)-q(\d+)", name))]
    assert len(found) > 200
    for symbol, q in found:
        assert float(q) in KNOWN_VALENCES[SYMBOLS.index(symbol) + 1]


def test_a_valence_is_below_all_electrons():
    for z, valences in KNOWN_VALENCES.items():
        assert list(valences) == sorted(set(valences)) and 0 < valences[0] and valences[-1] <= z


def test_what_a_count_can_mean():
    found = {each.electrons: each for each in readings(np.array([31, 33]))}
    assert set(found) == {8, 18, 24, 26, 28, 34, 36, 42, 44, 64}
    assert found[8].words() == "8 (Ga 3, As 5)" and found[64].with_cores == (31, 33)
    assert [each.words() for each in readings(np.array([31, 33]), {31: 3, 33: 5.5})] == ["8.5 (Ga 3, As 5.5)"]
    # Half-known valences are not known.
    assert len(readings(np.array([31, 33]), {31: 3})) > 10
    # Molecular codes: light elements whole, heavy ones without their core.
    assert 1 + 25 in {each.electrons for each in readings(np.array([1, 53]))}
    # Many elements of many atoms take no time.
    assert len({each.electrons for each in readings(np.repeat(np.arange(19, 35), 7))}) < 3000


NACL, CAF2, MG, LIF = {11: 1, 17: 1}, {20: 1, 9: 2}, {12: 2}, {3: 1, 9: 1}


@pytest.mark.parametrize(
    ("densities", "known", "expected"),
    [
        ([(NACL, 8.0)], {}, {}),
        ([(NACL, 8.001), ({11: 2}, 2.0)], {}, {11: 1, 17: 7}),
        # 16 electrons of CaF2 are shared by no whole numbers in the smallest solution; what is settled beside it stays.
        ([(CAF2, 16.0), (NACL, 8.0), (MG, 4.0)], {}, {12: 2}),
        ([(NACL, 8.0)], {11: 1.0}, {17: 7}),
        ([(NACL, 8.0)], {11: 1.0, 17: 7.0}, {}),
        ([(NACL, 8.0), (LIF, 8.0)], {11: 7.0}, {17: 1}),
        # Two sets of pseudopotentials.
        ([(NACL, 8.0), (NACL, 14.0), (MG, 4.0)], {}, {}),
        ([(MG, 4.6)], {}, {}),
        ([], {}, {}),
    ],
)
def test_what_counts_settle(densities, known, expected):
    assert settled_valences([row for row, _ in densities], [n for _, n in densities], known) == expected
