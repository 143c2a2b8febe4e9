"""An embedded density in the package: Fourier coefficients as integers, on the smallest grid that holds them all.

The Fourier coefficients of a plane-wave density lie in a sphere; half of them are the conjugates of the others. Each is
kept as a whole number of steps. A step is so small that the rounding, spread evenly over the cell, has a standard
deviation of `ROUNDING` mean densities. The decoded density is band-limited as before, has exactly its electrons, and
keeps the symmetry of its crystal. On disk it is a Zarr v3 array, int32 `[2, nx, ny, nz // 2 + 1]`: real and imaginary
parts in the order of `numpy.fft.rfftn`, with a checksum.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.reporting import naming

ROUNDING = 1e-5
"""Standard deviation of the rounding over the mean density. Errors of models are a thousand times as large, errors of
the calculations a hundred times. In 1,000 A^3 of vacuum of a cell with 0.1 e/A^3 it is 1e-6 e/A^3 of either sign."""


def read_coefficients(path: Path, mean: float) -> np.ndarray:
    """The density, float64 `[nx, ny, nz]`, with the given mean; a mean of electrons over cell volume gives e/Å³.

    Raises:
        TomatError: The array is missing or damaged.
    """
    import zarr

    with naming(f"the embedded density {path} is damaged", "; install tomat again."):
        return decoded(zarr.open_array(path, mode="r", config={"read_missing_chunks": False}), mean)


def decoded(array: Any, mean: float) -> np.ndarray:
    """The density of an open array."""
    real, imaginary = np.asarray(array[...])
    spectrum = (real + 1j * imaginary) * (float(array.attrs["step_over_mean"]) * mean)
    spectrum[0, 0, 0] = mean
    shape = tuple(int(side) for side in array.attrs["grid_shape"])
    return np.fft.irfftn(spectrum, s=shape, axes=(0, 1, 2)) * math.prod(shape)
