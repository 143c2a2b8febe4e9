import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.predict.inference.valences import electron_count

SRF2 = Crystal(np.eye(3) * 4, np.array([38, 9, 9]), np.random.default_rng(0).random((3, 3)), "SrF2")


def test_given_valences_go_before_learnt_ones_and_both_are_named():
    assert electron_count(SRF2, None, None)[0] is None
    assert electron_count(SRF2, None, {38: 10, 9: 7, 8: 6}) == (24.0, "learnt from the training set")
    assert electron_count(SRF2, {38: 10, 9: 7}, None) == (24.0, "--valences")
    assert electron_count(SRF2, {38: 2}, {38: 10, 9: 7}) == (16.0, "--valences and learnt from the training set")


def test_what_is_missing_or_cannot_be_is_refused():
    with pytest.raises(TomatError, match="no valence electrons of Sr are known.*Sr=N"):
        electron_count(SRF2, {9: 7}, None)
    with pytest.raises(TomatError, match="its 3 atoms 76 electrons; expected"):
        electron_count(SRF2, {38: 62, 9: 7}, None)
