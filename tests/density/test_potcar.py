import pytest

from tomat.base.errors import TomatError
from tomat.density.potcar import expected_electrons, valences_beside

POTENTIAL = """  PAW_PBE {symbol}_sv 23Jul2007
   {valence}
   VRHFIN ={symbol}: 1s2s2p
   POMASS =    7.010; ZVAL   =  {valence}    mass and valenz
 End of Dataset
"""


def test_expected_electrons_are_those_given_of_the_potcar_or_the_nearest(tmp_path, grid):
    path = str(tmp_path / "CHGCAR")
    assert expected_electrons(grid, path, None) == (10.0, "the nearest whole number")
    potcar = "".join(POTENTIAL.format(symbol=s, valence=v) for s, v in (("Li", "3.000"), ("F", "7.500")))
    (tmp_path / "POTCAR").write_text(potcar)
    assert valences_beside(path) == {3: 3.0, 9: 7.5}
    assert expected_electrons(grid, path, None) == (10.5, "the POTCAR beside it")
    assert expected_electrons(grid, path, {3: 1.0, 9: 7.0}) == (8.0, "the valences given")
    with pytest.raises(TomatError, match="no valence of F was given"):
        expected_electrons(grid, path, {3: 1.0})
    (tmp_path / "POTCAR").write_text(potcar + POTENTIAL.format(symbol="Li", valence="1.000"))
    with pytest.raises(TomatError, match="potentials of Li with different valences"):
        valences_beside(path)
