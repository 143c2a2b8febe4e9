"""The difference of two densities of one crystal."""

from dataclasses import dataclass, replace

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.grid import DensityGrid
from tomat.predict.evaluation.metrics import nmae

SAME_LATTICE = 1e-3
"""Share of the longest vector that equal lattices may differ by: files round to six decimals, relaxations move more."""
SAME_PLACE_A = 0.05
"""Largest distance of an atom's two places. Files round to six decimals of a side; other structures differ by more."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """A density beside a reference, both on one grid."""

    reference: DensityGrid
    other: DensityGrid
    refined: bool
    """Whether the grids differed. If so, both were interpolated by Fourier series to the finer side along each axis."""

    @property
    def nmae(self) -> float:
        """Integral of |difference| divided by the integral of the reference, as a fraction."""
        return nmae(self.other.rho, self.reference.rho)

    @property
    def scaled_nmae(self) -> float:
        """The NMAE after `other` is scaled to the electrons of the reference, which leaves the error in shape."""
        factor = self.reference.electron_count / self.other.electron_count
        return nmae(self.other.rho.astype(np.float64) * factor, self.reference.rho)

    @property
    def largest(self) -> tuple[float, tuple[float, ...]]:
        """The largest |difference| in e/Å³, and the fractional position of its voxel."""
        away = np.abs(self.other.rho.astype(np.float64) - self.reference.rho)
        voxel = np.unravel_index(int(np.argmax(away)), away.shape)
        place = tuple(float(i) / n for i, n in zip(voxel, away.shape, strict=True))
        return float(away[voxel]), place


def compare_densities(reference: DensityGrid, other: DensityGrid) -> Comparison:
    _check_same_crystal(reference, other)
    if reference.grid_shape == other.grid_shape:
        return Comparison(reference, other, False)
    shape = tuple(max(sides) for sides in zip(reference.grid_shape, other.grid_shape, strict=True))
    # Only the values are compared. The other lattice may be a rounded one, so the reference's is used.
    other = replace(other, lattice=reference.lattice).refined(shape, clip_negative=True)
    return Comparison(reference.refined(shape, clip_negative=True), other, True)


def _check_same_crystal(reference: DensityGrid, other: DensityGrid) -> None:
    names = f"{reference.material_id} and {other.material_id}"
    if sorted(reference.atomic_numbers.tolist()) != sorted(other.atomic_numbers.tolist()):
        sizes = [f"{grid.formula} of {len(grid.atomic_numbers)} atoms" for grid in (reference, other)]
        raise TomatError(f"{names} differ in atoms: {sizes[0]} and {sizes[1]}; expected two densities of one crystal.")
    longest = float(np.linalg.norm(reference.lattice, axis=1).max())
    apart = float(np.abs(reference.lattice - other.lattice).max())
    if apart > SAME_LATTICE * longest:
        said = f"{names} have lattices that differ by {apart:.3g} A"
        raise TomatError(f"{said}; expected two densities of one crystal, with the same three vectors.")
    free = list(range(len(other.atomic_numbers)))
    for number, place in zip(reference.atomic_numbers.tolist(), reference.frac_coords, strict=True):
        away = other.frac_coords[free] - place
        distance = np.linalg.norm((away - np.round(away)) @ reference.lattice, axis=1)
        distance[other.atomic_numbers[free] != number] = np.inf
        nearest = int(np.argmin(distance))
        if not distance[nearest] <= SAME_PLACE_A:
            said = f"{names} have atoms at different places: one is {distance[nearest]:.3g} A away"
            raise TomatError(f"{said}, more than {SAME_PLACE_A:g}. Give both the same origin and order of axes.")
        del free[nearest]
