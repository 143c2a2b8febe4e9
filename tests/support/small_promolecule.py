"""A promolecule of three elements, and a cell of two of them with a density."""

import numpy as np
from pymatgen.core import Lattice, Structure

from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, RadialBasis


def promolecule() -> Promolecule:
    """Of fluorine, sodium and magnesium, with functions that end at 2.5 A and hold about 7, 1 and 2 electrons."""
    basis = RadialBasis(6, 2.5, 0.5)
    shape = np.exp(-np.arange(6) / 2.0)
    return Promolecule(basis, {9: 3.45 * shape, 11: 0.5 * shape, 12: 1.0 * shape}, 3)


def skewed(symbols: tuple[str, str] = ("Na", "F")) -> Structure:
    """Two atoms in a cell without any symmetry, so that no exchange of axes goes unseen."""
    lattice = Lattice([[2.9, 0.1, 0.0], [0.4, 3.3, 0.2], [-0.3, 0.5, 3.7]])
    return Structure(lattice, symbols, [[0.1, 0.2, 0.3], [0.55, 0.75, 0.8]])


def skewed_density(name: str = "NaF", sides: tuple[int, int, int] = (6, 5, 4), seed: int = 1) -> DensityGrid:
    """8 electrons of that cell in random values, on sides of which no two are alike."""
    structure = skewed()
    rho = np.random.default_rng(seed).uniform(0.1, 1.0, sides)
    rho *= 8 / (rho.mean() * structure.volume)
    return DensityGrid(rho, structure.lattice.matrix, np.array([11, 9]), structure.frac_coords, name)
