import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.promolecule import RadialBasis

BASES = [RadialBasis(), RadialBasis(4, 2.0, 0.1), RadialBasis(9, 3.0, 5.0)]


@pytest.mark.parametrize("basis", BASES)
def test_four_functions_a_distance_are_all_and_add_up_to_one_but_for_the_end(basis):
    r = np.concatenate([[0.0], np.linspace(1e-9, basis.cutoff_a * (1 - 1e-12), 3001)])
    dense = np.zeros((len(r), basis.n))
    for function, values in basis.nonzero(r):
        assert function.min() >= 0 and function.max() < basis.n
        np.add.at(dense, (np.arange(len(r)), function), values)
    np.testing.assert_allclose(dense, basis(r), atol=1e-14)
    inner = basis.stretch_a * np.expm1((basis.n - 2) / basis.scale)
    np.testing.assert_allclose(basis(np.linspace(0, inner, 100)).sum(axis=1), 1.0, atol=1e-12)


@pytest.mark.parametrize("basis", BASES)
def test_every_function_ends_smoothly_at_the_cutoff_and_is_flat_at_the_nucleus(basis):
    h = 1e-4 * basis.cutoff_a
    before = basis(basis.cutoff_a - h * np.arange(1, 4))
    # Value, slope and curvature vanish: what is left is the cube of the distance in stretched units.
    per_h = basis.scale * h / basis.stretch_a
    assert (before <= (3 * per_h) ** 3).all() and before[:, -1].max() > 0
    assert not basis(np.array([basis.cutoff_a, 2 * basis.cutoff_a])).any()
    near = basis(np.array([0.0, 1e-6, 2e-6]) * basis.stretch_a)
    # A slope of 1 in stretched units would be 1e-6 x scale.
    assert np.abs(near - near[0]).max() < 1e-8


@pytest.mark.parametrize("values", [(3, 5.0, 0.5), (8, 0.0, 0.5), (8, 5.0, -1.0), (8, float("nan"), 1.0)])
def test_what_is_no_basis_is_refused(values):
    with pytest.raises(TomatError, match="at least 4 functions and positive lengths"):
        RadialBasis(*values)
