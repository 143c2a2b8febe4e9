"""What is asked of a prediction, or as the training had it: its grid, and how many electrons it holds."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import plausible_electron_counts, symbol_of
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

    def shape(self, crystal: Crystal) -> tuple[int, int, int]:
        sides = self.sides or fast_shape(crystal.lattice, self.spacing_a or SPACING_A)
        if math.prod(sides) > MOST_VOXELS:
            raise TomatError(
                f"{crystal.name}: a grid of {' x '.join(f'{side:,}' for side in sides)} voxels ({self.why}); expected "
                f"at most {MOST_VOXELS:,}. Ask for a coarser one."
            )
        return sides


def choose_grid(
    sides: tuple[int, int, int] | None, spacing_a: float | None, like: str | None, trained_a: float | None
) -> GridChoice:
    """The grid of `--grid`, `--spacing` or `--like` (a density, of which a CHGCAR's values are not read), of which one
    is given, or none: then the median spacing of the training, or `SPACING_A`."""
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


def electron_count(
    crystal: Crystal, given: Mapping[int, float] | None, learnt: Mapping[int, float] | None
) -> tuple[float | None, str]:
    """The electrons of a structure, and where the count is from; None where no valences are given (`--valences`, which
    go first) or learnt. Refuses a count that no pseudopotentials leave these atoms."""
    if not given and not learnt:
        return None, "not known: the density is as the predictor gives it"
    table = {**(learnt or {}), **(given or {})}
    numbers = crystal.atomic_numbers.tolist()
    if missing := sorted(set(numbers) - set(table)):
        names = [symbol_of(z) for z in missing]
        raise TomatError(
            f"{crystal.name}: no valence electrons of {', '.join(names)} are known; name those of every element, such "
            f"as --valences {','.join(f'{name}=N' for name in names)}."
        )
    total = float(sum(table[z] for z in numbers))
    least, most = plausible_electron_counts(np.asarray(numbers))
    if not least <= total <= most:
        raise TomatError(
            f"{crystal.name}: the valences give its {len(numbers)} atoms {total:g} electrons; expected {least:.4g} to "
            f"{most:.4g}. Correct --valences."
        )
    sources = {"--valences" if given and z in given else "learnt from the training set" for z in numbers}
    return total, " and ".join(sorted(sources))
