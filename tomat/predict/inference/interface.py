"""A predictor, from a structure to its density: what is asked is checked, or chosen as the training had it, and the
answer scaled and flagged."""

from __future__ import annotations

import math
import os
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.elements import plausible_electron_counts, symbol_of
from tomat.data.density.grid import DensityGrid, fast_shape
from tomat.data.density.limits import MOST_VOXELS
from tomat.data.density.promolecule import Promolecule
from tomat.data.density.rules import ReadRules
from tomat.predict.inference.checks import (
    PROMOLECULE_DEVIATION,
    Flag,
    Learnt,
    check_structure,
    extrapolations,
    normalisation,
    say_if_voids_unknown,
    vacuum,
)
from tomat.predict.inference.structures import crystal_of, read_structure

if TYPE_CHECKING:
    from pymatgen.core import Structure

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
            said = f"{crystal.name}: a grid of {' x '.join(f'{side:,}' for side in sides)} voxels ({self.why})"
            raise TomatError(f"{said}; expected at most {MOST_VOXELS:,}. Ask for a coarser one.")
        return sides


LEARNT: Literal["learnt"] = "learnt"
"""Electrons: the sum of the valences that the predictor learnt."""

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
    """float32 `[nx, ny, nz]`, standard deviation over samples, e/Å³; None of a single sample."""
    flags: tuple[Mapping[str, Any], ...] = field(default=(), kw_only=True)
    """Where structure, grid or density are outside of what the predictor was trained on: objects with `kind`, `text`
    and the figures behind it (`checks.py`). Empty: as the training."""


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
        said = f"{crystal.name}: no valence electrons of {', '.join(names)} are known; name those of every element"
        raise TomatError(f"{said}, such as --valences {','.join(f'{name}=N' for name in names)}.")
    total = float(sum(table[z] for z in numbers))
    least, most = plausible_electron_counts(np.asarray(numbers))
    if not least <= total <= most:
        said = f"{crystal.name}: the valences give its {len(numbers)} atoms {total:g} electrons"
        raise TomatError(f"{said}; expected {least:.4g} to {most:.4g}. Correct --valences.")
    sources = {"--valences" if given and z in given else "learnt from the training set" for z in numbers}
    return total, " and ".join(sorted(sources))


class Predictor(Learnt, ABC):
    """From a crystal to its density. It never sees one."""

    @property
    @abstractmethod
    def identity(self) -> str:
        """A hash, or words, of all that decides its densities: weights, decoder, samples, seed."""

    @abstractmethod
    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The density as it is before it is scaled, float `[nx, ny, nz]`, e/Å³; and its standard deviation over
        samples, None of a single one."""

    def predict(
        self,
        structure: Crystal | Structure | str | os.PathLike[str],
        grid_shape: tuple[int, int, int] | None = None,
        *,
        electrons: float | Literal["learnt"] | None = LEARNT,
        accept: Collection[str] = (),
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """The density on a grid of the cell.

        What the reader of a file has to say of it is a warning and a flag, and so are valences that are not known.

        Args:
            structure: Cell and atoms: a crystal, pymatgen's structure, or a file of one.
            grid_shape: Voxels along a, b, c; None: as fine as the training was, 0.065 A where any is as good.
            electrons: What the density is scaled to integrate to, if that is within 10 % of what it holds; None leaves
                it as it is, and so does `learnt` where no valences were.
            accept: Refusals that are lifted: `distances`, `normalisation` (`checks.ACCEPTABLE`).
            on_patches: Told how many patches are done, and of how many.
        """
        flags: list[Flag] = []
        if isinstance(structure, (str, os.PathLike)):
            rules = ReadRules(accept=tuple({"distances"} & set(accept)))
            crystal, notes = read_structure(structure, rules=rules)
            for note in notes:
                flags.append({"kind": "file", "text": f"{os.fspath(structure)}: {note}"})
                warnings.warn(flags[-1]["text"], stacklevel=2)
        else:
            crystal = crystal_of(structure)
        check_structure(self, crystal, accept)
        if grid_shape is None:
            grid_shape = choose_grid(None, None, None, self.spacing_a).shape(crystal)
        if electrons == LEARNT:
            electrons, source = electron_count(crystal, None, self.valences)
            if electrons is None:
                warnings.warn(f"{crystal.name}: electrons {source}.", stacklevel=2)
        flags += extrapolations(self, crystal, grid_shape)
        started = time.monotonic()
        rho, deviations = self.density(crystal, grid_shape, on_patches)
        scaled, before = normalised(rho, crystal, electrons)
        vacuums = vacuum(self, crystal, scaled)
        scale = normalisation(self, crystal, before, electrons, vacuums, accept)
        spread = None
        if deviations is not None:
            spread = (deviations * np.float32(1.0 if electrons is None else electrons / before)).astype(np.float32)
        return Prediction(
            scaled, crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name,
            electrons_before=before, seconds=time.monotonic() - started, spread=spread,
            flags=(*flags, *vacuums, *scale),
        )  # fmt: skip


def normalised(rho: np.ndarray, crystal: Crystal, electrons: float | None) -> tuple[np.ndarray, float]:
    """`rho` scaled to integrate to `electrons` (None: as it is), float32, and what it integrated to before."""
    before = float(rho.mean(dtype=np.float64)) * crystal.volume_a3
    if electrons is None:
        return rho.astype(np.float32), before
    if not before > 0:
        raise TomatError(f"{crystal.name}: the predicted density holds {before:.3g} electrons; it cannot be scaled.")
    return (rho * np.float64(electrons / before)).astype(np.float32), before


@dataclass(frozen=True, eq=False)
class PromoleculePredictor(Predictor):
    """A `Predictor` of the sum of atoms: what every model has to beat, and of use where there is no model. Its
    functions hold no whole number of electrons: in a salt, that of an anion holds a part of the cation's."""

    promolecule: Promolecule
    usual_deviation = PROMOLECULE_DEVIATION

    @property
    def spacing_a(self) -> float | None:
        return None

    @property
    def identity(self) -> str:
        return f"promolecule {self.promolecule.sha256}"

    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, None]:
        """As `Predictor.density`; the whole cell is one patch."""
        rho = self.promolecule.density(crystal, grid_shape)
        if on_patches is not None:
            on_patches(1, 1)
        return rho, None


def load_promolecule(path: str | os.PathLike[str]) -> PromoleculePredictor:
    """The promolecule in a file, such as `promolecule.json` beside a codec."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TomatError(f"{path} cannot be read as a promolecule ({type(error).__name__}: {error}).") from error
    promolecule = Promolecule.from_text(text, os.fspath(path))
    say_if_voids_unknown(promolecule, os.fspath(path))
    return PromoleculePredictor(promolecule)
