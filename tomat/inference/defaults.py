"""What a prediction takes where a caller says nothing: the grid of the training, the valences that it taught."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Literal

from tomat.density.crystal import Crystal
from tomat.inference.grids import choose_grid
from tomat.inference.structures import crystal_of, read_structure
from tomat.inference.valences import electron_count

if TYPE_CHECKING:
    from pymatgen.core import Structure

    from tomat.inference.interface import Predictor

LEARNT: Literal["learnt"] = "learnt"
"""Electrons: the sum of the valences that the predictor learnt."""


def settled(
    predictor: Predictor,
    structure: Crystal | Structure | str | os.PathLike[str],
    grid_shape: tuple[int, int, int] | None,
    electrons: float | Literal["learnt"] | None,
) -> tuple[Crystal, tuple[int, int, int], float | None]:
    """Crystal, voxels and electrons of a prediction.

    Args:
        predictor: Whose training gives what is not said.
        structure: A crystal, pymatgen's structure, or a file of one.
        grid_shape: None: the median spacing of the training, 0.065 A where there is none.
        electrons: `LEARNT`; None, with a warning, where no valences were learnt.

    What the reader of a file has to say of it is a warning too.

    Raises:
        TomatError: As `read_structure`, `GridChoice.shape` and `electron_count`.
    """
    if isinstance(structure, (str, os.PathLike)):
        crystal, notes = read_structure(structure)
        for note in notes:
            warnings.warn(f"{os.fspath(structure)}: {note}", stacklevel=3)
    else:
        crystal = crystal_of(structure)
    if grid_shape is None:
        grid_shape = choose_grid(None, None, None, predictor.spacing_a).shape(crystal)
    if electrons == LEARNT:
        electrons, source = electron_count(crystal, None, predictor.valences)
        if electrons is None:
            warnings.warn(f"{crystal.name}: electrons {source}.", stacklevel=3)
    return crystal, grid_shape, electrons
