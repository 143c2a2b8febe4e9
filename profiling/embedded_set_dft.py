"""One plane-wave DFT calculation, by eminus or by pw.x, until its density is converged.

Both solve the same equations: without symmetry pw.x converged to the densities of eminus within 0.01 % NMAE
(`docs/tracking/scf-savings.md`). pw.x uses symmetry, can have unequal k-point weights and partially filled bands, and
is tens of times faster.

eminus (Apache-2.0, https://gitlab.com/wangenau/eminus) minimises the Kohn-Sham energy directly. Its conjugate-gradient
method is run here in short stretches. Without restarts it lost the minimum again on several crystals (MgO at 20 hartree
and 3x3x3 k-points: -16.350 hartree after 20 steps, between -16.3 and -3 in the next 40 steps). With a restart every 8
steps, a trial step of 0.1 and conjugate-gradient form 2 it reached -16.36285 in 35 steps. eminus's `auto` method does
not help: it reported convergence 0.001 hartree above the minimum, because a tiny steepest-descent step changes the
energy by less than the tolerance. So convergence here means that two stretches in a row end by the energy criterion, at
the lowest energy seen.
"""

import math
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from embedded_set_cells import CellRecipe
from embedded_set_gth import FUNCTIONAL, gth_text
from pwscf import CHARGE_DENSITY, PwCalculation, PwX, density_of_run

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import atomic_number
from tomat.data.density.geometry import BOHR_A

ENERGY_TOLERANCE_HARTREE_PER_ATOM = 5.0e-7
"""Energy change per step and atom that ends a stretch. For Si, the density at a total tolerance of 1e-6 hartree
differed by 0.03 % NMAE from one converged to 1e-9."""
STRETCH_STEPS = 8
TRIAL_STEP = 0.1
LARGEST_STEPS = 96
RY_PER_HARTREE = 2.0
FIXED = "fixed, 2 per band"
CONV_THR_RY = 1e-10
"""Estimated energy error at which pw.x ends. The density error is proportional to its square root."""
LARGEST_SECONDS = 1200.0
"""Time limit of one run of pw.x."""


@dataclass(frozen=True)
class Calculation:
    """A converged (or abandoned) calculation."""

    rho: np.ndarray | None
    """`[nx, ny, nz]`, e/Å³, on the smallest grid that holds its whole Fourier series; None without a density."""
    reason: str
    """Why the calculation counts as not converged; empty if it converged."""
    record: dict[str, Any]
    """JSON content: what was computed and how it converged, with units in the keys."""


def time_reversal_mesh(mesh: tuple[int, int, int], shift: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """A uniform k-mesh with only one of k and -k, which give the same density.

    Args:
        mesh: points along each reciprocal axis.
        shift: 0 keeps Gamma, 1 moves the mesh by half a step, per axis.

    Returns:
        k-points in units of the reciprocal vectors `[n, 3]`, in [-1/2, 1/2], and weights `[n]` that sum to 1.
    """
    steps = 2 * np.array(mesh)
    counts: dict[tuple[int, ...], int] = {}
    for index in np.ndindex(*mesh):
        point = tuple(int(value) for value in (2 * np.array(index) + np.array(shift)) % steps)
        mirror = tuple(int(value) for value in (-np.array(point)) % steps)
        key = mirror if mirror in counts else point
        counts[key] = counts.get(key, 0) + 1
    k_points = np.array(list(counts)) / steps
    weights = np.array(list(counts.values()), dtype=np.float64)
    return k_points - np.round(k_points), weights / weights.sum()


def band_limited_shape(lattice_bohr: np.ndarray, e_cut_hartree: float) -> tuple[int, int, int]:
    """The smallest grid that represents a density of orbitals up to the cut-off without aliasing.

    Orbitals reach |G| = sqrt(2 E), their products 2 sqrt(2 E). Along axis i the integer index of G is G . a_i / (2 pi),
    at most |G| |a_i| / (2 pi) = |a_i| sqrt(2 E) / pi.
    """
    reach = np.linalg.norm(lattice_bohr, axis=1) * math.sqrt(2 * e_cut_hartree) / math.pi
    nx, ny, nz = (2 * int(value + 1e-9) + 1 for value in reach)
    return nx, ny, nz


def fourier_truncated(values: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """`values` on a smaller grid of odd sides, with only the Fourier coefficients that this grid can hold."""
    spectrum = np.fft.fftn(values)
    for axis, side in enumerate(shape):
        n = spectrum.shape[axis]
        kept = np.fft.fftfreq(side, 1 / side).round().astype(int) % n
        spectrum = np.take(spectrum, kept, axis=axis)
    return np.real(np.fft.ifftn(spectrum)) * (math.prod(shape) / values.size)


def calculate(recipe: CellRecipe) -> Calculation:
    """Compute the valence density of a cell with PBE and GTH pseudopotentials.

    Raises:
        TomatError: eminus finds no pseudopotential with the named valence, or pw.x is not installed.
    """
    return _by_pw(recipe) if recipe.engine == "pw.x" else _by_eminus(recipe)


def _by_pw(recipe: CellRecipe) -> Calculation:
    numbers = np.array([atomic_number(symbol) for symbol in recipe.symbols])
    lattice = np.array(recipe.lattice_a)
    crystal = Crystal(lattice, numbers, np.array(recipe.frac_coords), recipe.material_id)
    valences = dict(zip(recipe.symbols, recipe.valence, strict=True))
    asked = PwCalculation(
        crystal=crystal,
        e_cut_ry=RY_PER_HARTREE * recipe.e_cut_hartree,
        k_mesh=recipe.k_mesh,
        k_shift=recipe.k_shift,
        pseudopotentials={symbol: gth_text(symbol, valence) for symbol, valence in valences.items()},
        functional=FUNCTIONAL.upper(),
        conv_thr_ry=CONV_THR_RY,
        degauss_ry=RY_PER_HARTREE * recipe.smearing_hartree,
        symmetry=True,
    )
    with tempfile.TemporaryDirectory() as place:
        run = PwX(Path(place), limit_seconds=LARGEST_SECONDS).run(asked, "own", None)
        rho = None
        if not run.said.reason:
            shape = band_limited_shape(lattice / BOHR_A, recipe.e_cut_hartree)
            rho = density_of_run(run.folder / CHARGE_DENSITY, crystal, shape).rho
    said = run.said
    occupations = f"Gaussian smearing, {recipe.smearing_hartree:g} hartree" if recipe.smearing_hartree else FIXED
    record = {
        "code": f"pw.x {said.version}",
        **_settings(recipe),
        "k_points_after_symmetry": said.k_points,
        "occupations": occupations,
        "total_energy_hartree": None if said.energy_ry is None else said.energy_ry / RY_PER_HARTREE,
        "estimated_energy_error_hartree": said.accuracy_ry[-1] / RY_PER_HARTREE if said.accuracy_ry else None,
        "scf_iterations": said.iterations,
        "converged": rho is not None,
        "valence_electrons": sum(recipe.valence),
        "electron_count": None if rho is None else float(rho.mean(dtype=np.float64)) * crystal.volume_a3,
        "fft_shape": None if said.fft_shape is None else list(said.fft_shape),
        "seconds": said.cpu_seconds,
    }
    return Calculation(rho, said.reason, record)


def _settings(recipe: CellRecipe) -> dict[str, Any]:
    """The part of the record that is the same for both codes."""
    return {
        "functional": FUNCTIONAL.upper(),
        "pseudopotentials": [
            f"{s} GTH-PBE-q{z}" for s, z in dict(zip(recipe.symbols, recipe.valence, strict=True)).items()
        ],
        "e_cut_hartree": recipe.e_cut_hartree,
        "k_mesh": list(recipe.k_mesh),
        "k_shift_half_steps": list(recipe.k_shift),
    }


def _by_eminus(recipe: CellRecipe) -> Calculation:
    import eminus
    from eminus.atoms import Atoms
    from eminus.kpoints import kpoint_convert
    from eminus.scf import RSCF
    from eminus.units import ang2bohr, bohr2ang

    started = time.perf_counter()
    lattice_a = np.array(recipe.lattice_a)
    lattice_bohr = np.asarray(ang2bohr(lattice_a))

    e_cut = recipe.e_cut_hartree
    # Level 0 is "critical": eminus otherwise warns that a general cell is not the cubic one of its default k-points.
    eminus.config.verbose = 0
    positions = np.array(recipe.frac_coords) @ lattice_bohr
    atoms = Atoms(list(recipe.symbols), positions, ecut=e_cut, a=lattice_bohr, unrestricted=False, verbose=0)
    # Set explicitly, because eminus otherwise takes the first of several valences that it finds for an element.
    atoms.Z = list(recipe.valence)
    atoms.build()
    k_points, weights = time_reversal_mesh(recipe.k_mesh, recipe.k_shift)
    atoms.set_k(kpoint_convert(k_points, lattice_bohr), weights)
    atoms.occ.fill()
    tolerance = ENERGY_TOLERANCE_HARTREE_PER_ATOM * len(recipe.symbols)
    scf = RSCF(atoms, xc=FUNCTIONAL, etol=tolerance, opt={"pccg": STRETCH_STEPS}, verbose=0)
    if [scf.gth[symbol]["Zion"] for symbol in recipe.symbols] != list(recipe.valence):
        raise TomatError(
            f"{recipe.material_id}: no GTH pseudopotential of valence {recipe.valence} for {recipe.symbols}."
        )

    energies: list[float] = []
    scf.callback = lambda scf, step: energies.append(float(scf.energies.Etot))
    ended_before, converged = False, False
    density, change = np.zeros(0), math.inf
    while len(energies) < LARGEST_STEPS and not converged:
        scf.run(betat=TRIAL_STEP, cgform=2)
        # The callback sees the energy of the previous step; the last energy is in the object.
        last = float(scf.energies.Etot)
        at_the_bottom = last <= min(energies[1:], default=last) + 2 * tolerance
        converged = scf.is_converged and ended_before and at_the_bottom
        ended_before = scf.is_converged and at_the_bottom
        before, density = density, np.asarray(scf.n)
        if before.size:
            change = float(np.abs(density - before).sum() / density.sum())

    shape = band_limited_shape(lattice_bohr, e_cut)
    on_fft_grid = density.reshape([int(side) for side in atoms.s]) / float(bohr2ang(1.0)) ** 3
    rho = fourier_truncated(on_fft_grid, shape)
    record = {
        "code": f"eminus {eminus.__version__}",
        **_settings(recipe),
        "k_points_after_time_reversal": len(weights),
        "occupations": FIXED,
        "total_energy_hartree": float(scf.energies.Etot),
        "energy_tolerance_hartree": tolerance,
        "last_energy_change_hartree": float(scf.energies.Etot) - energies[-1],
        "last_stretch_density_change": change,
        "scf_iterations": len(energies),
        "converged": converged,
        "valence_electrons": sum(recipe.valence),
        "electron_count": float(rho.mean()) * abs(float(np.linalg.det(lattice_a))),
        "fft_shape": [int(side) for side in atoms.s],
        "fourier_truncation_nmae": _truncation_error(on_fft_grid, rho),
        "seconds": round(time.perf_counter() - started, 2),
    }
    reason = ""
    if not converged:
        reason = f"not converged after {len(energies)} iterations"
    elif abs(record["last_energy_change_hartree"]) >= tolerance:
        reason = f"the last step still changed the energy by {record['last_energy_change_hartree']:.3g} hartree"
    return Calculation(rho, reason, record)


def _truncation_error(before: np.ndarray, after: np.ndarray) -> float:
    """Share of the spectrum, by amplitude, that `fourier_truncated` removed: rounding errors if nothing was lost."""
    whole = np.abs(np.fft.fftn(before) / before.size).sum()
    return float(abs(whole - np.abs(np.fft.fftn(after) / after.size).sum()) / whole)
