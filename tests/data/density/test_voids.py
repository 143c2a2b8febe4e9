"""The largest void of a cell, and how far voxels are from atoms."""

import numpy as np
import pytest

from tomat.data.density.voids import nearest_atom_a, void_radius_a

CUBE = np.eye(3)
FCC = np.array([[0.0, 0.5, 0.5], [0.5, 0.0, 0.5], [0.5, 0.5, 0.0]])
ORIGIN = np.zeros((1, 3))


@pytest.mark.parametrize(
    ("lattice", "coords", "radius_a"),
    [
        (3.0 * CUBE, ORIGIN, 1.5 * np.sqrt(3)),  # simple cubic: the body's centre
        (4.0 * FCC, ORIGIN, 2.0),  # the octahedral hole, half of the cube's side
        (5.0 * CUBE, np.array([[0, 0, 0], [0.5, 0.5, 0.5]]), 5.0 * np.sqrt(5) / 4),  # bcc: the tetrahedral hole
        (20.0 * CUBE, np.full((1, 3), 0.4), 10 * np.sqrt(3)),  # an atom in a box
        (np.diag([2.0, 2.0, 30.0]), np.array([[0.1, 0.2, 0.5]]), np.sqrt(1 + 1 + 15**2)),  # a layer in vacuum
    ],
)
def test_the_largest_void_is_that_of_geometry(lattice, coords, radius_a):
    assert void_radius_a(lattice, coords) == pytest.approx(radius_a, rel=1e-9)


@pytest.mark.parametrize("seed", range(6))
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
