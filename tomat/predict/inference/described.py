"""A run as a predictor before its model is loaded: what its training says of structures and of known outputs.

Without JAX, so that structures are checked and known outputs recognised before the seconds that JAX and a model take.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, PROMOLECULE_FILE
from tomat.base.reporting import console
from tomat.data.codec.files import load_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference.asked import LEARNT
from tomat.predict.inference.checks import MODEL_DEVIATION
from tomat.predict.inference.choice import choice_of
from tomat.predict.inference.found import DecoderName, find_weights, identity_of
from tomat.predict.inference.interface import (
    LearntFromDensities,
    OnPatches,
    Prediction,
    Predictor,
    say_if_voids_unknown,
)

if TYPE_CHECKING:
    from pymatgen.core import Structure


class DescribedRun(LearntFromDensities):
    """The predictor of a run, whose model is loaded for the first structure that it predicts.

    Args:
        run_dir: The run's folder, or one of weights.
        step: Of its checkpoint; None: the newest.
        options: Others of `tomat.predict.inference.predictor.load`.

    Raises:
        TomatError: No such run, one without a promolecule, or options that do not go together.
    """

    def __init__(self, run_dir: str | Path, step: int | None = None, **options: Any) -> None:
        self.weights = find_weights(run_dir, step)
        self.decoder: DecoderName = options.get("decoder", "parallel")
        drawn = {name: options.get(name) for name in ("choice", "samples", "temperature", "seed")}
        self.choice = choice_of(self.decoder, **drawn)
        path = self.weights.folder / PROMOLECULE_FILE
        if not path.exists():
            raise TomatError(
                f"{self.weights.folder} has no {PROMOLECULE_FILE}: its data had no structures beside them, and it "
                "predicts nothing from a structure. Train one with model.environment and density_dropout."
            )
        self.promolecule = Promolecule.load(path)
        say_if_voids_unknown(self.promolecule, str(self.weights.folder))
        self._codec_sha256 = load_codec(str(self.weights.folder / CODEC_FILE)).sha256
        self._options, self._loaded = options, None

    @property
    def usual_deviation(self) -> float:
        """As `Predictor.usual_deviation`."""
        return MODEL_DEVIATION

    @property
    def identity(self) -> str:
        """That of the predictor which is loaded."""
        found = self.weights
        options = self._options
        return identity_of(
            (found.run_name, found.step, found.kind), self._codec_sha256, self.promolecule, self.decoder,
            options.get("rounds", 1), self.choice, options.get("kv_cache_dtype") or "compute",
        )  # fmt: skip

    def predict(
        self,
        structure: Crystal | Structure | str | os.PathLike[str],
        grid_shape: tuple[int, int, int] | None = None,
        *,
        electrons: float | Literal["learnt"] | None = LEARNT,
        accept: Collection[str] = (),
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """As `Predictor.predict`."""
        return self.loaded.predict(structure, grid_shape, electrons=electrons, accept=accept, on_patches=on_patches)

    @property
    def loaded(self) -> Predictor:
        """The predictor with its model."""
        if self._loaded is None:
            console.print(f"loading the model of {self.weights.folder}")
            from tomat.predict.inference.predictor import load_found

            self._loaded = load_found(self.weights, **self._options)
        return self._loaded
