"""Quantum ESPRESSO's `charge-density.dat`: the Fourier coefficients of a density on its list of reciprocal vectors.

Unformatted Fortran records (`write_rhog` of Modules/io_base.f90, 6.x without HDF5): `gamma_only, ngm, nspin`; b1, b2,
b3 in 1/bohr; Miller indices `[ngm, 3]`; for each spin component the coefficients, complex128 `[ngm]`, e/bohr^3.
`read_rhog` takes the coefficients in the order of the reading run's own vectors and does not look at the indices,
unless the file is of the other kind of `gamma_only`. So the list is not made up here: it is taken from a file that
pw.x has written for the same cell and cut-off, and only the coefficients are exchanged.
"""

import os
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid

SAME_METRIC = 1e-4
"""Of the products of reciprocal vectors, relative to the largest: lattice constants are written with four digits and
more."""


LARGEST_RECIPROCAL, SMALLEST_VOLUME = 1e3, 1e-12
"""1/bohr, and of the reciprocal cell 1/bohr^3: cells of 0.003 A and of 4e14 A^3."""
LARGEST_INDEX = 10_000
"""Of a Miller index: grids have sides of 1,000 points."""
LARGEST_COEFFICIENT = 1e9
"""e/bohr^3. A nucleus has 1e4."""


@dataclass(frozen=True, eq=False)
class ReciprocalList:
    """The vectors of a run of pw.x, in its order."""

    gamma_only: bool
    """Half of the vectors: of G and -G one."""
    reciprocal: np.ndarray
    """float64 `[3, 3]`, rows b1, b2, b3 in 1/bohr."""
    miller: np.ndarray
    source: str


def read_reciprocal_list(path: str | os.PathLike[str]) -> ReciprocalList:
    """The vectors that a `charge-density.dat` lists; its coefficients are not read."""
    return read_coefficients(path)[0]


def read_charge_density(
    path: str | os.PathLike[str], crystal: Crystal, grid_shape: tuple[int, int, int]
) -> DensityGrid:
    """The density of a `charge-density.dat` on a grid of the crystal's cell, in e/Å³."""
    vectors, coefficients = read_coefficients(path)
    _check_cell(crystal.lattice, crystal.name, vectors)
    _check_shape(grid_shape, vectors)
    spectrum = np.zeros(grid_shape, np.complex128)
    if vectors.gamma_only:
        spectrum[tuple(-vectors.miller.T)] = coefficients.conj()
    spectrum[tuple(vectors.miller.T)] = coefficients
    rho = np.fft.ifftn(spectrum).real * (spectrum.size / BOHR_A**3)
    return DensityGrid(rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name)


def read_coefficients(path: str | os.PathLike[str]) -> tuple[ReciprocalList, np.ndarray]:
    """The vectors, and complex128 `[n]`, e/bohr^3, one coefficient for each."""
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
            _check_vectors(reciprocal, miller, coefficients)
    except (OSError, ValueError, TypeError, MemoryError) as error:
        raise TomatError(
            f"{source} cannot be read as Quantum ESPRESSO's charge-density.dat ({type(error).__name__}: {error}). Give "
            "the one that pw.x (6.x, without HDF5) leaves in prefix.save."
        ) from error
    return ReciprocalList(bool(gamma_only), reciprocal, miller, source), coefficients


def _check_vectors(reciprocal: np.ndarray, miller: np.ndarray, coefficients: np.ndarray) -> None:
    # NaN is refused too: it is not below anything.
    if not (np.abs(reciprocal) < LARGEST_RECIPROCAL).all() or not np.abs(np.linalg.det(reciprocal)) > SMALLEST_VOLUME:
        raise ValueError(f"reciprocal vectors {reciprocal.tolist()}; expected three of a cell, in 1/bohr")
    if miller.min() < -LARGEST_INDEX or miller.max() > LARGEST_INDEX:
        raise ValueError(f"Miller indices up to {miller.max()} and down to {miller.min()}")
    if len(np.unique(miller, axis=0)) < len(miller):
        raise ValueError("a vector stands in the list twice")
    if not np.isfinite(coefficients).all() or not (np.abs(coefficients) < LARGEST_COEFFICIENT).all():
        raise ValueError("coefficients that are not finite")


def write_charge_density(grid: DensityGrid, path: str | os.PathLike[str], vectors: ReciprocalList) -> None:
    """Write a density for `startingpot = 'file'` of pw.x."""
    from scipy.io import FortranFile

    _check_cell(grid.lattice, grid.material_id, vectors)
    _check_shape(grid.grid_shape, vectors)
    spectrum = np.fft.fftn(grid.rho.astype(np.float64) * BOHR_A**3) / grid.rho.size
    coefficients = spectrum[tuple(vectors.miller.T)]
    with FortranFile(path, "w") as file:
        file.write_record(np.array([vectors.gamma_only, len(vectors.miller), 1], np.int32))
        file.write_record(vectors.reciprocal.astype(np.float64))
        file.write_record(vectors.miller.astype(np.int32))
        file.write_record(coefficients.astype(np.complex128))


def _check_cell(lattice: np.ndarray, name: str, vectors: ReciprocalList) -> None:
    expected = 2 * np.pi * np.linalg.inv(lattice / BOHR_A).T
    metric, stated = expected @ expected.T, vectors.reciprocal @ vectors.reciprocal.T
    if np.abs(metric - stated).max() > SAME_METRIC * np.abs(metric).max():
        lengths = 2 * np.pi * BOHR_A * np.linalg.norm(np.linalg.inv(vectors.reciprocal), axis=0)
        raise TomatError(
            f"{vectors.source} is of a cell with axes of {', '.join(f'{each:.5g}' for each in lengths)} A, "
            f"{name or 'the structure'} has {', '.join(f'{a:.5g}' for a in np.linalg.norm(lattice, axis=1))} A "
            "or other angles; expected one cell with the same axes in both."
        )


def _check_shape(grid_shape: tuple[int, int, int], vectors: ReciprocalList) -> None:
    needed = 2 * np.abs(vectors.miller).max(axis=0) + 1
    if (needed > grid_shape).any():
        raise TomatError(
            f"the grid {' x '.join(map(str, grid_shape))} is too coarse for the cut-off of {vectors.source}; "
            f"expected at least {' x '.join(map(str, needed.tolist()))}. Ask for a finer one with --grid or --spacing."
        )
