"""What the rest of the room asks of a predictor, and what one answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from tomat.base.errors import TomatError
from tomat.density.crystal import Crystal
from tomat.density.grid import DensityGrid

if TYPE_CHECKING:
    from pymatgen.core import Structure

OnPatches = Callable[[int, int], None]
"""Told how many patches of a structure are done, and of how many."""


@dataclass(frozen=True, eq=False)
class Prediction(DensityGrid):
    """A density that was predicted from a structure alone, with its crystal; its integral is the electron count that
    was asked for, if one was."""

    electrons_before: float = field(kw_only=True)
    """Integral as the predictor gave it, before it was normalised."""
    seconds: float = field(kw_only=True)
    """Of the prediction, without loading the model."""
    spread: np.ndarray | None = field(default=None, kw_only=True)
    """float32 `[nx, ny, nz]`, standard deviation over samples, e/A^3; None of a single sample."""

    @classmethod
    def of_crystal(
        cls,
        rho: np.ndarray,
        crystal: Crystal,
        electrons_before: float,
        seconds: float,
        spread: np.ndarray | None = None,
    ) -> Prediction:
        """`rho` float32 `[nx, ny, nz]`, e/A^3, on the grid of a crystal's cell."""
        return cls(
            rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name,
            electrons_before=electrons_before, seconds=seconds, spread=spread,
        )  # fmt: skip


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
        structure: Crystal | Structure | str | os.PathLike[str],
        grid_shape: tuple[int, int, int] | None = None,
        *,
        electrons: float | Literal["learnt"] | None = "learnt",
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """The density on a grid of the cell.

        Args:
            structure: cell and atoms: a crystal, pymatgen's structure, or a file of one.
            grid_shape: voxels along a, b, c; None: as fine as the training was, 0.065 A where any is as good.
            electrons: what the density is scaled to integrate to; None leaves it as it is, and so does `learnt`, with
                a warning, where no valences were.
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
