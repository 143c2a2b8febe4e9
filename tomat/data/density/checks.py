"""Is this array the electron density of these atoms, in the unit it is said to have?"""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.atoms_on_density import check_atoms_on_density
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import plausible_electron_counts
from tomat.data.density.geometry import BOHR_A, check_cell
from tomat.data.density.grid import DensityGrid, clip_negative_values
from tomat.data.density.rules import DEFAULT_RULES, ReadRules
from tomat.data.density.valence_table import Reading, Valences, readings

LARGEST_NEGATIVE_SHARE = 0.05
"""Negative charge over positive charge above which an array is refused. PAW densities ring to about 1e-4 of it in
vacuum; a spin or difference density has shares near one half."""

STEEP_SHARE_OF_MEAN = 0.1
"""A zero beside a value above this share of the mean is steep. A density that decays into vacuum reaches zero (exactly,
or by rounding or clipped ringing) through values of about 1e-4 of the mean."""

LONGEST_STEEP_RUN = 12
"""Most zeros in a row, in the order of the file, that may end at an ordinary value: 0.8 A at 0.065 A per voxel. PAW
densities can dip below zero within some voxels of a nucleus, and a file written after clipping has zeros there."""

LARGEST_STEEP_SHARE = 1e-3
"""Largest share of all voxels that may be zero beside ordinary values."""

LARGEST_ELECTRONS = 1e15
"""Largest rho x V at a voxel: 10,000 atoms of 118 electrons, all at one of 2^28 voxels, make 3e14. Sums of far larger
values overflow."""


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
    """The density that a reader has read, after every check. A user's file becomes a `DensityGrid` only here.

    Negative values become zero and are counted in `clipped_voxels` (PAW densities ring to small negative values in
    vacuum, and can be negative at nuclei). The electron count is not corrected for this: it rises by
    `clipped_electrons`.

    Args:
        values: `[nx, ny, nz]`, rho x V in electrons as read; the reader has checked their number, and that of the
            atoms, before it read them.
        partial: the values may be any part of the electrons of these atoms.
        cube: the values are from a cube; some programs write cubes in e/Å³ and with rounded sides.
    """
    check_finite(values, source)
    if "distances" not in rules.accept:
        check_cell(lattice, atomic_numbers, frac_coords, source)
    crystal = Crystal(lattice, atomic_numbers, frac_coords, source)
    in_e_per_a3: tuple[Reading, ...] = ()
    if cube:
        found = float(np.mean(values, dtype=np.float64))
        allowed = earned_tolerance(values, lattice, cube=True)
        in_e_per_a3 = _meanings(found * BOHR_A**3, allowed, atomic_numbers, rules.valences)
        # Readings with cores do not count here: on grids like these the sum over cores is a matter of chance.
        as_is = [each for each in _meanings(found, allowed, atomic_numbers, rules.valences) if not each.with_cores]
        if in_e_per_a3 and not as_is and "cube_e_per_a3" in rules.accept:
            values = values * BOHR_A**3
            in_e_per_a3 = ()
    check_rho_times_volume(values, crystal, partial=partial, cube=cube)
    if "zeros" not in rules.accept:
        check_zeros(values, source)
    meanings: tuple[Reading, ...] = ()
    if rules.count_electrons and not partial:
        meanings = check_electron_count(values, crystal, accept=rules.accept, given=rules.valences, cube=cube)
    if "atoms" not in rules.accept and not partial:
        check_atoms_on_density(values, crystal, meanings, unit_hint(in_e_per_a3[0]) if in_e_per_a3 else "")
    rho, clipped, added = clip_negative_values(values / crystal.volume_a3, crystal.volume_a3)
    return DensityGrid(rho, lattice, atomic_numbers, frac_coords, material_id, clipped, added, partial)


def _meanings(
    electrons: float, allowed: float, atomic_numbers: np.ndarray, given: Valences | None
) -> tuple[Reading, ...]:
    """The readings of these atoms that a count of electrons fits."""
    return tuple(each for each in readings(atomic_numbers, given) if abs(each.electrons - electrons) <= allowed)


def check_finite(values: np.ndarray, source: str) -> None:
    """Refuse values that rho x V cannot have, before they are summed."""
    # NaN fails the comparisons and is refused too. Every density of a folder comes through here, so nothing is copied.
    if not (values.min() > -LARGEST_ELECTRONS and values.max() < LARGEST_ELECTRONS):
        bad = values.size - int(np.count_nonzero(np.abs(values) < LARGEST_ELECTRONS))
        raise TomatError(
            f"{source}: {bad:,} of {values.size:,} values are NaN, infinite or beyond {LARGEST_ELECTRONS:g}; expected "
            "rho x V in electrons. The file is damaged: fetch it again, or leave this material out."
        )


def check_zeros(values: np.ndarray, source: str) -> None:
    """Refuse values that were partly zeroed: long runs or many exact zeros beside ordinary values. A density is smooth
    and reaches zero through small values (half of a slab's vacuum may be zero); a lost page or chunk does not."""
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
    longest = 0
    for order in ("C", "F"):  # of the file
        edges = np.flatnonzero(np.diff(zero.ravel(order), prepend=False, append=False))
        starts, stops = edges[::2], edges[1::2]
        steep = ordinary.ravel(order)
        at_end = steep[starts - 1] | steep[stops % len(steep)]  # the crystal is periodic
        longest = int(np.max((stops - starts)[at_end], initial=longest))
    if n_steep > LARGEST_STEEP_SHARE * values.size or longest > LONGEST_STEEP_RUN:
        raise TomatError(
            f"{source}: {n_zeros:,} of {values.size:,} values are exactly zero, {n_steep:,} beside ordinary values and "
            f"up to {longest:,} in a row; expected zeros beside small values. A part of the file was zeroed: fetch it "
            "again. `--accept zeros` reads it as it is."
        )


def check_rho_times_volume(values: np.ndarray, crystal: Crystal, *, partial: bool = False, cube: bool = False) -> None:
    """Refuse values that are not rho x V of these atoms; errors name the crystal, here and below."""
    source, atomic_numbers = crystal.name, crystal.atomic_numbers
    total = float(np.mean(values, dtype=np.float64))
    negative = values < 0
    negative_sum = -float(values[negative].sum(dtype=np.float64)) / values.size
    if negative_sum > LARGEST_NEGATIVE_SHARE * max(total + negative_sum, 0.0):
        raise TomatError(
            f"{source}: {100 * np.mean(negative):.1f} % of the values are negative, {negative_sum:.4g} of "
            f"{total + negative_sum:.4g} electrons; expected a total density, no spin or difference density."
        )
    least, most = plausible_electron_counts(atomic_numbers)
    least = 0.0 if partial else least
    if not least <= total <= most:
        volume_a3, bohr3 = crystal.volume_a3, BOHR_A**3
        between_0_and_1 = cube and values.min() >= 0 and values.max() <= 1.001 * volume_a3 / bohr3

        def fits(factor: float) -> bool:
            return least <= total * factor <= most

        hints = (
            (cube and fits(bohr3), "they look to be in e/Å³, not in e/bohr^3; `--accept cube_e_per_a3` reads it so"),
            (between_0_and_1, "the values lie between 0 and 1, as those of a localisation function"),
            (fits(volume_a3), "the values look like e/Å³; multiply them by the cell volume"),
            (fits(volume_a3 / bohr3), "the values look like e/bohr^3; multiply them by the cell volume in bohr^3"),
            (True, "the file is damaged or belongs to another structure"),
        )
        hint = next(words for condition, words in hints if condition)
        raise TomatError(
            f"{source}: the values average to {total:.4g}; as rho x V that is the electron count, and these "
            f"{atomic_numbers.size} atoms have {least:.4g} to {most:.4g}; {hint}."
        )


ELECTRON_TOLERANCE = 0.05
"""In electrons. The sums of twelve CHGCARs of other people are within 1.5e-5 of a whole number, those of plane-wave
grids in float32 within 0.001, whatever the size of the cell."""

VOXEL_DECIMALS_BOHR = 5e-7
"""Half a unit of the last digit of a voxel's side in a cube. Most codes write six decimals."""

SAME_PLANE = 1e-4
"""Largest difference of two copies of a plane, as a share of its largest value: cubes have five digits and more."""

FEWEST_VOXELS = 8
"""Fewest voxels along an axis whose planes are compared."""

ROUGH_TIMES = 3.0
"""A plane is said to be missing where the roughness is this many times the largest between all other planes."""


def earned_tolerance(values: np.ndarray, lattice: np.ndarray, *, cube: bool) -> float:
    """Electrons by which the sum of these values may differ from a count: `ELECTRON_TOLERANCE`, plus the values beside
    exact zeros (a writer may have set negative values to zero, which are at most as large as the values around: 0.011
    of 8 electrons in silicon of VASP), plus, for a cube, the rounding of its voxels' sides."""
    allowed = ELECTRON_TOLERANCE
    zero = values == 0
    if zero.any():
        beside = np.zeros(values.shape)
        for axis, step in itertools.product(range(3), (1, -1)):
            beside = np.maximum(beside, np.roll(values, step, axis))
        allowed += float(beside[zero].sum(dtype=np.float64)) / values.size
    if cube:
        sides_bohr = np.linalg.norm(lattice, axis=1) / np.array(values.shape) / BOHR_A
        allowed += abs(float(np.mean(values, dtype=np.float64))) * float((VOXEL_DECIMALS_BOHR / sides_bohr).sum())
    return allowed


def check_electron_count(
    values: np.ndarray,
    crystal: Crystal,
    *,
    accept: Sequence[str] = (),
    given: Valences | None = None,
    cube: bool = False,
    tolerance: float | None = None,
) -> tuple[Reading, ...]:
    """Refuse a count that is not a whole number, or not a sum of valences that pseudopotentials leave these elements.

    Returns the readings that the count fits; empty if it fits none and this was accepted.

    Args:
        accept: as in `ReadRules`: `fractional_electrons` lifts the first refusal, `electrons` the second.
        given: known valences; if every element has one, only their sum is accepted.
        tolerance: in electrons; None: `earned_tolerance`.
    """
    source, atomic_numbers = crystal.name, crystal.atomic_numbers
    found = float(np.mean(values, dtype=np.float64))
    allowed = earned_tolerance(values, crystal.lattice, cube=cube) if tolerance is None else tolerance
    fits = _meanings(found, allowed, atomic_numbers, given)
    known = readings(atomic_numbers, given)
    off = abs(found - round(found))
    whole = off <= allowed and round(found) > 0
    exact = given is not None and len(known) == 1
    flag = "electrons" if exact or whole else "fractional_electrons"
    if fits or flag in accept:
        return fits
    # The cause comes first: a folder shows the beginning of each reason.
    cause = _likely_cause(values, found, lambda n: _meanings(n, allowed, atomic_numbers, given), cube=cube)
    start = f"{source}: {found:.4f} electrons" + (f"; {cause} As read," if cause else ",")
    if exact:
        raise TomatError(
            f"{start} {found - known[0].electrons:+.4g} off the sum of the valences given (--valences, or the POTCAR "
            f"beside it), {known[0].words()}. `--accept electrons` reads a charged cell as it is."
        )
    if not whole:
        damaged = "" if cause else " A part of it is damaged or missing."
        raise TomatError(
            f"{start} {off:.2g} off a whole number, expected {allowed:.2g} at most.{damaged} `--accept {flag}` reads "
            "it as it is."
        )
    below = [each for each in known if each.electrons < found]
    above = [each for each in known if each.electrons > found]
    nearest = " and ".join(each.words() for each in below[-1:] + above[:1])
    start += " a count" if cause else ""
    unknown = "" if cause else " Atoms are missing, or it holds another quantity, such as cores or spins."
    raise TomatError(
        f"{start} which no pseudopotentials in use for these {len(atomic_numbers)} atoms give; nearest are {nearest}."
        f"{unknown} Give --valences where yours are others; `--accept electrons` reads it as it is, such as a charged "
        "cell."
    )


def _likely_cause(values: np.ndarray, found: float, fit: Callable[[float], Sequence[Reading]], *, cube: bool) -> str:
    """A sentence on the likely cause of a count that does not fit; empty if none of the known causes is likely."""
    if cube and (meanings := fit(found * BOHR_A**3)):
        return unit_hint(meanings[0])
    shape = values.shape
    twice = [axis for axis in range(3) if _ends_are_one(values, axis)]
    if twice:
        inner = values[tuple(slice(0, n - 1) if axis in twice else slice(None) for axis, n in enumerate(shape))]
        shorter = float(np.mean(inner, dtype=np.float64))
        without = shorter * float(np.prod([(shape[axis] - 1) / shape[axis] for axis in twice]))
        named = ", ".join("xyz"[axis] for axis in twice)
        for electrons, sides in ((without, " and the sides are too long by that voxel"), (shorter, "")):
            if meanings := fit(electrons):
                return (
                    f"the first and the last plane along {named} are the same, so both end points were written{sides}: "
                    f"without the last it holds {meanings[0].words()}. Write the grid without its end points."
                )
    for axes in itertools.chain.from_iterable(itertools.combinations(range(3), n) for n in (3, 2, 1)):
        if meanings := fit(found * float(np.prod([(shape[axis] - 1) / shape[axis] for axis in axes]))):
            return (
                f"if the voxels along {', '.join('xyz'[axis] for axis in axes)} were a side over N, not over N - 1, it "
                f"would hold {meanings[0].words()}: write the voxel as the side of the cell over the number of voxels."
            )
    for axis, n in enumerate(shape):
        place, plane = _missing_plane(values, axis)
        if place is None:
            continue
        where = f"between planes {place} and {place + 1} along {'xyz'[axis]}"
        # Either the side was shortened with the plane, or it was not.
        if meanings := fit(found + plane / n) or fit((found * n + plane) / (n + 1)):
            return f"with one more plane {where} it would hold {meanings[0].words()}: a plane is missing."
        return f"it is rough {where}: a plane may be missing there."
    return ""


def unit_hint(reading: Reading) -> str:
    """The sentence about a cube whose values are in another unit."""
    return f"this cube is in e/Å³, not in e/bohr^3: it holds {reading.words()}; `--accept cube_e_per_a3` reads it so."


def _ends_are_one(values: np.ndarray, axis: int) -> bool:
    """Whether the last plane repeats the first, and the plane before the last differs from both."""
    if values.shape[axis] < FEWEST_VOXELS:
        return False
    first, before, last = (np.take(values, index, axis) for index in (0, -2, -1))
    largest = float(np.abs(first).max())
    apart, step = float(np.abs(first - last).max()), float(np.abs(first - before).max())
    return largest > 0 and apart <= SAME_PLANE * largest and step > 10 * apart


def _missing_plane(values: np.ndarray, axis: int) -> tuple[int | None, float]:
    """The plane after which one is missing, and the mean of the missing one by its neighbours; None if the planes are
    as smooth there as elsewhere. A cubic through two neighbours on each side gives a plane of a density."""
    n = values.shape[axis]
    if n < 2 * FEWEST_VOXELS:
        return None, 0.0
    planes = np.moveaxis(values, axis, 0).reshape(n, -1)
    near, far = (np.roll(planes, k, axis=0) + np.roll(planes, -k, axis=0) for k in (1, 2))
    rough = np.abs(planes - (4 * near - far) / 6).mean(axis=1)
    both = rough + np.roll(rough, -1)  # of a plane and the next
    worst = int(np.argmax(both))
    others = np.delete(both, [(worst + shift) % n for shift in range(-3, 4)])
    if both[worst] < ROUGH_TIMES * others.max(initial=0.0):
        return None, 0.0
    a, b, c, d = (float(planes[(worst + shift) % n].mean(dtype=np.float64)) for shift in (-1, 0, 1, 2))
    return worst, (9 * (b + c) - a - d) / 16
