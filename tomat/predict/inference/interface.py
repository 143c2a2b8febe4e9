"""What the rest of the room asks of a predictor, and what one answers."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.reporting import console
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule

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
    flags: tuple[Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """Where structure, grid or density are outside of what the predictor was trained on: objects with `kind`, `text`
    and the figures behind it (`checks.py`). Empty: as the training."""

    @classmethod
    def of_crystal(
        cls,
        rho: np.ndarray,
        crystal: Crystal,
        electrons_before: float,
        seconds: float,
        spread: np.ndarray | None = None,
        flags: tuple[Mapping[str, Any], ...] = (),
    ) -> Prediction:
        """`rho` float32 `[nx, ny, nz]`, e/A^3, on the grid of a crystal's cell."""
        return cls(
            rho, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name,
            electrons_before=electrons_before, seconds=seconds, spread=spread, flags=flags,
        )  # fmt: skip


class LearntFromDensities:
    """What of a `Predictor` is known from its promolecule, which was fitted to its training densities."""

    promolecule: Promolecule

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers that the training had."""
        return self.promolecule.elements

    @property
    def shortest_distance_a(self) -> Mapping[tuple[int, int], float] | None:
        """Shortest distances of neighbours in the training, A."""
        return self.promolecule.shortest_distance_a or None

    @property
    def void_radius_a(self) -> float | None:
        """The farthest that a point of the training's cells is from its nearest atom, A."""
        return self.promolecule.void_radius_a

    @property
    def spacing_a(self) -> float | None:
        """Median voxel spacing of the training, A."""
        return self.promolecule.spacing_a or None

    @property
    def valences(self) -> Mapping[int, float] | None:
        """Electrons that an atom of each element brings, learnt from the training set."""
        return self.promolecule.valences or None


def say_if_voids_unknown(promolecule: Promolecule, place: str) -> None:
    """Print that vacuum is not checked, where the training's voids are not known."""
    if promolecule.void_radius_a is None:
        console.print(
            f"note: the promolecule of {place} was fitted by an earlier tomat, which did not record how far points of "
            "its cells were from atoms: vacuum is not flagged, only too many or too few electrons.",
        )


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
    def void_radius_a(self) -> float | None:
        """The farthest that any point of its training's cells is from its nearest atom
        (`density.geometry.void_radius_a`). None: not known."""
        ...

    @property
    def usual_deviation(self) -> float:
        """Share by which the electrons of its densities, before they are scaled, differ from a crystal's at most."""
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
        accept: Collection[str] = (),
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """The density on a grid of the cell.

        Args:
            structure: cell and atoms: a crystal, pymatgen's structure, or a file of one.
            grid_shape: voxels along a, b, c; None: as fine as the training was, 0.065 A where any is as good.
            electrons: what the density is scaled to integrate to; None leaves it as it is, and so does `learnt`, with
                a warning, where no valences were.
            accept: refusals that are lifted: `distances`, `normalisation` (`checks.ACCEPTABLE`).
            on_patches: told of progress.

        Raises:
            TomatError: a structure that it cannot predict, or a density that is more than 10 % off the electrons.
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
