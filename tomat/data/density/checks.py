"""Is this array the electron density of these atoms, in the unit it is said to have?"""

from typing import Literal

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.atoms_on_density import check_atoms_on_density
from tomat.data.density.electron_count import check_electron_count, earned_tolerance, unit_hint
from tomat.data.density.elements import fewest_valence_electrons
from tomat.data.density.geometry import BOHR_A, check_cell
from tomat.data.density.grid import SMALLEST_CELL_VOLUME_A3, DensityGrid, clip_negative_values
from tomat.data.density.rules import DEFAULT_RULES, ReadRules
from tomat.data.density.valence_table import Reading, readings

LARGEST_NEGATIVE_SHARE = 0.05
"""Negative charge over positive charge above which an array is refused. PAW densities ring to about 1e-4 of it in
vacuum; a spin or difference density has shares near one half."""

LOWEST_VALENCE_SHARE = 0.75
"""Electrons found over the fewest that pseudopotentials leave these atoms. Below one for charged cells and rounding."""

STEEP_SHARE_OF_MEAN = 0.1
"""A zero beside a value above this share of the mean is steep. A density that decays into vacuum reaches zero, or what
rounding and clipped ringing make of it, through values of about 1e-4 of the mean."""

LONGEST_STEEP_RUN = 12
"""Zeros in a row, in the order of the file, that may end at an ordinary value: 0.8 A at 0.065 A a voxel. PAW densities
can dip below zero within some voxels of a nucleus, and a file written after clipping has zeros there."""

LARGEST_STEEP_SHARE = 1e-3
"""Of all voxels, that may be zero beside ordinary values."""


def density_of(
    values: np.ndarray,
    lattice: np.ndarray,
    atomic_numbers: np.ndarray,
    frac_coords: np.ndarray,
    *,
    source: str,
    material_id: str,
    rules: ReadRules = DEFAULT_RULES,
    partial: bool = False,
    cube: bool = False,
) -> DensityGrid:
    """The density that a reader has found, once it has passed every check: the one way from a file to a `DensityGrid`.

    Negative values become zero and are counted in `clipped_voxels` (PAW densities ring to small negative values in
    vacuum, and can be negative at nuclei). The electron count is not corrected for it: what was clipped is added, and
    `clipped_electrons` says how much.

    Args:
        values: `[nx, ny, nz]`, rho x V in electrons as read; the reader has checked their number, and that of the
            atoms, before it read them.
        partial: any part of the electrons of these atoms will do.
        cube: the values are of a cube, which some write in e/A^3 and with rounded sides.
    """
    if "distances" not in rules.accept:
        check_cell(lattice, atomic_numbers, frac_coords, source)
    if cube and "cube_e_per_a3" in rules.accept:
        values = _in_bohr(values, lattice, atomic_numbers, rules)
    check_rho_times_volume(values, lattice, atomic_numbers, source, partial=partial, cube=cube)
    if "zeros" not in rules.accept:
        check_zeros(values, source)
    meanings: tuple[Reading, ...] = ()
    if rules.count_electrons and not partial:
        meanings = check_electron_count(
            values, lattice, atomic_numbers, source, accept=rules.accept, given=rules.valences, cube=cube
        )
    if "atoms" not in rules.accept and not partial:
        other = _meanings_in_a(values, lattice, atomic_numbers, rules) if cube else ()
        hint = unit_hint(other[0]) if other else ""
        check_atoms_on_density(values, lattice, atomic_numbers, frac_coords, source, meanings, hint)
    volume_a3 = abs(float(np.linalg.det(lattice)))
    if volume_a3 < SMALLEST_CELL_VOLUME_A3:
        raise TomatError(f"density {material_id!r}: the cell volume is {volume_a3:.3g} A^3; expected at least 1.")
    rho, clipped, added = clip_negative_values(values / volume_a3, volume_a3)
    return DensityGrid(rho, lattice, atomic_numbers, frac_coords, material_id, clipped, added)


def _in_bohr(values: np.ndarray, lattice: np.ndarray, atomic_numbers: np.ndarray, rules: ReadRules) -> np.ndarray:
    """A cube's values, which may be in e/A^3: as they are where their sum is one of these atoms, else as e/A^3 where
    that is. All electrons count for nothing here: on a grid like these their sum is a matter of chance."""
    found, allowed = float(np.mean(values, dtype=np.float64)), earned_tolerance(values, lattice, cube=True)
    known = readings(atomic_numbers, rules.valences)
    as_is = any(abs(each.electrons - found) <= allowed and not each.with_cores for each in known)
    return values * BOHR_A**3 if not as_is and _meanings_in_a(values, lattice, atomic_numbers, rules) else values


def _meanings_in_a(
    values: np.ndarray, lattice: np.ndarray, atomic_numbers: np.ndarray, rules: ReadRules
) -> tuple[Reading, ...]:
    """What the sum of a cube's values means if they are in e/A^3; empty if nothing."""
    found = float(np.mean(values, dtype=np.float64)) * BOHR_A**3
    allowed = earned_tolerance(values, lattice, cube=True)
    return tuple(each for each in readings(atomic_numbers, rules.valences) if abs(each.electrons - found) <= allowed)


def check_zeros(values: np.ndarray, source: str) -> None:
    """Refuse values of which a part was zeroed: exact zeros beside ordinary values, in runs or in number.

    Zeros as such say nothing: half of a slab's vacuum can be zero after rounding or clipping. But a density is smooth,
    and reaches zero through small values; a lost page, a lost chunk and scattered losses do not.
    """
    zero = values == 0
    n_zeros = int(np.count_nonzero(zero))
    if not n_zeros:
        return
    ordinary = values > STEEP_SHARE_OF_MEAN * float(np.mean(values, dtype=np.float64))
    beside = np.zeros_like(ordinary)
    for axis in range(3):
        for step in (1, -1):
            beside |= np.roll(ordinary, step, axis)
    n_steep = int(np.count_nonzero(zero & beside))
    run = max(_longest_steep_run(values, zero, ordinary, order) for order in ("C", "F"))
    if n_steep > LARGEST_STEEP_SHARE * values.size or run > LONGEST_STEEP_RUN:
        raise TomatError(
            f"{source}: {n_zeros:,} of {values.size:,} values are exactly zero, {n_steep:,} of them beside ordinary "
            f"values and up to {run:,} in a row; a density reaches zero through small values. A part of the file was "
            "zeroed: fetch it again. `--accept zeros` reads it as it is."
        )


def _longest_steep_run(values: np.ndarray, zero: np.ndarray, ordinary: np.ndarray, order: Literal["C", "F"]) -> int:
    """The longest run of zeros in the order of the file that begins or ends at an ordinary value."""
    flat, steep = zero.ravel(order), ordinary.ravel(order)
    edges = np.flatnonzero(np.diff(flat, prepend=False, append=False))
    starts, stops = edges[::2], edges[1::2]
    at_end = steep[starts - 1] | steep[stops % len(steep)]  # the crystal is periodic
    return int(np.max((stops - starts)[at_end], initial=0))


def plausible_electron_counts(atomic_numbers: np.ndarray) -> tuple[float, float]:
    """The least and the most electrons that a valence or all-electron density of these atoms can hold."""
    fewest = sum(fewest_valence_electrons(int(number)) for number in atomic_numbers)
    return LOWEST_VALENCE_SHARE * fewest, float(np.sum(atomic_numbers)) * 1.02 + 1.0


def check_electrons(grid: DensityGrid, source: str) -> None:
    """Refuse a density whose integral no set of these atoms has."""
    least, most = plausible_electron_counts(grid.atomic_numbers)
    if grid.atomic_numbers.size and not least <= grid.electron_count <= most:
        raise TomatError(
            f"{source}: the density integrates to {grid.electron_count:.4g} electrons, but {grid.formula} with "
            f"{grid.atomic_numbers.size} atoms has {least:.4g} to {most:.4g}; check its unit (expected e/A^3)."
        )


def check_rho_times_volume(
    values: np.ndarray,
    lattice: np.ndarray,
    atomic_numbers: np.ndarray,
    source: str,
    *,
    partial: bool = False,
    cube: bool = False,
) -> None:
    """Refuse values that are not rho x V of these atoms.

    Args:
        partial: any part of the electrons will do.
        cube: the values were read as e/bohr^3.
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
    least = 0.0 if partial else least
    if not least <= total <= most:
        volume_a3 = abs(float(np.linalg.det(lattice)))
        bohr3_in_a3 = BOHR_A**3
        hint = "the file is damaged or belongs to another structure"
        if cube and least <= total * bohr3_in_a3 <= most:
            hint = "the cube looks to be in e/A^3, not in e/bohr^3; `--accept cube_e_per_a3` reads it so"
        elif cube and values.min() >= 0 and values.max() <= 1.001 * volume_a3 / bohr3_in_a3:
            hint = "the values lie between 0 and 1, as those of a localisation function"
        elif least <= total * volume_a3 <= most:
            hint = "the values look like e/A^3; multiply them by the cell volume"
        elif least <= total * volume_a3 / bohr3_in_a3 <= most:
            hint = "the values look like e/bohr^3; multiply them by the cell volume in bohr^3"
        raise TomatError(
            f"{source}: the values average to {total:.4g}; as rho x V that is the electron count, and these "
            f"{atomic_numbers.size} atoms have {least:.4g} to {most:.4g}; {hint}."
        )
