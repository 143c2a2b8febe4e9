"""Can these atoms be in this cell? Volume and distances reveal a lattice in another unit, and overlapping atoms."""

import itertools

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.elements import SYMBOLS, covalent_radius_a, symbol_of

SMALLEST_CELL_VOLUME_A3 = 1.0
"""A cell below this holds no atom: the densest elemental solid, diamond, has 5.7 A^3 an atom."""

LEAST_VOLUME_PER_ATOM_A3 = 1.0
"""Diamond, the densest element at ambient pressure, has 5.7 A^3; hydrogen at 500 GPa has 1.15 (r_s = 1.23 bohr,
McMahon and Ceperley, Phys. Rev. Lett. 106, 165302, 2011)."""

MOST_VOLUME_PER_ATOM_A3 = 10_000.0
"""One atom in a box of 21.5 A, more than reference calculations of atoms and slabs with vacuum take."""

SHORTEST_DISTANCE_A = 0.5
"""The shortest bond of all, that of H2, is 0.741 A (Huber and Herzberg, Constants of Diatomic Molecules, 1979)."""

SHORTEST_SHARE = 0.6
"""Least distance over the sum of covalent radii. N2 has 0.77 (1.10 A of 1.42); uranyl, and Cs at 12 GPa, have 0.68."""

LONGEST_SHARE = 1.5
"""Most distance over the sum of covalent radii, for the closest pair of a cell. Metals have up to 1.16 (Be: 2.22 A of
1.92), F2 has 1.25. A lattice in bohr read as angstrom is 1.89 times too long, so that the closest pair of every solid
without a multiple bond is longer than this."""

LARGEST_FILLING = 2.0
"""Most volume of the atoms, as spheres of their covalent radii, over the volume of the cell. Caesium fluoride has 1.14,
barium oxide 1.0, metals 0.5, diamond 0.3. A lattice in A that is taken for bohr has 6.75 times as much, while the
distances of a metal or a salt (1.1 to 1.2 sums of radii) still pass `SHORTEST_SHARE`."""

BOHR_A = 0.529177210903
"""CODATA 2018."""

LARGEST_LENGTH_A = 1e6
"""Largest number of a lattice: a cell of 10,000 atoms has sides of some 100 A; products of larger numbers overflow."""

_NOBLE_GASES = (2, 10, 18, 36, 54, 86, 118)
_NEIGHBOURS = 8
_MOST_REDUCTIONS = 200
"""Most rounds of `reduced_basis`. Each round shortens a vector; a skew of 1e15 takes 5."""
_MOST_DISTANCES = 1_000_000
"""Up to this many (89 atoms, 60 ms) all distances are computed; the first import of `scipy.spatial` takes 1 s."""


def checked_cell(
    where: str, lattice: np.ndarray, atomic_numbers: np.ndarray, frac_coords: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A cell and its atoms as read-only arrays: float64 `[3, 3]`, int64 `[n]` and float64 `[n, 3]`."""
    lattice = np.array(lattice, dtype=np.float64)
    numbers = np.array(atomic_numbers, dtype=np.int64).reshape(-1)
    coords = np.array(frac_coords, dtype=np.float64).reshape(-1, 3)
    # NaN is refused too: it fails every comparison.
    if lattice.shape != (3, 3) or not (np.abs(lattice) < LARGEST_LENGTH_A).all():
        raise TomatError(
            f"{where}: expected a finite lattice of 3 row vectors, found shape {lattice.shape} with numbers up to "
            f"{np.abs(lattice).max(initial=0):.4g} A (at most {LARGEST_LENGTH_A:g})."
        )
    volume_a3 = abs(float(np.linalg.det(lattice)))
    if volume_a3 < SMALLEST_CELL_VOLUME_A3:
        raise TomatError(f"{where}: the cell volume is {volume_a3:.3g} A^3; expected at least 1. Check its unit.")
    if numbers.size and (numbers.min() < 1 or numbers.max() > len(SYMBOLS)):
        raise TomatError(f"{where}: atomic numbers {numbers.min()}..{numbers.max()}, expected 1..{len(SYMBOLS)}.")
    if len(coords) != numbers.size or not np.isfinite(coords).all():
        raise TomatError(f"{where}: {numbers.size} atoms, coordinates of shape {coords.shape}; expected finite [n, 3].")
    for array in (lattice, numbers, coords):
        array.setflags(write=False)
    return lattice, numbers, coords


def check_cell(lattice: np.ndarray, atomic_numbers: np.ndarray, frac_coords: np.ndarray, source: str) -> None:
    # NaN is refused too: it fails every comparison.
    if not (np.abs(lattice) < LARGEST_LENGTH_A).all() or not (np.abs(frac_coords) <= 1000).all():
        raise TomatError(f"{source}: the lattice or a coordinate is no plausible finite number; the file is damaged.")
    hint = "Is the lattice in angstrom, and not in bohr or scaled? `--accept distances` reads it as it is."
    per_atom = abs(float(np.linalg.det(lattice))) / len(atomic_numbers)
    found = f"{source}: the cell has {per_atom:.4g} A^3 per atom"
    if not LEAST_VOLUME_PER_ATOM_A3 <= per_atom <= MOST_VOLUME_PER_ATOM_A3:
        raise TomatError(f"{found}; expected {LEAST_VOLUME_PER_ATOM_A3:g} to {MOST_VOLUME_PER_ATOM_A3:g}. {hint}")
    radii = np.array([covalent_radius_a(int(number)) for number in atomic_numbers])
    filling = float((radii**3).sum()) * 4 / 3 * np.pi / (per_atom * len(atomic_numbers))
    if filling > LARGEST_FILLING:
        raise TomatError(
            f"{found}, spheres of covalent radius fill it {filling:.2g} times; expected {LARGEST_FILLING:g} at most. "
            "Are lengths in A taken for bohr (in a cube, write its numbers of voxels as negative)? "
            "`--accept distances` reads it as it is."
        )
    first, second, distance_a = neighbours(lattice, frac_coords)
    sums = radii[first] + radii[second]
    too_close = distance_a < np.maximum(SHORTEST_DISTANCE_A, SHORTEST_SHARE * sums)
    if too_close.any():
        worst = int(np.argmin(np.where(too_close, distance_a / sums, np.inf)))
        i, j = int(first[worst]), int(second[worst])
        names = f"{symbol_of(int(atomic_numbers[i]))} (atom {i + 1}) and {symbol_of(int(atomic_numbers[j]))} ({j + 1})"
        least = max(SHORTEST_DISTANCE_A, SHORTEST_SHARE * float(sums[worst]))
        raise TomatError(
            f"{source}: {names} are {distance_a[worst]:.3g} A apart; expected at least {least:.3g}. {hint}"
        )
    closest = int(np.argmin(distance_a / sums))
    share = float(distance_a[closest] / sums[closest])
    if share > LONGEST_SHARE and not np.isin(atomic_numbers, _NOBLE_GASES).all():
        raise TomatError(
            f"{source}: the closest atoms are {distance_a[closest]:.3g} A apart, {share:.3g} times the sum of their "
            f"covalent radii; expected a pair within {LONGEST_SHARE:g} times. {hint}"
        )


def lattice_parameters(lattice: np.ndarray) -> tuple[float, float, float, float, float, float]:
    """a, b, c in A and alpha (b, c), beta (a, c), gamma (a, b) in degrees, of rows a, b, c in A."""
    lengths = np.linalg.norm(lattice, axis=1)
    unit = lattice / lengths[:, None]
    cosines = np.clip(np.array([unit[1] @ unit[2], unit[0] @ unit[2], unit[0] @ unit[1]]), -1.0, 1.0)
    alpha, beta, gamma = np.degrees(np.arccos(cosines))
    return float(lengths[0]), float(lengths[1]), float(lengths[2]), float(alpha), float(beta), float(gamma)


def shortest_distances_a(
    lattice: np.ndarray, atomic_numbers: np.ndarray, frac_coords: np.ndarray
) -> dict[tuple[int, int], float]:
    """The shortest distance in A by pair of atomic numbers, the lower first, among the eight nearest of each atom."""
    first, second, distance_a = neighbours(lattice, frac_coords)
    numbers = np.asarray(atomic_numbers)
    pairs = np.sort(np.stack([numbers[first], numbers[second]], axis=1), axis=1)
    found: dict[tuple[int, int], float] = {}
    for low, high in np.unique(pairs, axis=0).tolist():
        found[low, high] = float(distance_a[(pairs == (low, high)).all(axis=1)].min())
    return found


def reduced_basis(lattice: np.ndarray) -> np.ndarray:
    """The shortest three vectors that span a lattice (a Minkowski-reduced basis): float64 `[3, 3]`, integer
    combinations of the rows of `lattice`, which are finite and not flat. Images of atoms are counted in this basis.

    Pairs are reduced first, then the longest vector by the nearest vector in the plane of the other two (I. Semaev,
    Lecture Notes in Computer Science 2146, 2001). A reduced basis stays as it is.
    """
    basis = np.array(lattice, dtype=np.float64)

    def shorten(i: int, by: np.ndarray) -> None:
        """Take a vector from the `i`-th if that makes it shorter, by more than rounding."""
        if np.linalg.norm(basis[i] - by) < np.linalg.norm(basis[i]) * (1 - 1e-9):
            basis[i] -= by

    for _ in range(_MOST_REDUCTIONS):
        before = basis.copy()
        for i, j in itertools.permutations(range(3), 2):
            shorten(i, round(float(basis[i] @ basis[j]) / float(basis[j] @ basis[j])) * basis[j])
        first, second, longest = np.argsort((basis**2).sum(axis=1), kind="stable").tolist()
        for one, other in itertools.product((1, -1), repeat=2):
            shorten(longest, one * basis[first] + other * basis[second])
        if np.array_equal(basis, before):
            break
    return basis


def atoms_and_images(lattice: np.ndarray, frac_coords: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A reduced basis, the atoms in its cell, and these atoms with their images around it, cell first: rows in A."""
    basis = reduced_basis(lattice)
    fractions = frac_coords @ lattice @ np.linalg.inv(basis)
    cartesian = (fractions - np.floor(fractions)) @ basis
    # In a reduced basis the images of the 26 cells around hold the nearest neighbours; a second shell is for safety.
    shells = 2 if len(frac_coords) <= 1000 else 1
    steps = np.array(list(np.ndindex(*[2 * shells + 1] * 3))) - shells
    steps = steps[np.argsort(np.abs(steps).sum(axis=1), kind="stable")]
    return basis, cartesian, (cartesian[None] + (steps @ basis)[:, None]).reshape(-1, 3)


def neighbours(lattice: np.ndarray, frac_coords: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The eight nearest atoms of every atom, periodic images included: indices of both, and the distance in A."""
    n_atoms = len(frac_coords)
    _, atoms, images = atoms_and_images(lattice, frac_coords)
    if n_atoms * len(images) > _MOST_DISTANCES:
        from scipy.spatial import KDTree

        distance, index = map(np.asarray, KDTree(images).query(atoms, k=_NEIGHBOURS + 1))
    else:
        distance = np.linalg.norm(atoms[:, None] - images, axis=-1)
        index = np.argsort(distance, axis=1, kind="stable")[:, : _NEIGHBOURS + 1]
        distance = np.take_along_axis(distance, index, axis=1)
    own = index == np.arange(n_atoms)[:, None]
    first = np.broadcast_to(np.arange(n_atoms)[:, None], index.shape)[~own]
    return first, index[~own] % n_atoms, distance[~own]


_VOID_STEP_A, _VOID_STEPS = 1.0, 24
"""Spacing of the grid points whose distances bound the largest void, and the most of these points along a side."""
_ON_FACE = 1e-6
"""Fraction of a cell by which rounding may put a corner of a Voronoi cell outside."""


def void_radius_a(lattice: np.ndarray, frac_coords: np.ndarray) -> float:
    """The largest distance, in A, of any point of the cell from its nearest atom: the radius of the largest sphere
    without a nucleus. Its centre is a corner of the atoms' Voronoi cells. `frac_coords`: `[n, 3]`, at least one."""
    from scipy.spatial import KDTree, Voronoi

    basis, _, images = atoms_and_images(lattice, frac_coords)
    inverse = np.linalg.inv(basis)
    lengths = np.linalg.norm(basis, axis=1)
    x, y, z = np.clip(np.ceil(lengths / _VOID_STEP_A).astype(int), 1, _VOID_STEPS).tolist()
    # No point is farther from a grid point than half of the steps along the three axes, so none is farther from an atom
    # than `bound_a`. Atoms farther from the cell than that have no part in its voids.
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
    lattice: np.ndarray, frac_coords: np.ndarray, grid_shape: tuple[int, int, int], sides: np.ndarray | None = None
) -> np.ndarray:
    """The distance in A of every voxel to its nearest atom or periodic image: float32 `grid_shape`. The first voxel is
    at the origin. `sides`: `[3, 3]`, the vectors in A that the voxels divide; None: the lattice."""
    from scipy.spatial import KDTree

    basis, _, images = atoms_and_images(lattice, frac_coords)
    tree, inverse = KDTree(images), np.linalg.inv(basis)
    found = np.empty(grid_shape, np.float32)
    a, b, c = lattice if sides is None else sides
    _, along_b, along_c = (np.arange(n) / n for n in grid_shape)
    plane = along_b[:, None, None] * b + along_c[:, None] * c
    for index in range(grid_shape[0]):
        fractions = (index / grid_shape[0] * a + plane) @ inverse
        found[index] = tree.query((fractions - np.floor(fractions)) @ basis)[0]
    return found
