"""The promolecule: a density as a sum over atoms of one non-negative radial function for each element.

It depends only on the structure, and is the baseline that every prediction has to beat. Normal equations are summed
density by density, in any process, and solved once. Without non-negativity an element of a single compound takes what
its neighbours leave over, and is useless elsewhere (up to 116 % NMAE where the non-negative fit has 6 %).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tomat.base.documents import read_bytes
from tomat.base.errors import TomatError
from tomat.base.reporting import dump_json
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import SYMBOLS, atomic_number, symbol_of
from tomat.data.density.geometry import reduced_basis, shortest_distances_a, void_radius_a
from tomat.data.density.grid import DensityGrid

FIT_VOXELS = 8192
"""Voxels of each density that are fitted, spread evenly over its grid. Each has some hundred atoms around it."""

WEIGHT_E_PER_A3 = 0.1
"""Squared errors weigh 1 / (rho + this), which brings them near to the absolute error that NMAE counts. With each of
the 28 training compounds left out in turn, the median NMAE was 9.8 % with it, 10.8 % with equal weights."""

_STRIDES = 0.8191725133961645, 0.6710436067037893, 0.5497004779019703
"""Powers of the reciprocal of the root of x^4 = x + 1: multiples of them, modulo 1, fill a cube evenly and in step with
no grid (M. Roberts, The unreasonable effectiveness of quasirandom sequences, 2018, R3)."""

_BLOCK_POINTS = 1024
"""Points whose distances to all atoms are computed at a time: they stay in the second-level cache."""

_FORMAT = "tomat promolecule 1"
_AGAIN = "Fit it again with `tomat promolecule fit`, or copy it again from where it came from."


@dataclass(frozen=True)
class RadialBasis:
    """`n` functions of the distance r. Their value, slope and curvature are zero at `cutoff_a`, their slope is zero at
    r = 0. `model/environment.py` evaluates the same functions in JAX.

    Function k is the cubic B-spline `B(s - k) + B(s + k)` (for k = 0 `B(s)`) of the stretched distance
    `s = (n + 1) log(1 + r / stretch_a) / log(1 + cutoff_a / stretch_a)`, with
    `B(x) = (max(0, 2 - |x|)^3 - 4 max(0, 1 - |x|)^3) / 6` (de Boor, A Practical Guide to Splines, 1978, on unit
    knots). The mirrored half makes each function even in r: a pseudopotential's density has no cusp at the nucleus.
    """

    n: int = 16
    """Functions."""
    cutoff_a: float = 5.0
    """Distance beyond which all are zero, A."""
    stretch_a: float = 0.5
    """Knots are uniform in log(1 + r / stretch_a): 16 lie 0.07 A apart at the nucleus, 0.35 A at 2 A."""

    def __post_init__(self) -> None:
        if self.n < 4 or not self.cutoff_a > 0 or not self.stretch_a > 0:
            raise TomatError(f"found {self}; expected at least 4 functions and positive lengths.")

    @property
    def scale(self) -> float:
        """s is this times log(1 + r / stretch_a)."""
        return (self.n + 1) / float(np.log1p(self.cutoff_a / self.stretch_a))

    def __call__(self, distance_a: np.ndarray) -> np.ndarray:
        """The functions at distances: `[...]` in A to float64 `[..., n]`."""
        s = self.scale * np.log1p(np.asarray(distance_a, dtype=np.float64)[..., None] / self.stretch_a)
        k = np.arange(self.n)
        return _cubic(s - k) + np.where(k > 0, _cubic(s + k), 0.0)

    def reach_a(self, coefficients: np.ndarray) -> float:
        """Distance, A, beyond which a sum of the functions, `[n]`, is zero: function k is zero from s = k + 2 on."""
        last = int(np.flatnonzero(coefficients).max(initial=-2))
        return min(self.cutoff_a, self.stretch_a * float(np.expm1((last + 2) / self.scale)))

    def nonzero(self, distance_a: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The non-zero functions, four per distance: four pairs of function indices, int `[m]`, and values, `[m]`."""
        s = self.scale * np.log1p(distance_a / self.stretch_a)
        knot = s.astype(np.int64)
        u = s - knot
        v = 1 - u
        pieces = v * v * v, (3 * u - 6) * u * u + 4, (3 * v - 6) * v * v + 4, u * u * u
        for place, piece in enumerate(pieces, start=-1):
            function = np.abs(knot + place)
            # Functions beyond the last do not exist: their value is zero.
            yield np.minimum(function, self.n - 1), np.where(function < self.n, piece / 6.0, 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return (np.maximum(0.0, 2.0 - x) ** 3 - 4.0 * np.maximum(0.0, 1.0 - x) ** 3) / 6.0


@dataclass(frozen=True, eq=False)
class Promolecule:
    basis: RadialBasis
    coefficients: Mapping[int, np.ndarray]
    """Atomic number to float64 `[basis.n]`, e/Å³, none negative."""
    n_materials: int = 0
    valences: Mapping[int, float] = field(default_factory=dict)
    """Atomic number to the electrons that an atom brings to these densities, where their counts settle this."""
    shortest_distance_a: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """By pair of atomic numbers, the lower one first: the shortest distance of neighbours in these densities."""
    spacing_a: float = 0.0
    """Median distance of neighbouring voxels, A; 0 where nothing was fitted."""
    void_radius_a: float | None = None
    """Largest distance, A, of any point of these densities from its nearest atom; None: an earlier fit."""

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

    def density(self, crystal: Crystal, grid_shape: tuple[int, int, int]) -> np.ndarray:
        """The sum of atoms on a grid of the cell: float32 `[nx, ny, nz]`, e/Å³. Radial functions are interpolated
        linearly from points `cutoff_a` / 16,384 apart, to some 1e-6 of their value; a skewed cell takes no longer."""
        present = self.checked_elements(crystal)
        basis, points = self.basis, 1 << 14
        functions = _sampled(basis, points + 1)
        tables = {z: functions @ self.coefficients[z] for z in present}
        total = np.zeros(grid_shape, np.float64)
        # The voxels form a lattice too. With its shortest vectors few are looked at, however skewed the cell is.
        sides = crystal.lattice / np.array(grid_shape)[:, None]
        steps = reduced_basis(sides)
        whole = np.round(steps @ np.linalg.inv(sides)).astype(np.int64)
        as_stored = np.array_equal(whole, np.eye(3))
        places = crystal.frac_coords * grid_shape @ np.round(np.linalg.inv(whole))
        # The coefficients of the outermost functions are often zero.
        reaches_a = {z: basis.reach_a(self.coefficients[z]) for z in present}
        steps_an_a = np.linalg.norm(np.linalg.inv(steps), axis=0)
        for number, at in zip(crystal.atomic_numbers.tolist(), places, strict=True):
            nearest, reach_a = np.round(at).astype(int), reaches_a[number]
            reach = np.ceil(reach_a * steps_an_a).astype(int)
            axes = [np.arange(n - r, n + r + 1) for n, r in zip(nearest, reach, strict=True)]
            x, y, z = ((axis - a)[:, None] * step for axis, a, step in zip(axes, at, steps, strict=True))
            flat = (axes[1] % grid_shape[1])[:, None] * grid_shape[2] + axes[2] % grid_shape[2]
            table, slopes = tables[number], np.append(np.diff(tables[number]), 0.0)
            for i, first in zip(axes[0].tolist(), x, strict=True):
                rod = first + y
                squared = (rod**2).sum(axis=1)[:, None] + (z**2).sum(axis=1) + 2.0 * (rod @ z.T)
                inside = np.flatnonzero(squared < reach_a**2)
                # The nearest voxel's square may come out below zero by rounding.
                s = np.sqrt(np.maximum(squared.ravel()[inside], 0.0)) * (points / basis.cutoff_a)
                k = s.astype(np.int32)
                values = table[k] + (s - k) * slopes[k]
                if as_stored:  # in two thirds of the time
                    plane = total[i % grid_shape[0]]
                    plane += np.bincount(flat.ravel()[inside], values, plane.size).reshape(plane.shape)
                else:
                    j, k = np.divmod(inside, len(axes[2]))
                    voxels = i * whole[0] + axes[1][j, None] * whole[1] + axes[2][k, None] * whole[2]
                    np.add.at(total, tuple((voxels % grid_shape).T), values)
        return total.astype(np.float32)

    def checked_elements(self, crystal: Crystal) -> list[int]:
        """Atomic numbers of a structure, each once, ascending. Refuses an element that was not fitted."""
        present = sorted(set(crystal.atomic_numbers.tolist()))
        if unknown := [symbol_of(z) for z in present if z not in self.coefficients]:
            raise TomatError(
                f"{crystal.name or 'the structure'} has {', '.join(unknown)}, which no training density had; the model "
                f"knows {' '.join(map(symbol_of, self.elements))}. Train it on densities with that element."
            )
        return present

    def electrons(self) -> dict[int, float]:
        """Electrons of each element's function: its integral over space, by Simpson's rule on 2,001 points."""
        from scipy.integrate import simpson

        r = np.linspace(0.0, self.basis.cutoff_a, 2001)
        values = self.basis(r) * (4 * np.pi * r**2)[:, None]
        return {number: float(simpson(values @ c, x=r)) for number, c in self.coefficients.items()}

    def nmae(self, grid: DensityGrid) -> float:
        """The integral of |sum of atoms - density| over that of the density, in the whole cell."""
        found = self.density(Crystal.of(grid), grid.grid_shape).astype(np.float64)
        return float(np.abs(found - grid.rho).sum() / grid.rho.sum(dtype=np.float64))

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(dump_json(self._content()).encode()).hexdigest()

    def _content(self) -> dict[str, Any]:
        # An unknown radius has no key, so that the hash of an earlier promolecule stays the same.
        void = {} if self.void_radius_a is None else {"void_radius_a": self.void_radius_a}
        return {
            "format": _FORMAT,
            "basis": {"n": self.basis.n, "cutoff_a": self.basis.cutoff_a, "stretch_a": self.basis.stretch_a},
            "coefficients_e_per_a3": {symbol_of(z): [float(v) for v in self.coefficients[z]] for z in self.elements},
            "n_materials": self.n_materials,
            "valence_electrons": {symbol_of(z): self.valences[z] for z in sorted(self.valences)},
            "shortest_distance_a": {
                f"{symbol_of(z)}-{symbol_of(other)}": self.shortest_distance_a[z, other]
                for z, other in sorted(self.shortest_distance_a)
            },
            "spacing_a": self.spacing_a,
            **void,
        }

    def to_text(self) -> str:
        return dump_json({**self._content(), "sha256": self.sha256})

    @classmethod
    def from_text(cls, text: str | bytes, source: str) -> Promolecule:
        try:
            values = json.loads(text)
            found = cls(
                RadialBasis(**values["basis"]),
                {atomic_number(s): np.array(c, np.float64) for s, c in values["coefficients_e_per_a3"].items()},
                values["n_materials"],
                {atomic_number(s): float(electrons) for s, electrons in values["valence_electrons"].items()},
                {_pair(words): float(distance) for words, distance in values["shortest_distance_a"].items()},
                float(values["spacing_a"]),
                float(values["void_radius_a"]) if "void_radius_a" in values else None,
            )
            whole = values["format"] == _FORMAT and values["sha256"] == found.sha256
        # An impossible basis is a TomatError, a number too large an OverflowError, deep nesting a RecursionError.
        except (TomatError, LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise TomatError(f"{source} is not a promolecule ({type(error).__name__}: {error}). {_AGAIN}") from error
        if not whole:
            raise TomatError(f"{source} is damaged, or of another version: its hash does not fit its content. {_AGAIN}")
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Promolecule:
        return cls.from_text(read_bytes(path, _AGAIN), str(path))


@lru_cache(maxsize=4)
def _sampled(basis: RadialBasis, points: int) -> np.ndarray:
    """The functions at `points` distances from 0 to the cutoff, float64 [points, n]. They are cached, since they took a
    third of the time of a small cell's sum of atoms."""
    return basis(np.linspace(0.0, basis.cutoff_a, points))


def _pair(words: str) -> tuple[int, int]:
    first, second = words.split("-")
    return atomic_number(first), atomic_number(second)


@dataclass
class PromoleculeFit:
    """Normal equations of the least-squares fit. All densities have the same weight; a voxel weighs 1 / (rho +
    `WEIGHT_E_PER_A3`). Densities are added in a fixed order, since sums of floats depend on it."""

    basis: RadialBasis = field(default_factory=RadialBasis)
    n_materials: int = 0
    products: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """For each pair of atomic numbers (first <= second), float64 `[n, n]`: sums of products of their functions."""
    projections: dict[int, np.ndarray] = field(default_factory=dict)
    """For each atomic number, float64 `[n]`: sums of products of its functions with the density."""
    material_ids: list[str] = field(default_factory=list)
    """Names of the densities, as far as names were given. A continued fit skips these densities."""
    atoms: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    electrons: list[float] = field(default_factory=list)
    spacings_a: list[float] = field(default_factory=list)
    distances_a: dict[tuple[int, int], float] = field(default_factory=dict)
    void_radii_a: list[float] = field(default_factory=list)
    """`geometry.void_radius_a` of each density; fewer than densities if an earlier tomat added some."""

    def add(self, grid: DensityGrid, material_id: str = "", voxels: int = FIT_VOXELS) -> None:
        """Add a density at `voxels` of its voxels. Its name is kept if given."""
        crystal = Crystal.of(grid)
        index = (np.outer(np.arange(voxels), _STRIDES) % 1.0 * grid.grid_shape).astype(np.int64)
        rho = grid.rho[tuple(index.T)].astype(np.float64)
        weights = 1.0 / (rho + WEIGHT_E_PER_A3)
        norm = float((weights * rho**2).sum())
        if not norm > 0:
            raise TomatError(f"{grid.material_id or 'The density'} is zero at all {voxels:,} voxels that are fitted.")
        weights /= norm
        sums = radial_sums(crystal, index / np.array(grid.grid_shape), self.basis)
        pairs = itertools.combinations_with_replacement(sorted(sums), 2)
        numbers, counts = np.unique(crystal.atomic_numbers, return_counts=True)
        self.merge(
            PromoleculeFit(
                self.basis,
                n_materials=1,
                products={(z, other): (sums[z].T * weights) @ sums[other] for z, other in pairs},
                projections={z: functions.T @ (weights * rho) for z, functions in sums.items()},
                material_ids=[material_id] if material_id else [],
                atoms=[tuple(zip(numbers.tolist(), counts.tolist(), strict=True))],
                electrons=[grid.electron_count],
                spacings_a=[sum(grid.spacing_a) / 3],
                distances_a=shortest_distances_a(crystal.lattice, crystal.atomic_numbers, crystal.frac_coords),
                void_radii_a=[void_radius_a(crystal.lattice, crystal.frac_coords)],
            )
        )

    def merge(self, other: PromoleculeFit) -> None:
        if other.basis != self.basis:
            raise TomatError("two parts of a promolecule fit have different radial functions; fit both again.")
        for z, values in other.projections.items():
            self.projections[z] = values + self.projections.get(z, 0.0)
        for pair, values in other.products.items():
            self.products[pair] = values + self.products.get(pair, 0.0)
        for pair, distance in other.distances_a.items():
            self.distances_a[pair] = min(distance, self.distances_a.get(pair, distance))
        self.n_materials += other.n_materials
        self.material_ids += other.material_ids
        self.atoms += other.atoms
        self.electrons += other.electrons
        self.spacings_a += other.spacings_a
        self.void_radii_a += other.void_radii_a

    def valences(self) -> dict[int, float]:
        """Electrons that an atom of each element brings, as far as the densities' counts settle it."""
        from tomat.data.density.valence_table import settled_valences

        return settled_valences([dict(row) for row in self.atoms], self.electrons)

    def to_bytes(self) -> bytes:
        """The content of an `.npz` file with a checksum, without loss; the same bytes for the same sums."""
        from tomat.base.checked_arrays import pack_arrays

        basis, elements, pairs = self.basis, sorted(self.projections), sorted(self.products)
        return pack_arrays(
            {
                "basis": np.array([basis.n, basis.cutoff_a, basis.stretch_a]),
                "n_materials": np.array(self.n_materials),
                "atoms": np.array([(i, z, n) for i, row in enumerate(self.atoms) for z, n in row], np.int64),
                "electrons": np.array(self.electrons),
                "spacings_a": np.array(self.spacings_a),
                "distances_a": np.array([(*pair, self.distances_a[pair]) for pair in sorted(self.distances_a)]),
                "void_radii_a": np.array(self.void_radii_a),
                "material_ids": np.array(self.material_ids, np.str_),
                "elements": np.array(elements, np.int64),
                "projections": np.array([self.projections[z] for z in elements]).reshape(-1, basis.n),
                "pairs": np.array(pairs, np.int64).reshape(-1, 2),
                "products": np.array([self.products[pair] for pair in pairs]).reshape(-1, basis.n, basis.n),
            }
        )

    @classmethod
    def from_bytes(cls, content: bytes, source: str, remedy: str) -> PromoleculeFit:
        from tomat.base.checked_arrays import unpack_arrays

        arrays = unpack_arrays(content, source, "the sums of a promolecule's fit", remedy)
        try:
            n, cutoff_a, stretch_a = arrays["basis"].tolist()
            pairs = [(z, other) for z, other in arrays["pairs"].tolist()]
            atoms: list[tuple[tuple[int, int], ...]] = [()] * int(arrays["n_materials"])
            for index, z, count in arrays["atoms"].reshape(-1, 3).tolist():
                atoms[index] += ((z, count),)
            return cls(
                RadialBasis(int(n), cutoff_a, stretch_a),
                int(arrays["n_materials"]),
                dict(zip(pairs, arrays["products"], strict=True)),
                dict(zip(arrays["elements"].tolist(), arrays["projections"], strict=True)),
                arrays["material_ids"].tolist(),
                atoms,
                arrays["electrons"].tolist(),
                arrays["spacings_a"].tolist(),
                {(int(z), int(other)): d for z, other, d in arrays["distances_a"].reshape(-1, 3).tolist()},
                arrays["void_radii_a"].tolist() if "void_radii_a" in arrays else [],
            )
        except (LookupError, TypeError, ValueError) as error:
            raise TomatError(f"{source} is not the sums of a promolecule's fit ({error}). {remedy}") from error

    def solve(self) -> Promolecule:
        """The non-negative least-squares solution."""
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
        # The minimum of x^T M x / 2 - b^T x as a least-squares problem: M = L L^T, |L^T x - L^-1 b|. The ridge, as
        # small as float64 allows, is for functions that no voxel sees.
        ridge = 1e-10 * float(np.trace(matrix)) / len(matrix)
        lower = np.linalg.cholesky(matrix + ridge * np.eye(len(matrix)))
        solution, _ = nnls(lower.T, np.linalg.solve(lower, right), maxiter=100 * len(right))
        return Promolecule(
            self.basis,
            dict(zip(elements, solution.reshape(-1, n), strict=True)),
            self.n_materials,
            self.valences(),
            dict(self.distances_a),
            float(np.median(self.spacings_a)) if self.spacings_a else 0.0,
            max(self.void_radii_a) if len(self.void_radii_a) == self.n_materials else None,
        )


def radial_sums(crystal: Crystal, places: np.ndarray, basis: RadialBasis) -> dict[int, np.ndarray]:
    """By atomic number, the radial functions summed over the atoms of that element and their periodic images: float64
    `[n_points, basis.n]`. `places`: `[n_points, 3]`, fractional."""
    elements = np.unique(crystal.atomic_numbers)
    cell = reduced_basis(crystal.lattice)
    numbers, images = crystal.near_box(np.zeros(3), cell, basis.cutoff_a)
    offsets = np.searchsorted(elements, numbers) * basis.n
    places = places @ np.round(crystal.lattice @ np.linalg.inv(cell))
    points = (places - np.floor(places)) @ cell
    width = len(elements) * basis.n
    total = np.empty((len(points), width))
    for start in range(0, len(points), _BLOCK_POINTS):
        block = points[start : start + _BLOCK_POINTS]
        x, y, z = (block[:, axis, None] - images[:, axis] for axis in range(3))
        squared = x * x + y * y + z * z
        near = np.flatnonzero(squared < basis.cutoff_a**2)
        point, image = np.divmod(near, len(images))
        row = point * width + offsets[image]
        sums = np.zeros(block.shape[0] * width)
        for function, values in basis.nonzero(np.sqrt(squared.ravel()[near])):
            sums += np.bincount(row + function, values, sums.size)
        total[start : start + len(block)] = sums.reshape(len(block), width)
    return {int(z): total[:, k * basis.n : (k + 1) * basis.n] for k, z in enumerate(elements)}
