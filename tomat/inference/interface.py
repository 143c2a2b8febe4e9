"""What the rest of the room asks of a predictor, and what one answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from tomat.base.errors import TomatError
from tomat.density.crystal import Crystal
from tomat.density.grid import DensityGrid

OnPatches = Callable[[int, int], None]
"""Told how many patches of a structure are done, and of how many."""


@dataclass(frozen=True, eq=False)
class Prediction:
    """A density that was predicted from a structure alone."""

    rho: np.ndarray
    """float32 `[nx, ny, nz]`, e/A^3; its integral is the electron count that was asked for, if one was."""
    electrons_before: float
    """Integral as the predictor gave it, before it was normalised."""
    seconds: float
    """Of the prediction, without loading the model."""
    spread: np.ndarray | None = None
    """float32 `[nx, ny, nz]`, standard deviation over samples, e/A^3; None of a single sample."""

    def grid(self, crystal: Crystal) -> DensityGrid:
        """As a density, with the crystal it was predicted for."""
        return DensityGrid(self.rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name)


class Predictor(Protocol):
    """From a crystal to its density. It never sees one."""

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers that its training had."""
        ...

    @property
    def shortest_distance_a(self) -> Mapping[tuple[int, int], float] | None:
        """By pair of atomic numbers, the lower one first: the shortest distance of neighbours in its training
        (`density.geometry.shortest_distances_a`). None: not known."""
        ...

    @property
    def spacing_a(self) -> float | None:
        """Median voxel spacing of its training. None: any is as good."""
        ...

    @property
    def valences(self) -> Mapping[int, float] | None:
        """By atomic number: electrons that an atom brings, learnt from the training set. None: not known."""
        ...

    @property
    def identity(self) -> str:
        """A hash, or words, of all that decides its densities: weights, decoder, samples, seed."""
        ...

    def predict(
        self,
        crystal: Crystal,
        grid_shape: tuple[int, int, int],
        *,
        electrons: float | None,
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """The density on a grid of the cell.

        Args:
            crystal: cell and atoms.
            grid_shape: voxels along a, b, c.
            electrons: what the density is scaled to integrate to; None leaves it as it is.
            on_patches: told of progress.

        Raises:
            TomatError: a structure that it cannot predict.
        """
        ...


def normalised(rho: np.ndarray, crystal: Crystal, electrons: float | None) -> tuple[np.ndarray, float]:
    """`rho` scaled to integrate to `electrons` (None: as it is), float32, and what it integrated to before.

    Raises:
        TomatError: a density without electrons.
    """
    before = float(rho.mean(dtype=np.float64)) * crystal.volume_a3
    if electrons is None:
        return rho.astype(np.float32), before
    if not before > 0:
        raise TomatError(f"{crystal.name}: the predicted density holds {before:.3g} electrons; it cannot be scaled.")
    return (rho * np.float64(electrons / before)).astype(np.float32), before
