"""A relative codec of small cells: densities near a promolecule of two elements, and a void."""

from functools import cache

import numpy as np

from tomat.data.codec.ratios import RatioHistogram, fit_codec
from tomat.data.codec.relative import RelativeCodec
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, RadialBasis

BASIS = RadialBasis(n=4, cutoff_a=2.5)
PROMOLECULE = Promolecule(
    BASIS, {12: np.array([1.5, 0.8, 0.2, 0.02]), 8: np.array([4.0, 1.5, 0.4, 0.05])}, 1, {12: 2.0, 8: 6.0}
)


def bonded(seed: int = 0, shape: tuple[int, int, int] = (12, 10, 16), side_a: float = 7.0) -> DensityGrid:
    """Two atoms in a long cell: near them the promolecule, bent by a quarter; far from them nothing."""
    lattice = np.diag([4.0, 4.2, side_a])
    crystal = Crystal(lattice, np.array([12, 8]), np.array([[0.0, 0.0, 0.0], [0.5, 0.45, 0.15]]), f"bonded-{seed}")
    rng = np.random.default_rng(seed)
    bend = 1 + 0.25 * np.sin(np.linspace(0, 6, shape[2]) + rng.uniform(0, 6)) * rng.uniform(0.5, 1, shape)
    rho = (PROMOLECULE.density(crystal, shape) * bend).astype(np.float32)
    return DensityGrid(rho, lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name)


@cache
def histogram(*seeds: int) -> RatioHistogram:
    found = RatioHistogram(PROMOLECULE)
    for seed in seeds:
        found.add_grid(bonded(seed), f"bonded-{seed}")
    return found


@cache
def relative_codec(n_bins: int = 48) -> RelativeCodec:
    return fit_codec(histogram(0, 1, 2), n_bins)
