"""Quantum ESPRESSO's `charge-density.dat`: the Fourier coefficients of a density on its list of reciprocal vectors.

Unformatted Fortran records (`write_rhog` of Modules/io_base.f90, 6.x without HDF5): `gamma_only, ngm, nspin`; b1, b2,
b3 in 1/bohr; Miller indices `[ngm, 3]`; for each spin component the coefficients, complex128 `[ngm]`, e/bohr^3.
`read_rhog` takes the coefficients in the order of the reading run's own vectors. So the list of vectors is taken from a
file that pw.x wrote for the same cell and cut-off, and only the coefficients are replaced.
"""

import os
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid

SAME_METRIC = 1e-4
"""Largest difference of products of reciprocal vectors over the largest; lattice constants have 4 digits or more."""

LARGEST_RECIPROCAL, SMALLEST_VOLUME = 1e3, 1e-12
"""A reciprocal vector in 1/bohr, and the reciprocal cell in 1/bohr^3: cells of 0.003 A and of 4e14 A^3."""
LARGEST_INDEX = 10_000
"""Largest Miller index: grids have sides of 1,000 points."""
LARGEST_COEFFICIENT = 1e9
"""In e/bohr^3. The density at a nucleus is 1e4."""


@dataclass(frozen=True, eq=False)
class ReciprocalList:
    """The vectors of a run of pw.x, in its order."""

    gamma_only: bool
    """The list has half of the vectors: one of G and -G."""
    reciprocal: np.ndarray
    """float64 `[3, 3]`, rows b1, b2, b3 in 1/bohr."""
    miller: np.ndarray
    source: str


def read_coefficients(path: str | os.PathLike[str]) -> tuple[ReciprocalList, np.ndarray]:
    """The vectors, and one coefficient for each: complex128 `[n]`, e/bohr^3."""
    from scipy.io import FortranFile

    source = os.fspath(path)
    try:
        with FortranFile(source, "r") as file:
            gamma_only, n_vectors, n_spin = (int(each) for each in file.read_record("i4"))
            if gamma_only not in (0, 1) or n_vectors < 1:
                raise ValueError(f"gamma_only {gamma_only} and {n_vectors} vectors")
            if n_spin != 1:
                raise TomatError(f"{source} has {n_spin} spin components; expected one, without magnetisation.")
            reciprocal = np.reshape(file.read_record("f8"), (3, 3))
            miller = np.reshape(file.read_record("i4"), (n_vectors, 3))
            coefficients = np.reshape(file.read_record("c16"), n_vectors)
            # NaN is refused too: it fails every comparison.
            plausible = (np.abs(reciprocal) < LARGEST_RECIPROCAL).all()
            # For vectors near the smallest float, LAPACK's determinant warns of a division by zero; this does not.
            if not plausible or not np.abs(reciprocal[0] @ np.cross(*reciprocal[1:])) > SMALLEST_VOLUME:
                raise ValueError(f"reciprocal vectors {reciprocal.tolist()}; expected three of a cell, in 1/bohr")
            if miller.min() < -LARGEST_INDEX or miller.max() > LARGEST_INDEX:
                raise ValueError(f"Miller indices up to {miller.max()} and down to {miller.min()}")
            if len(np.unique(miller, axis=0)) < len(miller):
                raise ValueError("a vector is in the list twice")
            if not (np.abs(coefficients) < LARGEST_COEFFICIENT).all():
                raise ValueError("coefficients that are not finite")
    except (OSError, ValueError, TypeError, MemoryError) as error:
        raise TomatError(
            f"{source} cannot be read as Quantum ESPRESSO's charge-density.dat ({type(error).__name__}: {error}). Give "
            "the one that pw.x (6.x, without HDF5) leaves in prefix.save."
        ) from error
    return ReciprocalList(bool(gamma_only), reciprocal, miller, source), coefficients


def write_charge_density(grid: DensityGrid, path: str | os.PathLike[str], vectors: ReciprocalList) -> None:
    """Write a density for `startingpot = 'file'` of pw.x."""
    from scipy.io import FortranFile

    expected = 2 * np.pi * np.linalg.inv(grid.lattice / BOHR_A).T
    metric, stated = expected @ expected.T, vectors.reciprocal @ vectors.reciprocal.T
    if np.abs(metric - stated).max() > SAME_METRIC * np.abs(metric).max():
        lengths = 2 * np.pi * BOHR_A * np.linalg.norm(np.linalg.inv(vectors.reciprocal), axis=0)
        theirs, ours = (", ".join(f"{a:.5g}" for a in each) for each in (lengths, grid.lattice_parameters[:3]))
        raise TomatError(
            f"{vectors.source} has a cell with axes of {theirs} A, {grid.material_id or 'the structure'} has {ours} "
            "A or other angles; expected one cell with the same axes in both."
        )
    needed = 2 * np.abs(vectors.miller).max(axis=0) + 1
    if (needed > grid.grid_shape).any():
        found, least = (" x ".join(map(str, each)) for each in (grid.grid_shape, needed.tolist()))
        raise TomatError(
            f"the grid {found} is too coarse for the cut-off of {vectors.source}; expected at least {least}. Ask for a "
            "finer one with --grid or --spacing."
        )
    spectrum = np.fft.fftn(grid.rho.astype(np.float64) * BOHR_A**3) / grid.rho.size
    coefficients = spectrum[tuple(vectors.miller.T)]
    with FortranFile(path, "w") as file:
        file.write_record(np.array([vectors.gamma_only, len(vectors.miller), 1], np.int32))
        file.write_record(vectors.reciprocal.astype(np.float64))
        file.write_record(vectors.miller.astype(np.int32))
        file.write_record(coefficients.astype(np.complex128))
