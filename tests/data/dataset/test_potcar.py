import pytest
from density_folder import small_grid

from tomat.base.errors import TomatError
from tomat.data.dataset.potcar import expected_electrons, potcar_valences, valences_beside

POTENTIAL = """  PAW_PBE {symbol}_sv 23Jul2007
   {valence}
   VRHFIN ={symbol}: 1s2s2p
   POMASS =    7.010; ZVAL   =  {valence}    mass and valenz
 End of Dataset
"""


def test_expected_electrons_are_those_given_of_the_potcar_or_the_nearest(tmp_path):
    grid = small_grid("NaF")
    path = str(tmp_path / "CHGCAR")
    assert expected_electrons(grid, path, None) == (8.0, "pseudopotentials in use: F 7, Na 1")
    potcar = "".join(POTENTIAL.format(symbol=s, valence=v) for s, v in (("Na", "3.000"), ("F", "7.500")))
    (tmp_path / "POTCAR").write_text(potcar)
    assert valences_beside(path) == {11: 3.0, 9: 7.5}
    assert expected_electrons(grid, path, None) == (10.5, "the POTCAR beside it")
    assert expected_electrons(grid, path, {11: 1.0, 9: 7.0}) == (8.0, "the valences given")
    with pytest.raises(TomatError, match="no valence of F was given"):
        expected_electrons(grid, path, {11: 1.0})
    (tmp_path / "POTCAR").write_text(potcar + POTENTIAL.format(symbol="Na", valence="1.000"))
    with pytest.raises(TomatError, match="potentials of Na with different valences"):
        valences_beside(path)


def test_a_potential_without_a_valence_has_not_that_of_the_next(tmp_path):
    place = tmp_path / "POTCAR"
    first, second = (POTENTIAL.format(symbol=s, valence=v) for s, v in (("Na", "1.000"), ("Cl", "7.000")))
    place.write_text(first.replace("ZVAL", "ZVOL") + second + second)
    assert potcar_valences(place) == {17: 7.0}
    for nothing in ("PAW_PBE Na_pv 19Sep2006\n", "", " VRHFIN =Xx: s\n ZVAL = 3.0\n VRHFIN =Na: s\n ZVAL = ...\n"):
        place.write_text(nothing)
        assert potcar_valences(place) == {}
    place.write_text(" \n" * 200_000)
    assert potcar_valences(place) == {}
    assert valences_beside("gs://bucket/CHGCAR") == {}
