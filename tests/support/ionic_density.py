"""Densities of Gaussians at the atoms, as wide as their valence shells are, with a whole number of electrons each."""

import numpy as np

from tomat.data.density.grid import DensityGrid

WIDTHS_A = {1: 0.4, 3: 0.5, 8: 0.5, 9: 0.5, 11: 0.4, 12: 0.4, 13: 1.0, 14: 0.7, 17: 0.7, 31: 0.7, 33: 0.7}
WIDTHS_A |= {53: 0.85, 55: 0.75}


def gaussians(lattice, numbers, coords, valences, shape, name="x") -> DensityGrid:
    """A periodic density; each atom has exactly its electrons, up to the grid's aliasing."""
    lattice, coords = np.asarray(lattice, float), np.asarray(coords, float)
    points = np.stack(np.meshgrid(*(np.arange(n) / n for n in shape), indexing="ij"), -1)
    images = np.array(list(np.ndindex(3, 3, 3))) - 1
    rho = np.zeros(shape)
    for z, place in zip(numbers, coords, strict=True):
        away = points - place
        away -= np.round(away)
        width, density = WIDTHS_A[z], np.zeros(shape)
        for image in images:
            density += np.exp(-(((away + image) @ lattice) ** 2).sum(-1) / (2 * width**2))
        rho += valences[z] * density / (density.mean() * abs(np.linalg.det(lattice)))
    return DensityGrid(rho, lattice, np.array(numbers), coords, name)


FCC = np.array([[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
SKEWED = np.array([[4.1, 0.2, -0.1], [-1.3, 4.4, 0.3], [0.7, -0.9, 5.2]])


def gallium_arsenide() -> DensityGrid:
    """8 electrons."""
    return gaussians(5.65 * FCC, [31, 33], [[0, 0, 0], [0.25] * 3], {31: 3, 33: 5}, (24, 24, 24), "GaAs")


def caesium_iodide() -> DensityGrid:
    """16 electrons, which times 6.748 are all that the atoms have."""
    return gaussians(7.6 * FCC, [55, 53], [[0, 0, 0], [0.5] * 3], {55: 9, 53: 7}, (24, 24, 24), "CsI")


def skewed_oxide(shape=(18, 21, 23)) -> DensityGrid:
    """MgO2 without any symmetry, 14 electrons."""
    coords = [[0.1, 0.2, 0.3], [0.55, 0.6, 0.75], [0.2, 0.75, 0.6]]
    return gaussians(SKEWED, [12, 8, 8], coords, {12: 2, 8: 6}, shape, "MgO2")


def rock_salt(shape=(32, 32, 32), sodium=1) -> DensityGrid:
    """Four NaCl in a cube, 32 electrons."""
    coords = [[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]]
    other = [[0.5, 0, 0], [0, 0.5, 0], [0, 0, 0.5], [0.5, 0.5, 0.5]]
    return gaussians(5.64 * np.eye(3), [11] * 4 + [17] * 4, coords + other, {11: sodium, 17: 7}, shape, "NaCl")
