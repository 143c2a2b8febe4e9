"""The promolecule: a density as a sum over atoms of one non-negative radial function for each element.

It reads the structure alone, and is the baseline that every prediction from a structure has to beat. Fitted like the
codec: normal equations are added up density by density, in any process, and solved once. Without non-negativity an
element that is in one compound takes whatever its neighbours leave over, and is useless elsewhere (up to 116 % NMAE
where the non-negative one has 6 %).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import dump_json
from tomat.density.crystal import Crystal
from tomat.density.elements import SYMBOLS, symbol_of
from tomat.density.grid import DensityGrid
from tomat.density.radial import RadialBasis

FIT_VOXELS = 8192
"""Voxels of each density that are fitted, spread evenly over its grid. Each has some hundred atoms around it."""

WEIGHT_E_PER_A3 = 0.1
"""Squared errors weigh 1 / (rho + this), which brings them near to the absolute error that NMAE counts. With each of
the 28 training compounds left out in turn, the median NMAE was 9.8 % with it, 10.8 % with equal weights."""

_STRIDES = 0.8191725133961645, 0.6710436067037893, 0.5497004779019703
"""Powers of the reciprocal of the root of x^4 = x + 1: multiples of them, modulo 1, fill a cube evenly and in step with
no grid (M. Roberts, The unreasonable effectiveness of quasirandom sequences, 2018, R3)."""

_FORMAT = "tomat promolecule 1"


@dataclass(frozen=True, eq=False)
class Promolecule:
    """Fitted radial densities of elements."""

    basis: RadialBasis
    coefficients: Mapping[int, np.ndarray]
    """Atomic number to float64 `[basis.n]`, e/A^3, none negative."""
    n_materials: int = 0
    """Densities it was fitted to."""

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers it knows, ascending."""
        return tuple(sorted(self.coefficients))

    def table(self) -> np.ndarray:
        """Coefficients by atomic number, float32 `[119, basis.n]`; zero for unknown elements and for 0, no atom."""
        table = np.zeros((len(SYMBOLS) + 1, self.basis.n), np.float32)
        for number, values in self.coefficients.items():
            table[number] = values
        return table

    def check_elements(self, crystal: Crystal) -> None:
        """Refuse a structure with an element that no fitted density had.

        Raises:
            TomatError: naming the elements.
        """
        unknown = sorted(set(crystal.atomic_numbers.tolist()) - set(self.coefficients))
        if unknown:
            known = " ".join(symbol_of(number) for number in self.elements)
            raise TomatError(
                f"{crystal.name or 'the structure'} has {', '.join(symbol_of(number) for number in unknown)}, which "
                f"no training density had; the model knows {known}. Train it on densities with that element."
            )

    def density(self, crystal: Crystal, grid_shape: tuple[int, int, int]) -> np.ndarray:
        """The sum of atoms on a grid of the cell: float32 `[nx, ny, nz]`, e/A^3.

        Radial functions are interpolated linearly from 4,096 points, uniform in the basis' own stretched distance.

        Raises:
            TomatError: an element it does not know.
        """
        self.check_elements(crystal)
        basis, points = self.basis, 4096
        ends = np.linspace(0.0, basis.n + 1.0, points)
        radial = {z: basis(basis.stretch_a * np.expm1(ends / basis.scale)) @ c for z, c in self.coefficients.items()}
        total = np.zeros(grid_shape, np.float64)
        steps = crystal.lattice / np.array(grid_shape)[:, None]
        reach = np.ceil(basis.cutoff_a * np.linalg.norm(np.linalg.inv(steps), axis=0)).astype(int)
        for number, place in zip(crystal.atomic_numbers.tolist(), crystal.frac_coords, strict=True):
            at = place * grid_shape
            nearest = np.round(at).astype(int)
            axes = [np.arange(n - r, n + r + 1) for n, r in zip(nearest, reach, strict=True)]
            offsets = [(axis - a)[:, None] * step for axis, a, step in zip(axes, at, steps, strict=True)]
            for i, first in zip(axes[0], offsets[0], strict=True):
                place_a = first + offsets[1][:, None] + offsets[2][None]
                s = basis.scale * np.log1p(np.sqrt((place_a**2).sum(axis=-1)) / basis.stretch_a)
                inside = s < basis.n + 1
                j, k = np.nonzero(inside)
                values = np.interp(s[inside], ends, radial[number])
                plane = total[i % grid_shape[0]]
                flat = (axes[1][j] % grid_shape[1]) * grid_shape[2] + axes[2][k] % grid_shape[2]
                plane += np.bincount(flat, values, plane.size).reshape(plane.shape)
        return total.astype(np.float32)

    def electrons(self) -> dict[int, float]:
        """Electrons of each element's function: its integral over space, by Simpson's rule on 2,001 points."""
        from scipy.integrate import simpson

        r = np.linspace(0.0, self.basis.cutoff_a, 2001)
        values = self.basis(r) * (4 * np.pi * r**2)[:, None]
        return {number: float(simpson(values @ c, x=r)) for number, c in self.coefficients.items()}

    @property
    def sha256(self) -> str:
        """Hash of everything that decides its densities."""
        return hashlib.sha256(dump_json(self._content()).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "basis": {"n": self.basis.n, "cutoff_a": self.basis.cutoff_a, "stretch_a": self.basis.stretch_a},
            "coefficients_e_per_a3": {symbol_of(z): [float(v) for v in self.coefficients[z]] for z in self.elements},
            "n_materials": self.n_materials,
        }

    def to_text(self) -> str:
        """JSON with its own hash."""
        return dump_json({**self._content(), "sha256": self.sha256})

    @classmethod
    def from_text(cls, text: str, source: str) -> Promolecule:
        """Read what `to_text` wrote.

        Raises:
            TomatError: it is damaged, or something else.
        """
        from tomat.density.elements import atomic_number

        try:
            values = json.loads(text)
            found = cls(
                RadialBasis(**values["basis"]),
                {atomic_number(s): np.array(c, np.float64) for s, c in values["coefficients_e_per_a3"].items()},
                values["n_materials"],
            )
            whole = values["format"] == _FORMAT and values["sha256"] == found.sha256
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise TomatError(f"{source} is not a promolecule ({type(error).__name__}: {error}).") from error
        if not whole:
            raise TomatError(f"{source} is damaged, or of another version: its hash is not that of its content.")
        return found


@dataclass
class PromoleculeFit:
    """Normal equations of the least-squares fit, to which densities are added one by one.

    A voxel weighs 1 / (rho + `WEIGHT_E_PER_A3`), and every density the same.
    Sums of floats depend on their order: add densities, and partial sums of workers, in a fixed one.
    """

    basis: RadialBasis = field(default_factory=RadialBasis)
    n_materials: int = 0
    products: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """For each pair of atomic numbers (first <= second), float64 `[n, n]`: sums of products of their functions."""
    projections: dict[int, np.ndarray] = field(default_factory=dict)
    """For each atomic number, float64 `[n]`: sums of products of its functions with the density."""

    def add(self, grid: DensityGrid, voxels: int = FIT_VOXELS) -> None:
        """Add a density, at that many of its voxels."""
        crystal = Crystal.of(grid)
        index = (np.outer(np.arange(voxels), _STRIDES) % 1.0 * grid.grid_shape).astype(np.int64)
        rho = grid.rho[tuple(index.T)].astype(np.float64)
        weights = 1.0 / (rho + WEIGHT_E_PER_A3)
        weights /= float((weights * rho**2).sum())
        sums = radial_sums(crystal, index / np.array(grid.grid_shape), self.basis)
        for z, functions in sums.items():
            self.projections[z] = self.projections.get(z, np.zeros(self.basis.n)) + functions.T @ (weights * rho)
            for other, others in sums.items():
                if z <= other:
                    before = self.products.get((z, other), np.zeros((self.basis.n, self.basis.n)))
                    self.products[z, other] = before + (functions.T * weights) @ others
        self.n_materials += 1

    def merge(self, other: PromoleculeFit) -> None:
        """Add the densities that another fit has seen.

        Raises:
            TomatError: it has another basis.
        """
        if other.basis != self.basis:
            raise TomatError("two parts of a promolecule fit have different radial functions; fit both again.")
        for mine, theirs in ((self.projections, other.projections), (self.products, other.products)):
            for key in sorted(theirs):
                mine[key] = mine[key] + theirs[key] if key in mine else theirs[key].copy()
        self.n_materials += other.n_materials

    def solve(self) -> Promolecule:
        """The non-negative least-squares solution.

        Raises:
            TomatError: no density was added.
        """
        from scipy.optimize import nnls

        elements = sorted(self.projections)
        if not elements:
            raise TomatError("no density was given to fit a promolecule to.")
        n = self.basis.n
        matrix = np.zeros((len(elements) * n, len(elements) * n))
        for i, z in enumerate(elements):
            for j, other in enumerate(elements[i:], start=i):
                block = self.products.get((z, other), np.zeros((n, n)))
                matrix[i * n : (i + 1) * n, j * n : (j + 1) * n] = block
                matrix[j * n : (j + 1) * n, i * n : (i + 1) * n] = block.T
        right = np.concatenate([self.projections[z] for z in elements])
        # The equations of x^T M x / 2 - b^T x as a least-squares problem: M = L L^T, |L^T x - L^-1 b|. The ridge is
        # what float64 leaves of a function that no voxel sees.
        ridge = 1e-10 * float(np.trace(matrix)) / len(matrix)
        lower = np.linalg.cholesky(matrix + ridge * np.eye(len(matrix)))
        solution, _ = nnls(lower.T, np.linalg.solve(lower, right), maxiter=100 * len(right))
        return Promolecule(self.basis, dict(zip(elements, solution.reshape(-1, n), strict=True)), self.n_materials)


def radial_sums(crystal: Crystal, places: np.ndarray, basis: RadialBasis) -> dict[int, np.ndarray]:
    """Sums over the atoms of each element, periodic images too, of the radial functions.

    Args:
        crystal: Cell and atoms.
        places: `[n_points, 3]`, fractional.
        basis: The functions.

    Returns:
        Atomic number to float64 `[n_points, basis.n]`.
    """
    inverse = np.linalg.inv(crystal.lattice)
    reach = np.ceil(basis.cutoff_a * np.linalg.norm(inverse, axis=0)).astype(int)
    steps = np.stack(np.meshgrid(*(np.arange(-r - 1, r + 1) for r in reach), indexing="ij"), axis=-1).reshape(-1, 3)
    sums: dict[int, np.ndarray] = {}
    for number, atom in zip(crystal.atomic_numbers.tolist(), crystal.frac_coords, strict=True):
        apart = atom - places
        apart = (apart - np.floor(apart)) @ crystal.lattice
        total = sums.setdefault(number, np.zeros((len(places), basis.n)))
        for step in steps @ crystal.lattice:
            distance = np.sqrt(((apart + step) ** 2).sum(axis=-1))
            seen = np.flatnonzero(distance < basis.cutoff_a)
            for function, values in basis.nonzero(distance[seen]):
                total[seen, function] += values  # no pair twice
    return sums
