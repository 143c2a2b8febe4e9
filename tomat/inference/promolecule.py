"""The promolecule as a predictor: what every model has to beat, and of use where there is no model."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tomat.base.errors import TomatError
from tomat.density.crystal import Crystal
from tomat.density.promolecule import Promolecule
from tomat.inference.defaults import LEARNT, settled
from tomat.inference.interface import OnPatches, Prediction, normalised

if TYPE_CHECKING:
    from pymatgen.core import Structure


@dataclass(frozen=True, eq=False)
class PromoleculePredictor:
    """A `Predictor` of the sum of atoms.

    Its functions hold no whole number of electrons: in a salt, that of an anion holds a part of the cation's. Valences
    are those of the densities' own counts.
    """

    promolecule: Promolecule

    @property
    def shortest_distance_a(self) -> Mapping[tuple[int, int], float] | None:
        """Shortest distances of neighbours in the densities it was fitted to, A."""
        return self.promolecule.shortest_distance_a or None

    @property
    def spacing_a(self) -> float | None:
        """Any is as good: it is a sum of functions."""
        return None

    @property
    def valences(self) -> Mapping[int, float] | None:
        """Electrons that an atom of each element brings, learnt from those densities."""
        return self.promolecule.valences or None

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers it was fitted to."""
        return self.promolecule.elements

    @property
    def identity(self) -> str:
        """The hash of the promolecule."""
        return f"promolecule {self.promolecule.sha256}"

    def predict(
        self,
        structure: Crystal | Structure | str | os.PathLike[str],
        grid_shape: tuple[int, int, int] | None = None,
        *,
        electrons: float | Literal["learnt"] | None = LEARNT,
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """As `Predictor.predict`; the whole cell is one patch."""
        started = time.monotonic()
        crystal, grid_shape, electrons = settled(self, structure, grid_shape, electrons)
        rho, before = normalised(self.promolecule.density(crystal, grid_shape), crystal, electrons)
        if on_patches is not None:
            on_patches(1, 1)
        return Prediction.of_crystal(rho, crystal, before, time.monotonic() - started)


def load_promolecule(path: str | os.PathLike[str]) -> PromoleculePredictor:
    """The promolecule in a file, such as `promolecule.json` beside a codec.

    Raises:
        TomatError: it cannot be read, is damaged, or something else.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TomatError(f"{path} cannot be read as a promolecule ({type(error).__name__}: {error}).") from error
    return PromoleculePredictor(Promolecule.from_text(text, os.fspath(path)))
