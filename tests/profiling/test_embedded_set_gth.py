import pytest
from embedded_set_gth import gth_text

from tomat.base.errors import TomatError


def test_the_parameters_stand_where_other_codes_look_for_them():
    """Figures: CP2K's GTH_POTENTIALS. s has no spin-orbit part, p and d have one of zeros; a channel without projectors
    has its radius alone."""
    lines = gth_text("Sr", 10).splitlines()
    assert lines[:4] == ["GTH-PBE-q10 Sr", "38 10 0", "10 11 2 3 0 0", "0.48000000 4 6.81095035 -1.19610979 0.00000000 "
                         "0.00000000"]  # fmt: skip
    assert lines[-6:] == ["0.28174086 2 11.70905135 -10.96577673", "12.97488200", "0.00000000 0.00000000", "0.00000000",
                          "0.52108911 1 0.36053906", "0.00000000"]  # fmt: skip
    lines = gth_text("N", 5).splitlines()
    assert lines[1:3] == ["7 5 0", "10 11 1 2 0 0"]
    assert lines[-2:] == ["0.25540500 1 13.63026257", "0.24549453 0"]
    with pytest.raises(TomatError, match="no GTH pseudopotential of Si with 7 valence electrons"):
        gth_text("Si", 7)
