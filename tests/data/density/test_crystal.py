import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal

LATTICES = {
    "cubic": np.diag([4.0, 4.0, 4.0]),
    "flat and wide": np.diag([2.2, 9.0, 3.0]),
    "skewed": np.array([[3.0, 0.2, 0.0], [2.5, 2.0, 0.3], [-2.0, 1.5, 4.0]]),
    "left-handed": np.array([[0.0, 3.0, 0.4], [3.5, 0.0, 0.0], [0.5, 0.3, 5.0]]),
}


@pytest.mark.parametrize("lattice", LATTICES.values(), ids=LATTICES)
def test_atoms_near_a_box_are_those_of_all_images(lattice):
    rng = np.random.default_rng(0)
    crystal = Crystal(lattice, np.array([3, 8, 17]), rng.uniform(-2, 3, (3, 3)))
    images = np.array(list(np.ndindex(33, 33, 33))) - 16
    everywhere = (crystal.frac_coords[:, None] + images).reshape(-1, 3) @ lattice
    numbers = np.repeat(crystal.atomic_numbers, len(images))
    for _ in range(4):
        origin, edges = rng.uniform(-6, 6, 3), rng.uniform(-1.5, 1.5, (3, 3))
        found, positions = crystal.near_box(origin, edges, 3.0)
        centre = origin + edges.sum(axis=0) / 2
        corners = np.array(list(np.ndindex(2, 2, 2))) @ edges + origin
        reach = 3.0 + np.linalg.norm(corners - centre, axis=1).max()
        distance = np.linalg.norm(everywhere - centre, axis=1)
        near = np.flatnonzero(distance < reach)
        near = near[np.argsort(distance[near], kind="stable")]
        assert len(found) == len(near) > 5
        np.testing.assert_array_equal(found, numbers[near])
        np.testing.assert_allclose(positions + origin, everywhere[near], atol=1e-9)
        # None is missing that a point of the box is within the radius of.
        inside = origin + rng.uniform(0, 1, (50, 3)) @ edges
        seen = (np.linalg.norm(everywhere[:, None] - inside, axis=-1) < 3.0).any(axis=1)
        assert set(np.flatnonzero(seen)) <= set(near.tolist())


def test_a_very_skewed_cell_sees_what_the_plain_one_does():
    """100,000 steps of a along b: counted along these axes, a box of 3 A had 10^11 images and the process no end."""
    rng = np.random.default_rng(0)
    plain = np.diag([3.0, 3.1, 3.2])
    whole = np.array([[1, 0, 0], [100_000, 1, 0], [0, -7, 1]])
    coords = rng.uniform(0, 1, (3, 3))
    numbers = np.array([3, 8, 17])
    skewed = Crystal(whole @ plain, numbers, coords @ np.round(np.linalg.inv(whole)))
    for _ in range(5):
        box = rng.uniform(-6, 6, 3), rng.uniform(-1.5, 1.5, (3, 3)), 3.0
        (found, positions), (expected, places) = skewed.near_box(*box), Crystal(plain, numbers, coords).near_box(*box)
        assert len(found) == len(expected) > 5
        np.testing.assert_allclose(positions, places, atol=1e-5)
        np.testing.assert_array_equal(found, expected)


def test_a_box_that_spans_too_many_cells_is_refused():
    crystal = Crystal(np.diag([3.0, 3.0, 3.0]), np.array([3]), np.zeros((1, 3)), "Li")
    with pytest.raises(TomatError, match="'Li': a box with edges of up to 3e.04 A sees 1e.12 atoms"):
        crystal.near_box(np.zeros(3), np.diag([3.0, 3e4, 3.0]), 3.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lattice": np.eye(2)}, "3 row vectors, found shape"),
        ({"lattice": np.zeros((3, 3))}, "'NaCl': the cell volume is 0 A.3; expected at least 1"),
        ({"lattice": np.full((3, 3), np.nan)}, "finite lattice"),
        ({"lattice": np.diag([1e7, 5.0, 5.0])}, r"up to 1e\+07 A \(at most 1e\+06\)"),
        ({"atomic_numbers": np.array([11, 119])}, "expected 1..118"),
        ({"atomic_numbers": np.array([], int), "frac_coords": np.empty((0, 3))}, "no atoms"),
        ({"frac_coords": np.zeros((3, 3))}, "2 atoms, coordinates of shape"),
        ({"frac_coords": np.array([[0, 0, 0], [0, np.inf, 0]])}, r"expected finite \[n, 3\]"),
    ],
)
def test_what_is_no_crystal_is_refused(change, message):
    values = {"lattice": 5.6 * np.eye(3), "atomic_numbers": [11, 17], "frac_coords": [[0, 0, 0], [0.5, 0.5, 0.5]]}
    with pytest.raises(TomatError, match=message):
        Crystal(**(values | change), name="NaCl")
