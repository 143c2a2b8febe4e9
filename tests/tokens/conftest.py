from collections.abc import Callable

import numpy as np
import pytest

from tomat.codec.histogram import DensityHistogram
from tomat.codec.lloyd_max import LloydMaxCodec, fit_lloyd_max
from tomat.density.grid import DensityGrid

MakeGrid = Callable[..., DensityGrid]


def _make_grid(shape=(10, 12, 9), n_atoms=3, seed=0, material_id="", lattice=None) -> DensityGrid:
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


@pytest.fixture(scope="session")
def make_grid() -> MakeGrid:
    return _make_grid


@pytest.fixture(scope="session")
def codec(make_grid) -> LloydMaxCodec:
    histogram = DensityHistogram()
    for seed in range(3):
        histogram.add(make_grid(seed=seed).rho)
    return fit_lloyd_max(histogram, 256)
