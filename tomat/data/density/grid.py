"""`DensityGrid`: an electron density on the regular grid of a periodic cell, in electrons per cubic angstrom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.elements import plausible_electron_counts, reduced_formula, symbol_of
from tomat.data.density.geometry import checked_cell, lattice_parameters

if TYPE_CHECKING:
    from ase import Atoms
    from pymatgen.core import Structure
    from pymatgen.io.vasp import Chgcar

LARGEST_DENSITY_E_PER_A3 = 1.0e5
"""No valence density is larger. The all-electron density at a nucleus, 2 Z^3 / (pi a0^3) = 4.3 Z^3 e/Å³ from the 1s
shell, passes this at Z = 29; pseudopotential and PAW valence densities peak between 1 and some thousand e/Å³."""


@dataclass(frozen=True, eq=False, repr=False)
class DensityGrid:
    """An electron density and the crystal it belongs to: voxel `[i, j, k]` lies at `(i/nx, j/ny, k/nz)` of the cell,
    without duplicate end points."""

    rho: np.ndarray
    """float32 `[nx, ny, nz]`, e/Å³, C order."""
    lattice: np.ndarray
    atomic_numbers: np.ndarray
    """int64 `[n_atoms]`, 1..118."""
    frac_coords: np.ndarray
    """float64 `[n_atoms, 3]`, in [0, 1)."""
    material_id: str = ""
    """What the data set calls it; appears in messages."""
    clipped_voxels: int = 0
    """How many negative values were set to zero when it was read or refined."""
    clipped_electrons: float = 0.0
    """Electrons that this added: 0.011 of 8 in VASP's silicon on 32^3 voxels, with -0.19 e/Å³ at its nuclei."""

    partial: bool = False
    """Its file says by name or title that it holds only a part of the electrons, and `accept` allows this."""
    electrons_are_flagged: ClassVar[bool] = False
    """True for a prediction: its flags say how far off its electrons are, and it is written all the same."""

    def __post_init__(self) -> None:
        name = f"density {self.material_id!r}" if self.material_id else "density"
        rho = np.asarray(self.rho)
        if rho.ndim != 3 or rho.size == 0:
            raise TomatError(f"{name}: found an array of shape {rho.shape}; expected three sides of at least 1 voxel.")
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite and is refused just below
            rho = np.ascontiguousarray(rho, dtype=np.float32)
        if not np.isfinite(rho).all():
            count = int(rho.size - np.isfinite(rho).sum())
            raise TomatError(f"{name}: {count} of {rho.size} values are NaN, infinite or beyond float32; leave it out.")
        largest = float(np.abs(rho).max())
        if largest > LARGEST_DENSITY_E_PER_A3:
            raise TomatError(
                f"{name}: found a value of {largest:.4g} e/Å³, more than any valence density has "
                f"({LARGEST_DENSITY_E_PER_A3:.0e}); the file may hold rho x V or another quantity."
            )
        lattice, numbers, coords = checked_cell(name, self.lattice, self.atomic_numbers, self.frac_coords)
        coords = np.mod(coords, 1.0)
        coords[coords >= 1.0] = 0.0  # `-1e-17 mod 1` rounds to 1.0
        found = {"rho": rho, "lattice": lattice, "atomic_numbers": numbers, "frac_coords": coords}
        for field, array in found.items():
            array.setflags(write=False)
            object.__setattr__(self, field, array)

    @property
    def grid_shape(self) -> tuple[int, int, int]:
        nx, ny, nz = self.rho.shape
        return nx, ny, nz

    @cached_property
    def volume_a3(self) -> float:
        return abs(float(np.linalg.det(self.lattice)))

    @property
    def voxel_volume_a3(self) -> float:
        return self.volume_a3 / self.rho.size

    @cached_property
    def electron_count(self) -> float:
        """Integral of rho over the cell, in electrons, summed in float64."""
        return float(self.rho.sum(dtype=np.float64)) * self.voxel_volume_a3

    @property
    def spacing_a(self) -> tuple[float, float, float]:
        """Distance of neighbouring voxels along a, b, c in A."""
        a, b, c = np.linalg.norm(self.lattice, axis=1) / np.array(self.grid_shape)
        return float(a), float(b), float(c)

    @property
    def lattice_parameters(self) -> tuple[float, float, float, float, float, float]:
        return lattice_parameters(self.lattice)

    @property
    def formula(self) -> str:
        return reduced_formula(self.atomic_numbers.tolist())

    @property
    def structure(self) -> Structure:
        from pymatgen.core import Structure

        symbols = [symbol_of(int(number)) for number in self.atomic_numbers]
        return Structure(self.lattice, symbols, self.frac_coords)

    def __repr__(self) -> str:
        name = f"{self.material_id!r}, " if self.material_id not in ("", self.formula) else ""
        sides = " x ".join(map(str, self.grid_shape))
        return f"{type(self).__name__}({name}{self.formula}, {sides} voxels, {self.electron_count:.4f} electrons)"

    def to_pymatgen(self) -> Chgcar:
        """pymatgen's `Chgcar`, whose values are rho x V in electrons."""
        from pymatgen.io.vasp import Chgcar

        return Chgcar(self.structure, {"total": self.rho.astype(np.float64) * self.volume_a3})

    def to_ase(self) -> Atoms:
        """Periodic `Atoms` of ASE. They cannot hold the density, which stays in `rho`, e/Å³."""
        try:
            from ase import Atoms
        except ModuleNotFoundError as error:
            raise TomatError("to_ase needs ASE, which is not installed: pip install ase.") from error
        cell = {"cell": self.lattice, "pbc": True}
        return Atoms(numbers=self.atomic_numbers, scaled_positions=self.frac_coords, **cell)

    def rho_times_volume(self) -> np.ndarray:
        """float32 `[nx, ny, nz]`, rho x V in electrons, as VASP and the `rho_gga` Zarr hold it."""
        return (self.rho * np.float64(self.volume_a3)).astype(np.float32)

    def patch(self, anchor: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """A block of the infinite crystal, of any size: `[i, j, k]` is `rho[(anchor + (i, j, k)) mod grid_shape]`."""
        sides = [int(side) for side in shape]
        if len(sides) != 3 or len(anchor) != 3 or min(sides) < 1:
            raise TomatError(f"a patch needs an anchor and 3 sides of at least 1, found {list(anchor)} and {sides}.")
        along = zip(anchor, sides, self.grid_shape, strict=True)
        return self.rho[np.ix_(*((int(start) + np.arange(side)) % n for start, side, n in along))]

    def refined(self, grid_shape: Sequence[int], *, clip_negative: bool = False) -> Self:
        """Trigonometric interpolation of rho on a finer grid. It is exact for a plane-wave density, whose Fourier
        series is finite. It keeps the electron count, and every value at a point of both grids. `clip_negative`: set
        negative values to zero and count them, since a truncated series rings below zero between voxels."""
        sides = [int(side) for side in grid_shape]
        if len(sides) != 3 or any(side < n for side, n in zip(sides, self.grid_shape, strict=True)):
            raise TomatError(f"density {self.material_id!r}: {self.grid_shape} refined to {sides}: no side may shrink.")
        rho = self.rho.astype(np.float64)
        for axis, (n, side) in enumerate(zip(self.grid_shape, sides, strict=True)):
            if side == n:
                continue
            spectrum = np.fft.rfft(rho, axis=axis)
            if n % 2 == 0:
                # The coefficient at n/2 stands for +n/2 and -n/2 together. On a finer grid the two are apart, and each
                # gets half; the half spectrum of a real signal holds only +n/2.
                np.moveaxis(spectrum, axis, 0)[n // 2] *= 0.5
            rho = np.fft.irfft(spectrum, n=side, axis=axis) * (side / n)
        clipped, added = self.clipped_voxels, self.clipped_electrons
        if clip_negative:
            rho, more, electrons = clip_negative_values(rho, self.volume_a3)
            clipped, added = clipped + more, added + electrons
        return replace(self, rho=rho, clipped_voxels=clipped, clipped_electrons=added)


def check_electrons(grid: DensityGrid, source: str) -> None:
    """Refuse a density whose integral these atoms cannot have, unless it is known to be partial or is flagged."""
    if grid.partial or grid.electrons_are_flagged:
        return
    least, most = plausible_electron_counts(grid.atomic_numbers)
    if grid.atomic_numbers.size and not least <= grid.electron_count <= most:
        raise TomatError(
            f"{source}: the density integrates to {grid.electron_count:.4g} electrons, but {grid.formula} with "
            f"{grid.atomic_numbers.size} atoms has {least:.4g} to {most:.4g}; check its unit (expected e/Å³)."
        )


def fast_shape(lattice: np.ndarray, spacing_a: float, at_least: Sequence[int] = (1, 1, 1)) -> tuple[int, int, int]:
    """The smallest grid of a spacing of at most `spacing_a` whose sides have no prime factor but 2, 3 and 5."""
    from scipy.fft import next_fast_len

    lengths = np.linalg.norm(lattice, axis=1)
    sides = [max(math.ceil(length / spacing_a), n) for length, n in zip(lengths, at_least, strict=True)]
    fast = [next_fast_len(side, real=True) for side in sides]
    if None in fast:  # scipy's answer for a length beyond its integers
        raise TomatError(f"a grid of {sides} voxels is too large.")
    nx, ny, nz = (int(side) for side in fast if side is not None)
    return nx, ny, nz


def clip_negative_values(values: np.ndarray, volume_a3: float) -> tuple[np.ndarray, int, float]:
    """`values` with negative numbers set to zero, how many there were, and the electrons that this adds. NaN stays."""
    negative = values < 0
    count = int(np.count_nonzero(negative))
    if not count:
        return values, 0, 0.0
    added = -float(values[negative].sum(dtype=np.float64)) * volume_a3 / values.size
    return np.where(negative, values.dtype.type(0), values), count, added
