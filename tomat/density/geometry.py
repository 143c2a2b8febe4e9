"""Can these atoms be in this cell? Volume and distances tell a lattice in another unit, and overlapping atoms."""

import numpy as np

from tomat.base.errors import TomatError
from tomat.density.elements import covalent_radius_a, symbol_of

LEAST_VOLUME_PER_ATOM_A3 = 1.0
"""Diamond, the densest element at ambient pressure, has 5.7 A^3; hydrogen at 500 GPa has 1.15 (r_s = 1.23 bohr,
McMahon and Ceperley, Phys. Rev. Lett. 106, 165302, 2011)."""

MOST_VOLUME_PER_ATOM_A3 = 10_000.0
"""One atom in a box of 21.5 A, more than reference calculations of atoms and slabs with vacuum take."""

SHORTEST_DISTANCE_A = 0.5
"""The shortest bond of all, that of H2, is 0.741 A (Huber and Herzberg, Constants of Diatomic Molecules, 1979)."""

SHORTEST_SHARE = 0.6
"""Of the sum of two covalent radii. Short multiple bonds have 0.77 (N2: 1.10 A of 1.42) and 0.68 (uranyl: 1.77 A of
2.62), caesium at 12 GPa 0.68."""

LONGEST_SHARE = 1.5
"""Of the sum of two covalent radii, for the closest pair of a cell. Metals have up to 1.16 (Be: 2.22 A of 1.92), F2 has
1.25. A lattice in bohr read as angstrom is 1.89 times too long, which makes the closest pair of every solid without a
multiple bond longer than this."""

BOHR_A = 0.529177210903
"""CODATA 2018."""

_NOBLE_GASES = (2, 10, 18, 36, 54, 86, 118)
_NEIGHBOURS = 8
_VOID_STEP_A, _VOID_STEPS = 1.0, 24
"""Between the points of a cell, and the most of them along a side, whose distances bound its largest void."""
_ON_FACE = 1e-6
"""Fraction of a cell by which rounding may put a corner of a Voronoi cell outside."""


def check_cell(lattice: np.ndarray, atomic_numbers: np.ndarray, frac_coords: np.ndarray, source: str) -> None:
    """Refuse a cell that holds no such atoms.

    Args:
        lattice: `[3, 3]`, rows in A.
        atomic_numbers: `[n]`.
        frac_coords: `[n, 3]`.

    Raises:
        TomatError: too little or too much volume for an atom, atoms on top of each other, or atoms of which none is
            near enough to another to be bound.
    """
    if not np.isfinite(lattice).all() or not np.isfinite(frac_coords).all() or np.abs(frac_coords).max() > 1000:
        raise TomatError(f"{source}: the lattice or a coordinate is no plausible finite number; the file is damaged.")
    hint = "Is the lattice in angstrom, and not in bohr or scaled? `--accept distances` reads it as it is."
    per_atom = abs(float(np.linalg.det(lattice))) / len(atomic_numbers)
    if not LEAST_VOLUME_PER_ATOM_A3 <= per_atom <= MOST_VOLUME_PER_ATOM_A3:
        raise TomatError(
            f"{source}: the cell has {per_atom:.4g} A^3 for an atom; expected {LEAST_VOLUME_PER_ATOM_A3:g} to "
            f"{MOST_VOLUME_PER_ATOM_A3:g}. {hint}"
        )
    first, second, distance_a = _neighbours(lattice, frac_coords)
    radii = np.array([covalent_radius_a(int(number)) for number in atomic_numbers])
    sums = radii[first] + radii[second]
    too_close = distance_a < np.maximum(SHORTEST_DISTANCE_A, SHORTEST_SHARE * sums)
    if too_close.any():
        worst = int(np.argmin(np.where(too_close, distance_a / sums, np.inf)))
        i, j = int(first[worst]), int(second[worst])
        names = f"{symbol_of(int(atomic_numbers[i]))} (atom {i + 1}) and {symbol_of(int(atomic_numbers[j]))} ({j + 1})"
        raise TomatError(
            f"{source}: {names} are {distance_a[worst]:.3g} A apart; expected at least "
            f"{max(SHORTEST_DISTANCE_A, SHORTEST_SHARE * float(sums[worst])):.3g} A. {hint}"
        )
    nearest = float((distance_a / sums).min())
    if nearest > LONGEST_SHARE and not np.isin(atomic_numbers, _NOBLE_GASES).all():
        worst = int(np.argmin(distance_a / sums))
        raise TomatError(
            f"{source}: the closest atoms are {distance_a[worst]:.3g} A apart, {nearest:.3g} times the sum of their "
            f"covalent radii; expected a pair within {LONGEST_SHARE:g} times. {hint}"
        )


def shortest_distances_a(
    lattice: np.ndarray, atomic_numbers: np.ndarray, frac_coords: np.ndarray
) -> dict[tuple[int, int], float]:
    """The shortest distance of each pair of elements that are neighbours, periodic images too.

    The eight nearest atoms of every atom are looked at; a pair of elements that is nowhere among them is left out.

    Args:
        lattice: `[3, 3]`, rows in A.
        atomic_numbers: `[n]`.
        frac_coords: `[n, 3]`.

    Returns:
        By pair of atomic numbers, the lower one first: A.
    """
    first, second, distance_a = _neighbours(lattice, frac_coords)
    numbers = np.asarray(atomic_numbers)
    pairs = np.sort(np.stack([numbers[first], numbers[second]], axis=1), axis=1)
    found: dict[tuple[int, int], float] = {}
    for low, high in np.unique(pairs, axis=0).tolist():
        found[low, high] = float(distance_a[(pairs == (low, high)).all(axis=1)].min())
    return found


def void_radius_a(lattice: np.ndarray, frac_coords: np.ndarray) -> float:
    """The farthest that any point of the cell is from its nearest atom: the radius of the largest sphere that holds no
    nucleus.

    Its centre is a corner of the atoms' Voronoi cells.

    Args:
        lattice: `[3, 3]`, rows in A.
        frac_coords: `[n, 3]`, at least one.

    Returns:
        A.
    """
    from scipy.spatial import KDTree, Voronoi

    basis, _, images = _images(lattice, frac_coords)
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
    """The distance of every voxel to its nearest atom, periodic images too.

    Args:
        lattice: `[3, 3]`, rows in A.
        frac_coords: `[n, 3]`.
        grid_shape: voxels along a, b, c; the first one at the origin.
        sides: `[3, 3]`, a, b, c of the voxels in A; None: the lattice.

    Returns:
        float32 `grid_shape`, A.
    """
    from scipy.spatial import KDTree

    basis, _, images = _images(lattice, frac_coords)
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


def _neighbours(lattice: np.ndarray, frac_coords: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The nearest atoms of every atom, periodic images among them: indices of both, and the distance in A."""
    from scipy.spatial import KDTree

    n_atoms = len(frac_coords)
    _, cartesian, images = _images(lattice, frac_coords)
    count = min(_NEIGHBOURS + 1, len(images))
    distance, index = KDTree(images).query(cartesian, k=count)
    own = index == np.arange(n_atoms)[:, None]
    first = np.broadcast_to(np.arange(n_atoms)[:, None], index.shape)[~own]
    return first, index[~own] % n_atoms, distance[~own]


def _images(lattice: np.ndarray, frac_coords: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A reduced basis, the atoms in its cell, and these with their images, the cell itself first."""
    basis = _reduced(lattice)
    fractions = frac_coords @ lattice @ np.linalg.inv(basis)
    cartesian = (fractions - np.floor(fractions)) @ basis
    # In a reduced basis the images of the 26 cells around hold the nearest neighbours; a second shell is for safety.
    shells = 2 if len(frac_coords) <= 1000 else 1
    steps = np.array(list(np.ndindex(*[2 * shells + 1] * 3))) - shells
    steps = steps[np.argsort(np.abs(steps).sum(axis=1), kind="stable")]
    return basis, cartesian, (cartesian[None] + (steps @ basis)[:, None]).reshape(-1, 3)


def _reduced(lattice: np.ndarray) -> np.ndarray:
    """A basis of the same lattice whose vectors are pairwise as short as they can be."""
    basis = np.array(lattice, dtype=np.float64)
    for _ in range(100):
        changed = False
        for i in range(3):
            for j in range(3):
                times = round(float(basis[i] @ basis[j]) / float(basis[j] @ basis[j])) if i != j else 0
                if times and np.linalg.norm(basis[i] - times * basis[j]) < np.linalg.norm(basis[i]) * (1 - 1e-9):
                    basis[i] -= times * basis[j]
                    changed = True
        if not changed:
            break
    return basis
