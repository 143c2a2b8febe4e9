"""A density in a cell that leans, as small as one can be."""

import numpy as np

from tomat.data.density.grid import DensityGrid


def density(name="SrF2", sides=(6, 5, 4), seed=0) -> DensityGrid:
    """Values of no crystal with 24 electrons, in a cell that leans, with two atoms."""
    rho = np.random.default_rng(seed).random(sides, np.float32)
    lattice = np.array([[3.0, 0.1, 0.0], [1.2, 3.1, 0.0], [0.4, 0.5, 2.9]])
    rho *= 24 / float(np.mean(rho, dtype=np.float64) * abs(np.linalg.det(lattice)))
    return DensityGrid(rho, lattice, np.array([38, 9]), np.array([[0.0, 0.0, 0.0], [0.25, 0.25, 0.25]]), name)
