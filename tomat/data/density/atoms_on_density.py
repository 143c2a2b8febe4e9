"""Do these atoms sit on this density? Every density is near a sum of atoms: one fitted radial function per element
leaves some percent of it, with or without cores. Around places without atoms such functions leave a third and more."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import symbol_of
from tomat.data.density.geometry import BOHR_A, atoms_and_images, neighbours
from tomat.data.density.promolecule import RadialBasis, radial_sums
from tomat.data.density.valence_table import Reading

BASIS = RadialBasis(16, 4.0, 0.15)
"""Knots are 0.03 A apart at the nucleus, as all-electron densities need."""

SAMPLES = 1536
"""Number of voxels that are fitted, in 3 to 30 ms. They are drawn in proportion to density plus mean density."""

LARGEST_MISFIT = 0.34
"""Largest share of the electrons that a sum of atoms may leave. The 103 embedded cells have 0.5 to 10.2 %, silicon of
VASP 10 %, Ca2N (electrons where no atom is) 2 %, molecules from hydrogen to methane in a box 8 to 14 %, fcc aluminium
5 %. The embedded cells have 35 % and more if their atoms are moved by (0.13, 0.21, 0.37) of the cell."""

DOUBTFUL_MISFIT = 0.2
"""`tomat density show` says of a larger share that it is much."""

BETTER_SHARE, LEAST_GAIN = 0.85, 0.02
"""Another reading of the file is right if it leaves less than this share of what the present one leaves, and less by
this gain. No embedded cell has a share below 0.99 with its axes exchanged."""

COARSEST_A = 0.4
"""Voxels further apart show too little of an atom to judge by."""

SPHERE_A = 1.0
"""Radius around a nucleus, at most half the distance to the nearest atom, in which electrons are counted."""

MOST_GAINED = 1.5
"""Most electrons that this sphere may hold beyond the valence electrons of its atom."""

LEAST_HELD = 0.05
"""Least share of its valence electrons (`MANY` or more) that an atom has within 1 A; it shrinks with the volume."""

MANY = 5

CORE_SPHERE_A, LEAST_CORE_SHARE = 0.5, 0.7
"""Within this radius an all-electron density holds at least this share of the electrons of a Thomas-Fermi atom."""

ATOMS_LOOKED_AT = 8
"""Most atoms of each element that are looked at."""


@dataclass(frozen=True)
class Misfit:
    """The part of a density that a sum of atoms leaves unexplained."""

    share: float
    worst_frac: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Fractional coordinates of the voxel where most is left."""
    worst_e_per_a3: float = 0.0


def misfit_of(rho: np.ndarray, crystal: Crystal) -> Misfit | None:
    """What a fitted sum of atoms leaves of a density in any unit; None for coarse voxels or a mean of 0 or less."""
    from scipy.optimize import nnls

    mean = float(np.mean(rho, dtype=np.float64))
    if max(np.linalg.norm(crystal.lattice, axis=1) / rho.shape) > COARSEST_A or not mean > 0:
        return None
    flat = rho.ravel().astype(np.float64)
    index, weights = np.arange(flat.size), np.ones(flat.size)
    if flat.size > SAMPLES:
        chances = np.abs(flat) + np.abs(flat).mean()
        total = np.cumsum(chances)
        drawn = (np.arange(SAMPLES) + np.random.default_rng(0).random(SAMPLES)) / SAMPLES * total[-1]
        index = np.minimum(np.searchsorted(total, drawn), flat.size - 1)
        weights = total[-1] / SAMPLES / chances[index]  # how many voxels each stands for
    places = np.stack(np.unravel_index(index, rho.shape), axis=1) / np.array(rho.shape)
    sums = radial_sums(crystal, places, BASIS)
    # The last column is a constant density, as the free electrons of a metal have.
    functions = np.concatenate([*(sums[z] for z in sorted(sums)), np.ones((len(places), 1))], axis=1)
    found = flat[index]
    root = np.sqrt(weights / (np.abs(found) + mean))
    coefficients, _ = nnls(functions * root[:, None], found * root, maxiter=100 * functions.shape[1])
    left = found - functions @ coefficients
    worst = int(np.argmax(left))
    x, y, z = places[worst].tolist()
    return Misfit(float((weights * np.abs(left)).sum() / (weights * found).sum()), (x, y, z), float(found[worst]))


def check_atoms_on_density(
    values: np.ndarray, crystal: Crystal, meanings: Sequence[Reading] = (), hint: str = ""
) -> None:
    """Refuse a density that does not lie on its atoms, or that lies on other elements; errors name the crystal.
    `meanings`: the valences of the atoms that fit the electron count; empty if they are not known."""
    found = misfit_of(values, crystal)
    if found is None:
        return
    source = crystal.name
    remedy = "`--accept atoms` reads it as it is."
    if found.share > LEAST_GAIN:
        for words, other, moved in _other_readings(values, crystal):
            again = misfit_of(other, moved)
            share = np.inf if again is None else again.share
            if share < BETTER_SHARE * found.share and share < found.share - LEAST_GAIN and share < LARGEST_MISFIT:
                raise TomatError(
                    f"{source}: {words}: if so, one function an element around the atoms cannot explain "
                    f"{100 * share:.1f} % of the density; as read, {100 * found.share:.0f} %. {remedy}"
                )
    if found.share > LARGEST_MISFIT:
        basis, _, images = atoms_and_images(crystal.lattice, crystal.frac_coords)
        place = np.mod(np.array(found.worst_frac) @ crystal.lattice @ np.linalg.inv(basis), 1.0) @ basis
        away_a = np.linalg.norm(images - place, axis=1).min()
        words = ", ".join(f"{each:.3f}" for each in found.worst_frac)
        raise TomatError(
            f"{source}: the density does not lie on the atoms: {found.worst_e_per_a3 / crystal.volume_a3:.2g} e/Å³ at "
            f"({words}) of the cell, {away_a:.2f} A from the nearest. One function an element around them cannot "
            f"explain {100 * found.share:.0f} % of it, expected up to {100 * LARGEST_MISFIT:.0f} %; atoms are missing "
            f"or elsewhere, or the values are in another order. {remedy}"
        )
    if meanings:
        held = _held(values, crystal)
        faults = [_fault(each, held) for each in meanings]
        if all(faults):
            start = f"{source}: {hint} As read," if hint else f"{source}:"
            raise TomatError(f"{start} the density does not fit the elements of its atoms: {faults[0]}. {remedy}")


def _other_readings(values: np.ndarray, crystal: Crystal) -> Iterator[tuple[str, np.ndarray, Crystal]]:
    """Other readings of a file: what differs, in words, then the values and the atoms."""
    order = "the values are in the other order of axes,"
    yield f"{order} z fastest where x is expected", values.ravel(order="F").reshape(values.shape), crystal
    yield f"{order} x fastest where z is expected", values.ravel().reshape(values.shape, order="F"), crystal
    for factor, unit in ((1 / BOHR_A, "A in a cell in bohr"), (BOHR_A, "bohr in a cell in A")):
        words = f"the atoms are in {unit}, expected {factor:.4g} times their coordinates"
        yield words, values, replace(crystal, frac_coords=crystal.frac_coords * factor)
    words = "the atoms are off by half the cell, its origin is wrong"
    yield words, values, replace(crystal, frac_coords=crystal.frac_coords + 0.5)


def _held(values: np.ndarray, crystal: Crystal) -> dict[int, tuple[float, float, float]]:
    """By atomic number, means over the first atoms: electrons in a sphere, its radius in A, electrons in the core."""
    first, _, distance_a = neighbours(crystal.lattice, crystal.frac_coords)
    held = {}
    for z in np.unique(crystal.atomic_numbers).tolist():
        found = []
        for atom in np.flatnonzero(crystal.atomic_numbers == z)[:ATOMS_LOOKED_AT]:
            radius_a = min(SPHERE_A, float(distance_a[first == atom].min()) / 2)
            within = [
                electrons_within(values, crystal.lattice, crystal.frac_coords[atom], r)
                for r in (radius_a, CORE_SPHERE_A)
            ]
            found.append((within[0], radius_a, within[1]))
        held[z] = tuple(np.mean(found, axis=0).tolist())
    return held


def _fault(meaning: Reading, held: dict[int, tuple[float, float, float]]) -> str:
    """What one meaning of the count cannot explain, in words; empty if it explains all."""
    for z in meaning.with_cores:
        expected = thomas_fermi_electrons(z, CORE_SPHERE_A)
        _, _, core = held[z]
        if z > 10 and core < LEAST_CORE_SHARE * expected:
            return (
                f"{meaning.words()} would be all electrons, but {symbol_of(z)} has {core:.2g} within "
                f"{CORE_SPHERE_A:g} A, its shells {expected:.2g}"
            )
    for z, (electrons, radius_a, _) in held.items():
        valence = meaning.valences[z]
        too_few = valence >= MANY and electrons < LEAST_HELD * valence * (radius_a / SPHERE_A) ** 3
        if too_few or electrons > valence + MOST_GAINED:
            return f"{symbol_of(z)} has {electrons:.2g} electrons within {radius_a:.2f} A and brings {valence:g}"
    return ""


def electrons_within(values: np.ndarray, lattice: np.ndarray, frac: np.ndarray, radius_a: float) -> float:
    """Electrons in a sphere, by its voxels. `frac`: `[3]`, its centre."""
    shape = np.array(values.shape)
    steps = lattice / shape[:, None]
    reach = np.ceil(radius_a * np.linalg.norm(np.linalg.inv(steps), axis=0)).astype(int)
    at = frac * shape
    nearest = np.round(at).astype(int)
    axes = [np.arange(n - r, n + r + 1) for n, r in zip(nearest, reach, strict=True)]
    x, y, z = ((axis - a)[:, None] * step for axis, a, step in zip(axes, at, steps, strict=True))
    away = x[:, None, None] + y[None, :, None] + z[None, None, :]
    inside = (away**2).sum(axis=-1) <= radius_a**2
    found = values[np.ix_(*(axis % n for axis, n in zip(axes, values.shape, strict=True)))]
    if not inside.any():
        return 0.0
    # Mean density times the sphere's volume, which differs from the volume of its few voxels.
    return float(found[inside].mean()) * (4 / 3 * np.pi * radius_a**3) / abs(float(np.linalg.det(lattice)))


def thomas_fermi_electrons(number: int, radius_a: float) -> float:
    """Electrons within a radius of the neutral atom of Thomas and Fermi: Z (1 - phi(x) + x phi'(x)) at
    x = r / (0.8853 a0 Z^(-1/3)), with phi of three exponentials (Moliere, Z. Naturforsch. 2a, 133, 1947)."""
    x = radius_a / (0.8853 * BOHR_A * number ** (-1 / 3))
    parts = ((0.1, 6.0), (0.55, 1.2), (0.35, 0.3))
    return number * (1 - sum(share * (1 + rate * x) * np.exp(-rate * x) for share, rate in parts))
