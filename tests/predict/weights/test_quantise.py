"""Matrices in few bits: packing is a bijection, values are their formula, errors are those of the theory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tomat.base.errors import TomatError
from tomat.predict.weights.quantise import BITS, Quantised, check_offered, packed, quantise, unpacked


@given(st.integers(1, 8), st.data())
def test_packing_is_a_bijection(bits, data):
    codes = data.draw(hnp.arrays(np.uint8, st.integers(0, 70), elements=st.integers(0, 2**bits - 1)))
    stored = packed(codes, bits)
    assert stored.size == -(-codes.size * bits // 8)
    assert np.array_equal(unpacked(stored, bits, codes.size), codes)


NORMAL = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)


@pytest.mark.parametrize(
    "scheme, bits, relative",
    # Lloyd-Max of a normal distribution (J. Max 1960): distortions 0.009497, 0.03454, 0.1175 of the variance.
    [
        *(("lut", bits, distortion**0.5) for bits, distortion in ((4, 0.009497), (3, 0.03454), (2, 0.1175))),
        ("affine", 4, 0.11),
        ("affine", 8, 0.0065),
    ],
)
def test_errors_are_those_of_the_theory(scheme, bits, relative):
    found = quantise(NORMAL, bits, scheme)
    error = np.linalg.norm(found.values() - NORMAL) / np.linalg.norm(NORMAL)
    assert error == pytest.approx(relative, rel=0.05)
    size = sum(array.nbytes for array in found.arrays().values())
    assert size == NORMAL.size * bits // 8 + 2 * NORMAL.size // 128 + 4 * 2**bits


@pytest.mark.parametrize("scheme, bits", [(scheme, bits) for scheme in BITS for bits in BITS[scheme]])
def test_values_are_their_formula_and_survive_storing(scheme, bits):
    matrix = NORMAL[:3, :96] * np.array([[1.0], [1e-3], [0.0]], np.float32)
    found = quantise(matrix, bits, scheme, group=40)
    assert found.group == 48 and found.scales.shape == (3, 2)
    for row, column in ((0, 0), (1, 50), (2, 95)):
        expected = found.table[found.codes[row, column]] * np.float32(found.scales[row, column // 48])
        assert found.values()[row, column] == expected
    assert not found.values()[2].any(), "a row of zeros stays one"
    again = Quantised.of_arrays(found.arrays(), found.description)
    assert np.array_equal(again.values(), found.values())
    for broken in ({**found.description, "bits": 5}, {**found.description, "shape": [3, 95]}, {}):
        with pytest.raises(TomatError, match="does not fit"):
            Quantised.of_arrays(found.arrays(), broken)
    with pytest.raises(TomatError, match="codes of"):
        Quantised.of_arrays({**found.arrays(), "codes": found.arrays()["codes"][:-1]}, found.description)


def test_a_matrix_of_few_numbers_is_exact_in_a_table():
    matrix = np.where(NORMAL[:4, :64] > 0, np.float32(0.5), np.float32(-0.5))
    np.testing.assert_allclose(quantise(matrix, 2, "lut").values(), matrix, rtol=1e-3)


def test_what_is_not_offered_is_refused(monkeypatch):
    for bits, scheme in ((2, "affine"), (8, "lut"), (5, "lut")):
        with pytest.raises(TomatError, match="affine: 8, 4; lut: 4, 3, 2"):
            quantise(NORMAL, bits, scheme)
    monkeypatch.setattr("tomat.predict.weights.quantise.importlib.util.find_spec", lambda name: None)
    with pytest.raises(TomatError, match="uv sync --extra compress"):
        check_offered(8, "affine")
