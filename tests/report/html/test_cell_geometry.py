"""The geometry of the pages' densities, as V8 runs it: surfaces are closed, slices and atoms are where they belong."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from py_mini_racer import MiniRacer
from scipy.ndimage import map_coordinates
from scipy.spatial import KDTree

from tomat.report.html.document import asset

ON_AN_EDGE = 1e-6
"""Share of the cell within which an atom is drawn on an edge, and on the opposite one too."""

leaning = st.lists(st.floats(-1, 1), min_size=9, max_size=9).map(lambda x: np.reshape(x, (3, 3)) + 4 * np.eye(3))
"""Cells with angles on both sides of 90 degrees, none of them flat: diagonals of 3 to 5 A."""
LEANING = np.array([[5.0, 0.3, -0.2], [1.4, 4.6, 0.0], [-0.9, 0.8, 4.8]])
sides = st.tuples(*[st.integers(1, 5)] * 3)
seeds = st.integers(0, 999)


@pytest.fixture(scope="module")
def call():
    """Runs a function of the asset; left open, V8 would keep Python from ending."""
    with MiniRacer() as context:
        context.eval(asset("cell_geometry.js"))

        def run(name, *given):
            written = ",".join(json.dumps(one, default=np.ndarray.tolist) for one in given)
            return context.execute(f"cellGeometry.{name}({written})", timeout_sec=20)

        yield run


def surface(call, values, lattice, level):
    """Vertices `[n, 3]` and triangles `[m, 3]`."""
    found = call("surface", values.ravel(), values.shape, lattice, level)
    vertices, triangles = ([found[name] for name in names] for names in ("xyz", "ijk"))
    return np.reshape(vertices, (3, -1)).T, np.reshape(triangles, (3, -1)).T.astype(int)


def volume(vertices, triangles):
    """Enclosed by a surface whose fronts look out (divergence theorem)."""
    u, v, w = np.moveaxis(vertices[triangles], 1, 0)
    return float(np.sum(u * np.cross(v, w)) / 6)


def edges(triangles):
    """Each triangle's edges, in the direction in which it goes round them."""
    return Counter((t[n], t[(n + 1) % 3]) for t in triangles.tolist() for n in range(3))


def assert_same_spots(found, expected):
    """In any order."""
    for some, others in ((found, expected), (expected, found)) if len(expected) else ():
        assert KDTree(others).query(some)[0].max() < 1e-9


@settings(max_examples=30, deadline=None)
@given(sides, seeds, leaning, st.sampled_from([0.5, 1.1]), st.booleans())
def test_a_surface_is_closed_within_the_cell_or_goes_on_in_the_next_one(call, shape, seed, lattice, level, within):
    values = np.pad(np.random.default_rng(seed).random(shape), [(int(within), 0)] * 3)
    vertices, triangles = surface(call, values, lattice, level)
    found = edges(triangles)
    if within:  # every edge is gone through once in each direction: by two triangles whose fronts are on one side
        assert set(found.values()) <= {1} and all((end, start) in found for start, end in found)
        assert set(triangles.ravel()) == set(range(len(vertices))) and volume(vertices, triangles) >= 0
        assert bool(len(triangles)) == bool(np.any(values > level))
    places = np.round(vertices @ np.linalg.inv(lattice) * 1e7).astype(int) % 10**7
    net = Counter()
    for (start, end), count in found.items():
        start, end = tuple(places[start].tolist()), tuple(places[end].tolist())
        if start != end:
            net[min(start, end), max(start, end)] += count if start < end else -count
    assert not any(net.values())


@settings(max_examples=25, deadline=None)
@given(sides, seeds, leaning)
def test_vertices_are_where_the_level_is_passed_between_neighbouring_points(call, shape, seed, lattice):
    values = np.random.default_rng(seed).random(shape)
    vertices, _ = surface(call, values, lattice, 0.5)
    cell, expected = np.pad(values, [(0, 1)] * 3, mode="wrap"), []
    # Cubes are cut along their sides, the diagonals of their faces and one of their own.
    for step in itertools.product((0, 1), repeat=3):
        for start in np.ndindex(*[n - s for n, s in zip(cell.shape, step, strict=True)]):
            low, high = cell[start], cell[tuple(np.add(start, step))]
            if (low > 0.5) != (high > 0.5):
                expected.append((start + np.multiply(step, (0.5 - low) / (high - low))) / shape)
    # In whichever cell the piece is drawn that they are of.
    circle = [2 * np.pi * np.reshape(shares, (-1, 3)) for shares in (vertices @ np.linalg.inv(lattice), expected)]
    assert_same_spots(*(np.hstack([np.cos(angles), np.sin(angles)]) for angles in circle))


def test_the_enclosed_volume_nears_the_true_one_with_the_square_of_the_spacing(call):
    errors = []
    for n in (14, 28):  # of the ball within which a Gaussian exceeds 0.3
        places = np.stack(np.meshgrid(*[np.arange(n) / n - 0.5] * 3, indexing="ij"), -1) @ LEANING
        found = volume(*surface(call, np.exp(-np.sum(places**2, -1)), LEANING, 0.3))
        errors.append(found / (4 / 3 * np.pi * np.log(1 / 0.3) ** 1.5) - 1)
    assert abs(errors[1]) < 0.02 and 3 < errors[0] / errors[1] < 5


def directions(lattice, axis):
    """The plane's axes in a picture: along the first of its cell vectors, across it, and away from the plane."""
    first, second = np.delete(lattice, axis, axis=0)
    along = first / np.linalg.norm(first)
    up = second - second @ along * along
    up /= np.linalg.norm(up)
    return np.array([along, up, np.cross(along, up)])


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([0, 1, 2]), st.integers(0, 4), sides, seeds, leaning)
def test_a_slice_is_interpolated_and_ends_with_the_cell(call, axis, plane, shape, seed, lattice):
    plane %= shape[axis]
    values, item = np.random.default_rng(seed).random(shape), {"shape": shape, "lattice": lattice}
    frame = call("frame", item, axis)
    found = np.array(call("picture", item, values.ravel(), axis, plane, shape), float)  # None becomes NaN
    across, up = np.meshgrid(frame["x"], frame["y"])
    spots = across[..., None] * directions(lattice, axis)[0] + up[..., None] * directions(lattice, axis)[1]
    places = spots @ np.linalg.inv(lattice)
    within = np.delete(places, axis, -1)
    outside = np.any((within < -1e-5) | (within > 1 + 1e-5), -1)
    inside = np.all((within > 1e-9) & (within < 1 - 1e-9), -1)
    assert np.all(np.isnan(found[outside])) and inside.sum() > 1000
    places[..., axis] = plane / shape[axis]
    expected = map_coordinates(values, np.moveaxis(places * shape, -1, 0), order=1, mode="grid-wrap")
    assert np.allclose(found[inside], expected[inside], rtol=0, atol=1e-9)
    # The picture holds the whole cell.
    corners = [np.delete(lattice, axis, axis=0).T @ corner for corner in itertools.product((0, 1), repeat=2)]
    for line, along in zip((frame["x"], frame["y"]), directions(lattice, axis), strict=False):
        assert line[0] <= min(corners @ along) + 1e-9 and line[-1] >= max(corners @ along) - 1e-9


fractions = st.sampled_from([0.0, 0.25, 0.5, 1.0, 1 - 1e-9, -1e-9]) | st.floats(-0.5, 1.5)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from([0, 1, 2]), leaning, st.lists(st.tuples(*[fractions] * 3), min_size=1, max_size=4),
    st.integers(0, 3), st.floats(0.05, 0.6),
)  # fmt: skip
def test_atoms_near_a_slice_stand_straight_above_it(call, axis, lattice, atoms, plane, near):
    item = {"shape": [4] * 3, "lattice": lattice, "frac_coords": atoms, "symbols": [str(n) for n in range(len(atoms))]}
    found = call("atomsNear", item, axis, plane, near)
    drawn = np.reshape([found["x"], found["y"]], (2, -1)).T
    axes, back = directions(lattice, axis), np.linalg.inv(lattice)
    shifts = np.array(list(itertools.product(range(-4, 5), repeat=3)))
    for atom, place in enumerate(atoms):
        spots = (place + shifts - np.eye(3)[axis] * plane / 4) @ lattice
        away = spots @ axes[2]
        feet = spots - np.outer(away, axes[2])
        outside = np.max(np.abs(np.delete(feet @ back, axis, -1) - 0.5), -1) - 0.5
        is_near = np.abs(away) < near
        assume(np.all(np.abs(np.abs(away) - near) > 1e-7) and np.all(np.abs(outside[is_near] - ON_AN_EDGE) > 1e-8))
        expected = (feet @ axes[:2].T)[is_near & (outside < ON_AN_EDGE)]
        mine = drawn[[text == str(atom) for text in found["text"]]]
        assert len(mine) == len(expected)
        assert_same_spots(mine, expected)


def test_atoms_on_faces_edges_and_corners_are_repeated(call):
    found = call("repeated", [[0, 0, 0], [0.5, 0.5, 0], [0.25, -0.25, 1.5], [1 - 1e-9, 0.3, 0.3]])
    assert Counter(each["n"] for each in found) == {0: 8, 1: 2, 2: 1, 3: 2}
    assert [each["f"] for each in found if each["n"] == 2] == [[0.25, 0.75, 0.5]]


def test_bonds_are_between_neighbours_and_half_of_a_density_is_above_its_level(call):
    spots = np.array([[0, 0, 0], [2.1, 0, 0], [4.2, 0, 0], [0, 9, 0]])  # Mg O Mg, and Mg far away
    assert call("bonds", spots, [1.41, 0.66, 1.41, 1.41]) == [[0, 1], [1, 2]]
    assert call("bonds", spots[[0, 2]] / 1.4, [1.41, 1.41]) == [[0, 1]], "of a metal"
    values = np.random.default_rng(0).random(5000) ** 3
    level = call("halfLevel", values)
    assert abs(values[values >= level].sum() / values.sum() - 0.5) < 2e-3


@pytest.mark.parametrize(
    ("lattice", "centres", "images"),
    [
        (LEANING, [(0, 0, 0)], 8), (LEANING, [(0.5, 0.5, 0)], 2), (LEANING, [(0.3, 0.4, 0.6)], 1),
        # A primitive cell: no plane of it is free of both balls.
        (2.7 * (1 - np.eye(3)), [(0, 0, 0), (0.5, 0.5, 0.5)], 9),
    ],
)  # fmt: skip
def test_what_lies_around_an_atom_on_a_face_is_drawn_whole(call, lattice, centres, images):
    """Balls in a leaning cell, wherever they are: closed, and as large as they are, at each place of their atoms."""
    shape, values = (24, 22, 26), 0.0
    for centre in centres:
        apart = np.stack(np.meshgrid(*[np.arange(n) / n for n in shape], indexing="ij"), -1) - centre
        near = [apart - np.round(apart) + step for step in itertools.product((-1, 0, 1), repeat=3)]
        values = np.maximum(values, np.exp(-np.min([np.sum((one @ lattice) ** 2, -1) for one in near], 0)))
    vertices, triangles = surface(call, values, lattice, 0.3)
    around = edges(triangles)
    assert all(around[b, a] == n for (a, b), n in around.items()), "closed"
    ball = 4 / 3 * np.pi * np.log(1 / 0.3) ** 1.5
    assert volume(vertices, triangles) / ball == pytest.approx(images, rel=0.03)


def test_what_goes_on_from_cell_to_cell_ends_at_its_faces_alone_along_those_axes(call):
    """The two sides of a sheet on the bottom of a cell that leans, each drawn with its middle in the cell."""
    shape, high = (8, 7, 30), np.arange(30) / 30
    values = np.broadcast_to(np.exp(-((5 * (high - np.round(high))) ** 2)), shape)
    vertices, triangles = surface(call, values, LEANING, 0.3)
    shares = vertices @ np.linalg.inv(LEANING)
    around, on_a_face = edges(triangles), np.abs(shares[:, :2] - np.round(shares[:, :2])) < 1e-9
    rims = [edge for edge, n in around.items() if around[edge[::-1]] != n]
    assert rims and all(on_a_face[list(rim)].all(0).any() for rim in rims)
    assert np.allclose([shares[:, :2].min(), shares[:, :2].max()], [0, 1])
    thick = np.sqrt(np.log(1 / 0.3)) / 5
    assert np.allclose(np.unique(np.round(shares[:, 2], 2)), np.round([thick, 1 - thick], 2))
