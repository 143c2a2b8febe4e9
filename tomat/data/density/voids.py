"""How far a cell reaches from its atoms: its largest void, and the distance of every voxel."""

import numpy as np

from tomat.data.density.geometry import atoms_and_images

_VOID_STEP_A, _VOID_STEPS = 1.0, 24
"""Between the points of a cell, and the most of them along a side, whose distances bound its largest void."""
_ON_FACE = 1e-6
"""Fraction of a cell by which rounding may put a corner of a Voronoi cell outside."""


def void_radius_a(lattice: np.ndarray, frac_coords: np.ndarray) -> float:
    """The farthest that any point of the cell is from its nearest atom: the radius of the largest sphere that holds no
    nucleus.

    Its centre is a corner of the atoms' Voronoi cells. `frac_coords`: `[n, 3]`, at least one.
    """
    from scipy.spatial import KDTree, Voronoi

    basis, _, images = atoms_and_images(lattice, frac_coords)
    inverse = np.linalg.inv(basis)
    lengths = np.linalg.norm(basis, axis=1)
    x, y, z = np.clip(np.ceil(lengths / _VOID_STEP_A).astype(int), 1, _VOID_STEPS).tolist()
    # No point is farther from one of these than half of the steps along the three axes, so none farther from an atom
    # than this; what lies farther from the cell has no part in its voids.
    bound_a = float(
        nearest_atom_a(lattice, frac_coords, (x, y, z), basis).max() + (lengths / (2 * x, 2 * y, 2 * z)).sum()
    )
    margin = (bound_a + _VOID_STEP_A) * np.linalg.norm(inverse, axis=0)
    fractions = images @ inverse
    near = images[((fractions >= -margin) & (fractions <= 1 + margin)).all(axis=1)]
    corners = Voronoi(near).vertices
    fractions = corners @ inverse
    inside = ((fractions > -_ON_FACE) & (fractions < 1 + _ON_FACE)).all(axis=1)
    return float(KDTree(near).query(corners[inside])[0].max())


def nearest_atom_a(
    lattice: np.ndarray,
    frac_coords: np.ndarray,
    grid_shape: tuple[int, int, int],
    sides: np.ndarray | None = None,
) -> np.ndarray:
    """The distance of every voxel to its nearest atom, periodic images too: float32 `grid_shape`, A.

    Args:
        grid_shape: voxels along a, b, c; the first one at the origin.
        sides: `[3, 3]`, a, b, c of the voxels in A; None: the lattice.
    """
    from scipy.spatial import KDTree

    basis, _, images = atoms_and_images(lattice, frac_coords)
    tree, inverse = KDTree(images), np.linalg.inv(basis)
    found = np.empty(grid_shape, np.float32)
    a, b, c = lattice if sides is None else sides
    plane = (np.arange(grid_shape[1]) / grid_shape[1])[:, None, None] * b + (np.arange(grid_shape[2]) / grid_shape[2])[
        :, None
    ] * c
    for index in range(grid_shape[0]):
        fractions = (index / grid_shape[0] * a + plane) @ inverse
        found[index] = tree.query((fractions - np.floor(fractions)) @ basis)[0]
    return found
