"""What is asked of a predictor, checked and with all that the caller did not say; what is answered, with its flags."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from tomat.data.density.crystal import Crystal
from tomat.data.density.rules import ReadRules
from tomat.predict.inference.checks import Flag, check_structure, extrapolations, normalisation, vacuum
from tomat.predict.inference.grids import choose_grid
from tomat.predict.inference.interface import Prediction, normalised
from tomat.predict.inference.structures import crystal_of, read_structure
from tomat.predict.inference.valences import electron_count

if TYPE_CHECKING:
    from pymatgen.core import Structure

    from tomat.predict.inference.interface import Predictor

LEARNT: Literal["learnt"] = "learnt"
"""Electrons: the sum of the valences that the predictor learnt."""


@dataclass(frozen=True, eq=False)
class Asked:
    """A structure that passed every check there is before it is predicted."""

    predictor: Predictor
    crystal: Crystal
    grid_shape: tuple[int, int, int]
    electrons: float | None
    """None: not scaled."""
    accept: Collection[str]
    flags: tuple[Flag, ...]
    started: float = field(default_factory=time.monotonic)

    def answer(self, rho: np.ndarray, deviations: np.ndarray | None = None) -> Prediction:
        """The prediction: scaled to the electrons, with its flags.

        Args:
            rho: float `[nx, ny, nz]`, e/A^3, as the predictor has it.
            deviations: The same of its standard deviation over samples.

        Raises:
            TomatError: A density without electrons, or as `checks.normalisation`.
        """
        scaled, before = normalised(rho, self.crystal, self.electrons)
        vacuums = vacuum(self.predictor, self.crystal, scaled)
        scale = normalisation(self.predictor, self.crystal, before, self.electrons, vacuums, self.accept)
        spread = None
        if deviations is not None:
            spread = (deviations * np.float32(1.0 if self.electrons is None else self.electrons / before)).astype("f4")
        seconds = time.monotonic() - self.started
        return Prediction.of_crystal(
            scaled, self.crystal, before, seconds, spread, flags=(*self.flags, *vacuums, *scale)
        )


def asked_of(
    predictor: Predictor,
    structure: Crystal | Structure | str | os.PathLike[str],
    grid_shape: tuple[int, int, int] | None,
    electrons: float | Literal["learnt"] | None,
    accept: Collection[str],
) -> Asked:
    """Crystal, voxels and electrons of a prediction.

    What the reader of a file has to say of it is a warning and a flag, and so are valences that are not known.

    Args:
        predictor: Whose training gives what is not said.
        structure: A crystal, pymatgen's structure, or a file of one.
        grid_shape: None: the median spacing of the training, 0.065 A where there is none.
        electrons: `LEARNT`; None where no valences were learnt.
        accept: Of `checks.ACCEPTABLE`.

    Raises:
        TomatError: As `read_structure`, `check_structure`, `GridChoice.shape` and `electron_count`.
    """
    flags: list[Flag] = []
    if isinstance(structure, (str, os.PathLike)):
        rules = ReadRules(accept=tuple({"distances"} & set(accept)))
        crystal, notes = read_structure(structure, rules=rules)
        for note in notes:
            flags.append({"kind": "file", "text": f"{os.fspath(structure)}: {note}"})
            warnings.warn(flags[-1]["text"], stacklevel=3)
    else:
        crystal = crystal_of(structure)
    check_structure(predictor, crystal, accept)
    if grid_shape is None:
        grid_shape = choose_grid(None, None, None, predictor.spacing_a).shape(crystal)
    if electrons == LEARNT:
        electrons, source = electron_count(crystal, None, predictor.valences)
        if electrons is None:
            warnings.warn(f"{crystal.name}: electrons {source}.", stacklevel=3)
    flags += extrapolations(predictor, crystal, grid_shape)
    return Asked(predictor, crystal, grid_shape, electrons, accept, tuple(flags))
