"""An embedded density in the package: Fourier coefficients as integers, on the smallest grid that holds them all.

A plane-wave density ends at a sphere of reciprocal vectors, half of whose coefficients are the others' conjugates. What
is kept of each is a whole number of steps, so small that the rounding, spread evenly over the cell, has a standard
deviation of `ROUNDING` mean densities. Decoded, a density is band-limited as it was, has exactly its electrons, and
keeps the symmetry of its crystal. On disk an array of Zarr v3, int32 `[2, nx, ny, nz // 2 + 1]`, real and imaginary
parts in the order of `numpy.fft.rfftn`, with a checksum.
"""

import math
from pathlib import Path

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import first_line

ROUNDING = 1e-5
"""Standard deviation of the rounding over the mean density. Errors of models are a thousand times as large, and of the
calculations a hundred times; of vacuum 1,000 A^3 beside a cell of 0.1 e/A^3 it is 1e-6 e/A^3 of either sign."""


def write_coefficients(rho: np.ndarray, path: Path) -> float:
    """Write `rho` `[nx, ny, nz]`, of any unit, and say the NMAE that rounding costs. Replaces what is there."""
    import zarr
    from zarr.codecs import BloscCodec, Crc32cCodec

    spectrum = np.fft.rfftn(rho.astype(np.float64)) / rho.size
    # Of n coefficients each part is off by step / sqrt(12), and their squares add up: n step^2 / 6 of one voxel.
    mean = float(spectrum[0, 0, 0].real)
    kept = np.abs(spectrum) > 1e-2 * ROUNDING * mean / math.sqrt(rho.size)
    step = ROUNDING * mean * math.sqrt(6 / (2 * np.count_nonzero(kept)))
    parts = np.stack([spectrum.real, spectrum.imag])
    integers = np.rint(parts / step).astype(np.int32)
    array = zarr.create_array(
        path,
        data=integers,
        chunks=integers.shape,
        compressors=[BloscCodec(cname="zstd", clevel=9, shuffle="bitshuffle"), Crc32cCodec()],
        attributes={"step_over_mean": step / mean, "grid_shape": list(rho.shape)},
        zarr_format=3,
        overwrite=True,
    )
    decoded = _decoded(array, mean)
    return float(np.abs(decoded - rho).sum() / np.abs(rho).sum())


def read_coefficients(path: Path, mean: float) -> np.ndarray:
    """float64 `[nx, ny, nz]` of the given mean: the electrons of the cell over its volume make e/Å³.

    Raises:
        TomatError: The array is missing or damaged.
    """
    import zarr

    try:
        return _decoded(zarr.open_array(path, mode="r", config={"read_missing_chunks": False}), mean)
    except MemoryError:
        raise
    except Exception as error:  # zarr and its codecs raise each their own
        raise TomatError(
            f"the embedded density {path} is damaged ({first_line(error)}); install tomat again."
        ) from error


def _decoded(array, mean: float) -> np.ndarray:
    real, imaginary = np.asarray(array[...])
    spectrum = (real + 1j * imaginary) * (float(array.attrs["step_over_mean"]) * mean)
    spectrum[0, 0, 0] = mean
    shape = tuple(int(side) for side in array.attrs["grid_shape"])
    return np.fft.irfftn(spectrum, s=shape, axes=(0, 1, 2)) * math.prod(shape)
