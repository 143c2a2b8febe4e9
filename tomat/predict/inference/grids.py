"""The grid of a prediction: sides, a spacing, or that of another density."""

import math
import os
from dataclasses import dataclass

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import fast_shape
from tomat.data.density.limits import MOST_VOXELS

SPACING_A = 0.065
"""Where neither a grid is asked for nor the model knows the spacing of its training: that of the embedded densities,
about the median of the Materials Project's (0.064 A)."""


@dataclass(frozen=True)
class GridChoice:
    """How the grid of each structure is chosen: by sides, or by a spacing."""

    sides: tuple[int, int, int] | None = None
    """Voxels along a, b, c of every structure."""
    spacing_a: float | None = None
    """Largest distance of neighbouring voxels, A; sides then have no prime factor but 2, 3 and 5."""
    why: str = ""
    """Where it is from, in words."""

    def shape(self, crystal: Crystal) -> tuple[int, int, int]:
        """The grid of a crystal."""
        if self.sides is not None:
            sides = self.sides
        else:
            assert self.spacing_a is not None
            sides = fast_shape(crystal.lattice, self.spacing_a)
        if math.prod(sides) > MOST_VOXELS:
            raise TomatError(
                f"{crystal.name}: a grid of {' x '.join(f'{side:,}' for side in sides)} voxels ({self.why}); expected "
                f"at most {MOST_VOXELS:,}. Ask for a coarser one."
            )
        return sides


def choose_grid(
    sides: tuple[int, int, int] | None, spacing_a: float | None, like: str | None, trained_a: float | None
) -> GridChoice:
    """The grid of `--grid`, `--spacing` or `--like`, of which one is given, or none.

    Args:
        like: a density whose three sides are taken. Of a CHGCAR no value is read.
        trained_a: median spacing of the training, taken where nothing is asked for; None: `SPACING_A`.
    """
    if sides is not None:
        return GridChoice(sides=sides, why="--grid")
    if spacing_a is not None:
        return GridChoice(spacing_a=spacing_a, why=f"--spacing {spacing_a:g}")
    if like is not None:
        from tomat.data.density.chgcar import read_grid_shape
        from tomat.data.density.io import is_chgcar, open_density

        shape = read_grid_shape(like) if is_chgcar(like) else open_density(like).grid_shape
        return GridChoice(sides=shape, why=f"--like {os.fspath(like)}")
    if trained_a is not None:
        return GridChoice(spacing_a=trained_a, why=f"{trained_a:.4g} A, the median of the training")
    return GridChoice(spacing_a=SPACING_A, why=f"{SPACING_A} A, the default")
