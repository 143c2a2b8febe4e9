"""Is this array the electron density of these atoms, in the unit it is said to have?"""

import numpy as np

from tomat.density.elements import fewest_valence_electrons
from tomat.density.grid import DensityGrid
from tomat.errors import TomatError

LARGEST_NEGATIVE_SHARE = 0.05
"""Negative charge over positive charge above which an array is refused. PAW densities ring to about 1e-4 of it in
vacuum; a spin or difference density has shares near one half."""

LOWEST_VALENCE_SHARE = 0.75
"""Electrons found over the fewest that pseudopotentials leave these atoms. Below one for charged cells and rounding."""


def plausible_electron_counts(atomic_numbers: np.ndarray) -> tuple[float, float]:
    """The least and the most electrons that a valence or all-electron density of these atoms can hold."""
    fewest = sum(fewest_valence_electrons(int(number)) for number in atomic_numbers)
    return LOWEST_VALENCE_SHARE * fewest, float(np.sum(atomic_numbers)) * 1.02 + 1.0


def check_electrons(grid: DensityGrid, source: str) -> None:
    """Refuse a density whose integral no set of these atoms has.

    Raises:
        TomatError: with the count found and the range expected.
    """
    least, most = plausible_electron_counts(grid.atomic_numbers)
    if grid.atomic_numbers.size and not least <= grid.electron_count <= most:
        raise TomatError(
            f"{source}: the density integrates to {grid.electron_count:.4g} electrons, but {grid.formula} with "
            f"{grid.atomic_numbers.size} atoms has {least:.4g} to {most:.4g}; check its unit (expected e/A^3)."
        )


def check_rho_times_volume(values: np.ndarray, lattice: np.ndarray, atomic_numbers: np.ndarray, source: str) -> None:
    """Refuse values that are not rho x V of these atoms.

    Args:
        values: `[nx, ny, nz]` as read.
        lattice: `[3, 3]` in A.

    Raises:
        TomatError: values that are not finite, a quantity with both signs, or a mean that is no electron count; where
            the values would fit as e/A^3 or as e/bohr^3 the message says so.
    """
    total = float(np.mean(values, dtype=np.float64))
    if not np.isfinite(total):
        bad = int(values.size - np.isfinite(values).sum())
        raise TomatError(
            f"{source}: {bad} of {values.size} values are NaN or infinite; the calculation or the file is broken, "
            "leave this material out."
        )
    negative = values < 0
    negative_sum = -float(values[negative].sum(dtype=np.float64)) / values.size
    if negative_sum > LARGEST_NEGATIVE_SHARE * max(total + negative_sum, 0.0):
        raise TomatError(
            f"{source}: {100 * np.mean(negative):.1f} % of the values are negative, {negative_sum:.4g} against "
            f"{total + negative_sum:.4g} electrons; expected a total density, this looks like a spin or "
            "difference density."
        )
    least, most = plausible_electron_counts(atomic_numbers)
    if not least <= total <= most:
        volume_a3 = abs(float(np.linalg.det(lattice)))
        bohr3_in_a3 = 0.529177210903**3  # CODATA 2018
        hint = "the file is damaged or belongs to another structure"
        if least <= total * volume_a3 <= most:
            hint = "the values look like e/A^3; multiply them by the cell volume"
        elif least <= total * volume_a3 / bohr3_in_a3 <= most:
            hint = "the values look like e/bohr^3; multiply them by the cell volume in bohr^3"
        raise TomatError(
            f"{source}: the values average to {total:.4g}; as rho x V that is the electron count, and these "
            f"{atomic_numbers.size} atoms have {least:.4g} to {most:.4g}; {hint}."
        )
