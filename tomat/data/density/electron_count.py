"""Does a density hold as many electrons as its atoms bring? And if not, what was probably done to it."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.valence_table import Reading, Valences, readings

ELECTRON_TOLERANCE = 0.05
"""Electrons. The sums of twelve CHGCARs of other people are within 1.5e-5 of a whole number, plane-wave grids of
float32 within 0.001, whatever the size of the cell."""

VOXEL_DECIMALS_BOHR = 5e-7
"""Half a unit of the last digit of a voxel's side in a cube, of which most codes write six decimals."""

SAME_PLANE = 1e-4
"""Largest difference of two planes that are one, as a share of its largest value: cubes have five digits and more."""

FEWEST_VOXELS = 8

ROUGH_TIMES = 3.0
"""Times the roughness between all other planes, from which on one is said to be missing."""


def earned_tolerance(values: np.ndarray, lattice: np.ndarray, *, cube: bool) -> float:
    """Electrons that the sum of these values may be off a count, for what is known of how they were written.

    Beyond `ELECTRON_TOLERANCE` a file earns what stands beside its exact zeros (negative values that a writer has set
    to zero are between them and the values around: 0.011 electrons of 8 in silicon of VASP), and a cube what its
    voxels' sides are rounded by (0.01 of 1,000 electrons).

    Args:
        cube: sides of voxels were written with six decimals of a bohr.
    """
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
    lattice: np.ndarray,
    atomic_numbers: np.ndarray,
    source: str,
    *,
    accept: Sequence[str] = (),
    given: Valences | None = None,
    cube: bool = False,
    tolerance: float | None = None,
) -> tuple[Reading, ...]:
    """Refuse a count that is no whole number, or no sum of valences that pseudopotentials leave these elements.

    Returns what the count can mean; empty where that is not known, which was accepted.

    Args:
        accept: of the rules of reading: `fractional_electrons` lifts the first refusal, `electrons` the second.
        tolerance: electrons; None: what the values earn.
    """
    found = float(np.mean(values, dtype=np.float64))
    allowed = earned_tolerance(values, lattice, cube=cube) if tolerance is None else tolerance
    known = readings(atomic_numbers, given)
    fits = tuple(each for each in known if abs(each.electrons - found) <= allowed)
    whole = abs(found - round(found)) <= allowed and round(found) > 0
    exact = given is not None and len(known) == 1
    flag = "electrons" if exact or whole else "fractional_electrons"
    if fits or flag in accept:
        return fits

    def fit(electrons: float) -> Reading | None:
        return next((each for each in known if abs(each.electrons - electrons) <= allowed), None)

    # The cause comes first: a folder shows the beginning of each reason.
    cause = _likely_cause(values, found, fit, cube=cube)
    start = f"{source}: {found:.4f} electrons; {cause}" if cause else f"{source}: the density integrates to {found:.4f}"
    if exact:
        raise TomatError(
            f"{start} {'As read,' if cause else 'electrons,'} {found - known[0].electrons:+.4g} off what the valences "
            f"given (--valences, or the POTCAR beside it) add up to, {known[0].words()}. `--accept electrons` reads a "
            "charged cell as it is."
        )
    if not whole:
        raise TomatError(
            f"{start} {'As read,' if cause else 'electrons,'} {abs(found - round(found)):.2g} off a whole number, more "
            f"than {allowed:.2g}.{'' if cause else ' A part of it is damaged or missing.'} `--accept {flag}` reads it "
            "as it is."
        )
    unknown = "" if cause else " Atoms are missing, or it holds another quantity, such as cores or spins."
    raise TomatError(
        f"{start} {'As read, a count' if cause else 'electrons,'} which no pseudopotentials in use for these "
        f"{len(atomic_numbers)} atoms give; the nearest are {_nearest(known, found)}.{unknown} Give --valences where "
        "yours are others; `--accept electrons` reads it as it is, such as a charged cell."
    )


def _nearest(known: Sequence[Reading], found: float) -> str:
    """The count below and the one above, each in one way."""
    below = [each for each in known if each.electrons < found][-1:]
    above = [each for each in known if each.electrons > found][:1]
    return " and ".join(each.words() for each in below + above)


def _likely_cause(values: np.ndarray, found: float, fit: Callable[[float], Reading | None], *, cube: bool) -> str:
    """A sentence on what would make the count one of those that fit; empty where nothing of what is known does."""
    if cube and (reading := fit(found * BOHR_A**3)):
        return unit_hint(reading)
    shape = values.shape
    twice = [axis for axis in range(3) if _ends_are_one(values, axis)]
    if twice:
        inner = values[tuple(slice(0, n - 1) if axis in twice else slice(None) for axis, n in enumerate(shape))]
        shorter = found_without = float(np.mean(inner, dtype=np.float64))
        for axis in twice:
            found_without *= (shape[axis] - 1) / shape[axis]
        named = ", ".join("xyz"[axis] for axis in twice)
        for electrons, sides in ((found_without, " and the sides are too long by that voxel"), (shorter, "")):
            if reading := fit(electrons):
                return (
                    f"the first and the last plane along {named} are the same, both end points were written{sides}: "
                    f"without the last it holds {reading.words()}. Write the grid without its end points."
                )
    for axes in ((0, 1, 2), *itertools.combinations(range(3), 2), (0,), (1,), (2,)):
        factor = float(np.prod([(shape[axis] - 1) / shape[axis] for axis in axes]))
        if reading := fit(found * factor):
            named = ", ".join("xyz"[axis] for axis in axes)
            return (
                f"were the voxels along {named} a side over N and not over N - 1, it would hold {reading.words()}: "
                "write the voxel as the side of the cell over the number of voxels."
            )
    for axis, n in enumerate(shape):
        place, plane = _missing_plane(values, axis)
        if place is None:
            continue
        where = f"between planes {place} and {place + 1} along {'xyz'[axis]}"
        # Either the side was shortened with the plane, or it was not.
        for electrons in (found + plane / n, (found * n + plane) / (n + 1)):
            if reading := fit(electrons):
                return f"with one more plane {where} it would hold {reading.words()}: a plane is missing."
        return f"it is rough {where}: a plane may be missing there."
    return ""


def unit_hint(reading: Reading) -> str:
    """What is said of a cube whose values are in another unit."""
    return (
        f"this cube is in e/A^3, not in e/bohr^3: so it holds {reading.words()}, and `--accept cube_e_per_a3` reads it "
        "so."
    )


def _ends_are_one(values: np.ndarray, axis: int) -> bool:
    """Whether the first plane was written again as the last, and the planes before it are others."""
    if values.shape[axis] < FEWEST_VOXELS:
        return False
    first, before, last = (np.take(values, index, axis) for index in (0, -2, -1))
    largest = float(np.abs(first).max())
    apart, step = float(np.abs(first - last).max()), float(np.abs(first - before).max())
    return largest > 0 and apart <= SAME_PLANE * largest and step > 10 * apart


def _missing_plane(values: np.ndarray, axis: int) -> tuple[int | None, float]:
    """Behind which plane one is missing, and its mean by its neighbours; None where the planes are as smooth there as
    elsewhere. A plane of a density is what its two neighbours on both sides give by a cubic."""
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
