"""What densities are, by content: files told apart by their bytes, densities by what they hold."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.records import Positive, Sha256
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import SYMBOLS, symbol_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.poscar import NEIGHBOURS, OF_A_CALCULATION

SAMPLES = 64
"""Voxels by which densities are first compared: two that share cell, atoms and these are the same."""
SAME_DENSITY = 1e-5
"""Largest difference of two samples, as a share of the largest value: formats keep seven digits and more, two
calculations that agree better were not worth telling apart."""
SAME_LENGTH_A = 1e-4
"""Of lattice vectors: files round to six decimals."""
SAME_PLACE = 1e-4
"""Of fractional coordinates, likewise."""


@dataclass(frozen=True)
class Material:
    """A density that was read."""

    name: str
    file_sha256: Sha256
    """Of the bytes of its file, and of those beside it that name its elements."""
    content_sha256: Sha256
    """Of values, cell and atoms."""
    formula: str
    """Reduced; what a split goes by."""
    atoms: dict[str, Positive]
    electrons: float
    grid_shape: tuple[Positive, Positive, Positive]
    sites: tuple[float, ...]
    """Lattice in A, fractional coordinates, and atomic numbers, one after another."""
    samples: tuple[float, ...]
    """Density at `SAMPLES` voxels, as shares of the largest value."""

    @classmethod
    def of(cls, grid: DensityGrid, name: str, file_sha256: str) -> "Material":
        """What is remembered of a density."""
        numbers, counts = np.unique(grid.atomic_numbers, return_counts=True)
        flat = grid.rho.ravel()
        samples = flat[np.linspace(0, flat.size - 1, SAMPLES).astype(np.int64)] / max(float(flat.max()), 1e-30)
        sites = np.concatenate([grid.lattice.ravel(), grid.frac_coords.ravel(), grid.atomic_numbers])
        digest = hashlib.sha256(repr(grid.grid_shape).encode())
        for array in (grid.rho, grid.lattice, grid.frac_coords, grid.atomic_numbers):
            digest.update(np.ascontiguousarray(array).tobytes())
        return cls(
            name=name,
            file_sha256=file_sha256,
            content_sha256=digest.hexdigest(),
            formula=grid.formula,
            atoms={symbol_of(z): n for z, n in zip(numbers.tolist(), counts.tolist(), strict=True)},
            electrons=grid.electron_count,
            grid_shape=grid.grid_shape,
            sites=tuple(sites.tolist()),
            samples=tuple(float(f"{value:.9g}") for value in samples.tolist()),
        )

    @property
    def crystal(self) -> Crystal:
        n, sites = sum(self.atoms.values()), np.array(self.sites)
        return Crystal(sites[:9].reshape(3, 3), sites[9 + 3 * n :], sites[9 : 9 + 3 * n], self.name)

    @property
    def is_whole(self) -> bool:
        """Whether it has all numbers that two densities are compared by, and its sites are of its atoms."""
        n = sum(self.atoms.values())
        if len(self.sites) != 9 + 4 * n or len(self.samples) != SAMPLES or not self.atoms.keys() <= set(SYMBOLS):
            return False
        numbers = [SYMBOLS.index(symbol) + 1 for symbol, count in self.atoms.items() for _ in range(count)]
        return sorted(numbers) == sorted(self.sites[9 + 3 * n :])

    def is_same(self, other: "Material") -> bool:
        """Whether two densities are one, in whatever formats."""
        if self.content_sha256 == other.content_sha256:
            return True
        if (self.atoms, self.grid_shape) != (other.atoms, other.grid_shape):
            return False
        n = sum(self.atoms.values())
        mine, theirs = (np.array(each.sites) for each in (self, other))
        moved = mine[9 : 9 + 3 * n] - theirs[9 : 9 + 3 * n]
        return bool(
            np.abs(mine[:9] - theirs[:9]).max() < SAME_LENGTH_A
            and np.abs(moved - np.round(moved)).max() < SAME_PLACE
            and np.array_equal(mine[9 + 3 * n :], theirs[9 + 3 * n :])
            and np.abs(np.array(self.samples) - np.array(other.samples)).max() < SAME_DENSITY
        )

    def to_dict(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}


def file_sha256(path: str) -> str:
    """Of all that decides what is read of a density: its bytes, and those of the files that may name its elements."""
    digest = hashlib.sha256()
    try:
        for place in _read_of(Path(path)):
            digest.update(place.name.encode() + b"\0")
            with place.open("rb") as file:
                while piece := file.read(1 << 20):
                    digest.update(piece)
    except OSError as error:
        raise TomatError(f"cannot read {path}: {error.strerror or error}.") from error
    return digest.hexdigest()


def _read_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(each for each in path.rglob("*") if each.is_file())
        return
    yield path
    if path.name.split(".")[0] in OF_A_CALCULATION:
        for name in NEIGHBOURS:
            beside = (path.with_name(name), path.with_name(f"{name}.gz"))
            yield from (each for each in beside if each.is_file())
