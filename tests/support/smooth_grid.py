"""A density that shows where a voxel has gone."""

import numpy as np

from tomat.data.density.grid import DensityGrid


def smooth_grid(shape=(10, 12, 9), n_atoms=3, seed=0, material_id="", lattice=None) -> DensityGrid:
    """A smooth, periodic, positive density with a value of its own at every voxel, in a cell that is not orthogonal."""
    rng = np.random.default_rng(seed)
    x, y, z = (np.arange(n) / n for n in shape)
    phase = rng.uniform(0, 1, 3)
    log_rho = (
        np.cos(2 * np.pi * (x[:, None, None] + phase[0]))
        + np.cos(2 * np.pi * (y[None, :, None] + phase[1]))
        + np.cos(2 * np.pi * (z[None, None, :] + phase[2]))
    )
    rho = np.exp(log_rho + rng.normal(0, 0.05, shape))
    if lattice is None:
        lattice = [[3.1, 0, 0], [0.4, 4.2, 0], [-0.3, 0.2, 5.3]]
    numbers = rng.integers(1, 119, n_atoms)
    return DensityGrid(rho, np.array(lattice), numbers, rng.uniform(0, 1, (n_atoms, 3)), material_id=material_id)
