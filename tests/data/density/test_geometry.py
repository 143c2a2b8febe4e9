import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.density.elements import SYMBOLS, atomic_number, covalent_radius_a
from tomat.data.density.geometry import (
    BOHR_A,
    check_cell,
    nearest_atom_a,
    neighbours,
    reduced_basis,
    shortest_distances_a,
    void_radius_a,
)

# Structures at ambient pressure unless said: cell in A, symbols, fractional coordinates.
FCC = [[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]
BCC = [[0, 0, 0], [0.5, 0.5, 0.5]]
HEXAGONAL = np.array([[2.286, 0, 0], [-1.143, 1.98, 0], [0, 0, 3.584]])
GRAPHENE = np.array([[2.46, 0, 0], [-1.23, 2.1304, 0], [0, 0, 20.0]])
KNOWN = {
    "Na": (np.eye(3) * 4.29, ["Na"] * 2, BCC),
    "Cs": (np.eye(3) * 6.14, ["Cs"] * 2, BCC),
    "Ba": (np.eye(3) * 5.02, ["Ba"] * 2, BCC),
    "Cu": (np.eye(3) * 3.615, ["Cu"] * 4, FCC),
    "NaCl": (np.eye(3) * 5.64, ["Na"] * 4 + ["Cl"] * 4, FCC + [[x + 0.5, y, z] for x, y, z in FCC]),
    "CsI": (np.eye(3) * 4.567, ["Cs", "I"], BCC),
    "Be": (HEXAGONAL, ["Be"] * 2, [[1 / 3, 2 / 3, 1 / 4], [2 / 3, 1 / 3, 3 / 4]]),
    "Ar": (np.eye(3) * 5.31, ["Ar"] * 4, FCC),
    "H2 in a box of 12 A": (np.eye(3) * 12.0, ["H"] * 2, [[0, 0, 0], [0.741 / 12, 0, 0]]),
    "N2 in a box of 12 A": (np.eye(3) * 12.0, ["N"] * 2, [[0, 0, 0], [1.098 / 12, 0, 0]]),
    "graphene with 20 A of vacuum": (GRAPHENE, ["C"] * 2, [[0, 0, 0.5], [1 / 3, 2 / 3, 0.5]]),
    "UO2 of uranyl": (np.eye(3) * 12.0, ["U", "O", "O"], [[0, 0, 0], [1.77 / 12, 0, 0], [-1.77 / 12, 0, 0]]),
    "diamond at 500 GPa": (np.eye(3) * 3.03, ["C"] * 8, FCC + [[x + 0.25, y + 0.25, z + 0.25] for x, y, z in FCC]),
}


def arguments(name):
    lattice, symbols, coords = KNOWN[name]
    return lattice, np.array([atomic_number(symbol) for symbol in symbols]), np.array(coords, dtype=float)


@pytest.mark.parametrize("name", KNOWN)
def test_known_structures_pass_and_no_lattice_in_another_unit(name):
    lattice, numbers, coords = arguments(name)
    check_cell(lattice, numbers, coords, "file")
    if name in ("Na", "Cs", "Ba", "Cu", "NaCl", "CsI", "Be"):
        for factor in (1 / BOHR_A, 10, 0.1, 0.4):
            with pytest.raises(TomatError, match="file: .*(closest atoms|A.3 per atom|apart).*`--accept distances`"):
                check_cell(lattice * factor, numbers, coords, "file")


def test_atoms_on_top_of_each_other_and_numbers_that_are_none():
    lattice, numbers, coords = arguments("NaCl")
    for overlapping in (coords[0], coords[0] + [1, -1, 0], coords[0] + [0.05, 0, 0]):
        moved = coords.copy()
        moved[5] = overlapping
        with pytest.raises(TomatError, match=r"Na \(atom 1\) and Cl \(6\) are .* A apart; expected"):
            check_cell(lattice, numbers, moved, "file")
    for bad in (np.nan, np.inf, 1e300):
        coords[0, 0] = bad
        with pytest.raises(TomatError, match="no plausible finite number"):
            check_cell(lattice, numbers, coords, "file")


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_nearest_distances_are_those_of_a_wide_search_in_any_cell(seed):
    rng = np.random.default_rng(seed)
    lattice = rng.uniform(-4, 4, (3, 3))
    lattice += np.diag(np.sign(np.diag(lattice)) * 3)
    if abs(np.linalg.det(lattice)) < 20:
        return
    coords = rng.uniform(-1, 2, (3, 3))
    skewed = np.array([[1, 0, 0], [rng.integers(-3, 4), 1, 0], [rng.integers(-3, 4), rng.integers(-3, 4), 1]])
    first, second, distance = neighbours(skewed @ lattice, coords @ np.linalg.inv(skewed))
    steps = np.array(list(np.ndindex(13, 13, 13))) - 6
    for i in range(3):
        apart = np.linalg.norm(((coords - coords[i])[:, None] + steps) @ lattice, axis=-1).ravel()
        nearest = np.sort(apart)[1:4]  # without itself
        np.testing.assert_allclose(np.sort(distance[first == i])[:3], nearest, atol=1e-9)


def test_shortest_distances_are_by_pair_of_elements():
    lattice, symbols, coords = KNOWN["NaCl"]
    numbers = np.array([atomic_number(symbol) for symbol in symbols])
    assert shortest_distances_a(lattice, numbers, np.array(coords)) == {
        (11, 11): pytest.approx(5.64 / 2**0.5),
        (11, 17): pytest.approx(2.82),
        (17, 17): pytest.approx(5.64 / 2**0.5),
    }
    lattice, _, coords = KNOWN["CsI"]  # eight neighbours of the other kind hide those of one's own
    assert shortest_distances_a(lattice, np.array([55, 53]), np.array(coords)) == {
        (53, 55): pytest.approx(4.567 * 0.75**0.5)
    }


def skews(rng):
    """A unimodular matrix."""
    whole = np.eye(3, dtype=int)
    for _ in range(rng.integers(0, 7)):
        i, j = rng.choice(3, 2, replace=False)
        whole[i] += int(rng.integers(-9, 10)) * whole[j]
    return whole


@given(st.integers(0, 10**6))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_reduced_basis_is_the_shortest_of_the_same_lattice(seed):
    rng = np.random.default_rng(seed)
    lattice = rng.normal(size=(3, 3)) * rng.choice([1, 1, 1, 20], (3, 1))
    if abs(np.linalg.det(lattice)) < 0.01:
        return
    skewed = skews(rng) @ lattice
    basis = reduced_basis(skewed)
    whole = np.linalg.solve(skewed.T, basis.T).T
    np.testing.assert_allclose(whole, np.round(whole), atol=1e-6)
    assert abs(round(np.linalg.det(whole))) == 1
    assert np.array_equal(reduced_basis(basis), basis)
    # The lengths are the successive minima, from all vectors of seven cells a side.
    vectors = np.array(list(np.ndindex(7, 7, 7))) @ basis - 3 * basis.sum(axis=0)
    shortest: list[np.ndarray] = []
    for vector in vectors[np.argsort(np.linalg.norm(vectors, axis=1))][1:]:
        if len(shortest) < 3 and np.linalg.matrix_rank([*shortest, vector], tol=1e-6) > len(shortest):
            shortest.append(vector)
    np.testing.assert_allclose(np.sort(np.linalg.norm(basis, axis=1)), np.linalg.norm(shortest, axis=1), rtol=1e-8)


def test_covalent_radii_are_pymatgens():
    from pymatgen.analysis.molecule_structure_comparator import CovalentRadius

    for symbol, radius in CovalentRadius.radius.items():
        assert covalent_radius_a(atomic_number(symbol)) == pytest.approx(radius)
    assert len(CovalentRadius.radius) == 96 and covalent_radius_a(len(SYMBOLS)) == covalent_radius_a(96)


def test_the_largest_void_is_that_of_geometry():
    face_centred = np.array([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]])
    for lattice, coords, radius_a in (
        (3.0 * np.eye(3), np.zeros((1, 3)), 1.5 * np.sqrt(3)),  # simple cubic: the body's centre
        (4.0 * face_centred, np.zeros((1, 3)), 2.0),  # the octahedral hole, half of the cube's side
        (5.0 * np.eye(3), np.array(BCC), 5.0 * np.sqrt(5) / 4),  # the tetrahedral hole
        (20.0 * np.eye(3), np.full((1, 3), 0.4), 10 * np.sqrt(3)),  # an atom in a box
        (np.diag([2.0, 2.0, 30.0]), np.array([[0.1, 0.2, 0.5]]), np.sqrt(1 + 1 + 15**2)),  # a layer in vacuum
    ):
        assert void_radius_a(lattice, coords) == pytest.approx(radius_a, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_a_fine_grid_approaches_whatever_the_cell_is_called(seed):
    random = np.random.default_rng(seed)
    lattice = np.diag(random.uniform(2, 9, 3)) + random.normal(0, 0.8, (3, 3))
    coords = random.random((int(random.integers(1, 6)), 3))
    radius_a = void_radius_a(lattice, coords)
    on_grid = nearest_atom_a(lattice, coords, (40, 40, 40))
    step = np.linalg.norm(lattice, axis=1).sum() / 80
    assert on_grid.max() - 1e-5 <= radius_a <= on_grid.max() + step
    skewed = np.array([[1, 0, 0], [3, 1, 0], [-2, 4, 1]])  # the same crystal by other vectors
    assert void_radius_a(skewed @ lattice, coords @ np.linalg.inv(skewed)) == pytest.approx(radius_a, rel=1e-9)


def test_a_voxel_is_as_far_as_its_nearest_image():
    found = nearest_atom_a(np.diag([4.0, 5.0, 6.0]), np.array([[0.9, 0.0, 0.0]]), (4, 5, 6))
    assert found.shape == (4, 5, 6)
    assert found[0, 0, 0] == pytest.approx(0.4) and found[2, 0, 0] == pytest.approx(1.6)
    assert found[0, 3, 3] == pytest.approx(np.sqrt(0.4**2 + 2**2 + 3**2))
