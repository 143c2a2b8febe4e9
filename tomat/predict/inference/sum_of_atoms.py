"""The sum of atoms as a predictor: the baseline that every model has to beat, and a substitute where there is none."""

import os
from dataclasses import dataclass

import numpy as np

from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference.interface import PROMOLECULE_DEVIATION, OnPatches, Predictor, say_if_voids_unknown


@dataclass(frozen=True, eq=False, repr=False)
class PromoleculePredictor(Predictor):
    """A sum of atoms. The functions hold no whole numbers of electrons: a salt's anion has a part of the cation's."""

    promolecule: Promolecule
    usual_deviation = PROMOLECULE_DEVIATION

    @property
    def spacing_a(self) -> float | None:
        return None

    @property
    def identity(self) -> str:
        return f"promolecule {self.promolecule.sha256}"

    @property
    def made_by(self) -> dict[str, str]:
        return {"model": f"sum of atoms {self.promolecule.sha256[:12]}, which a model has to beat"}

    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, None]:
        """As `Predictor.density`; the whole cell is one patch."""
        rho = self.promolecule.density(crystal, grid_shape)
        if on_patches is not None:
            on_patches(1, 1)
        return rho, None


def load_promolecule(path: str | os.PathLike[str]) -> PromoleculePredictor:
    """The predictor of a promolecule in a file, such as `promolecule.json` beside a codec."""
    promolecule = Promolecule.load(path)
    say_if_voids_unknown(promolecule, os.fspath(path))
    return PromoleculePredictor(promolecule)
