from collections.abc import Callable

import numpy as np
import pytest

from tomat.data.density.grid import DensityGrid


def lithium_fluoride(shape: tuple[int, int, int] = (6, 5, 4), seed: int = 0) -> DensityGrid:
    """A random positive density with the 10 electrons of Li-q3 and F-q7 in a skewed cell, a bond anywhere."""
    rng = np.random.default_rng(seed)
    lattice = np.array([[2.9, 0.1, 0.0], [0.4, 3.0, 0.2], [-0.3, 0.5, 3.2]])
    rho = rng.uniform(0.1, 1.0, shape)
    rho *= 10 / (rho.mean() * np.linalg.det(lattice))
    first = rng.uniform(-1, 2, 3)
    second = first + rng.uniform(0.45, 0.55, 3) + rng.integers(-1, 2, 3)
    return DensityGrid(rho, lattice, np.array([3, 9]), np.array([first, second]), "LiF")


@pytest.fixture(scope="session")
def make_grid() -> Callable[..., DensityGrid]:
    return lithium_fluoride


@pytest.fixture
def grid() -> DensityGrid:
    return lithium_fluoride()
