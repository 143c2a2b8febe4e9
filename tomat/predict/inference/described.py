"""A run as a predictor before its model is loaded: what its training says of structures and of known outputs.

Without JAX, so that structures are checked and known outputs recognised before the seconds that JAX and a model take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, PROMOLECULE_FILE
from tomat.base.reporting import console
from tomat.data.codec.files import load_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference.checks import MODEL_DEVIATION, say_if_voids_unknown
from tomat.predict.inference.choice import DecoderName, choice_of, identity_of
from tomat.predict.inference.interface import OnPatches, Prediction, Predictor
from tomat.predict.weights.record import find_weights


class DescribedRun(Predictor):
    """The predictor of a run or a folder of weights, whose model is loaded for the first structure that it predicts;
    options as for `tomat.load`."""

    usual_deviation = MODEL_DEVIATION

    def __init__(
        self,
        run_dir: str | Path,
        step: int | None = None,
        *,
        rounds: int = 1,
        decoder: DecoderName = "parallel",
        kv_cache_dtype: Any = None,
        **drawn: Any,
    ) -> None:
        self.weights = find_weights(run_dir, step)
        self.choice = choice_of(decoder, **drawn)
        path = self.weights.folder / PROMOLECULE_FILE
        if not path.exists():
            said = f"{self.weights.folder} has no {PROMOLECULE_FILE} (its data had no structures), and predicts nothing"
            raise TomatError(f"{said}. Train one with model.environment and density_dropout.")
        self.promolecule = Promolecule.load(path)
        say_if_voids_unknown(self.promolecule, str(self.weights.folder))
        self._codec_sha256 = load_codec(str(self.weights.folder / CODEC_FILE)).sha256
        self._how = rounds, decoder, self.choice, kv_cache_dtype or "compute"
        self._loaded: Predictor | None = None

    @property
    def identity(self) -> str:
        found = self.weights
        weights = found.run_name, found.step, found.kind
        return identity_of(weights, self._codec_sha256, self.promolecule, *self._how)

    @property
    def loaded(self) -> Predictor:
        if self._loaded is None:
            console.print(f"loading the model of {self.weights.folder}")
            from tomat.predict.inference.predictor import RunPredictor
            from tomat.predict.inference.trained import load_weights_found

            self._loaded = RunPredictor(load_weights_found(self.weights, packed=True), *self._how)
        return self._loaded

    def predict(self, *asked: Any, **words: Any) -> Prediction:
        """As `Predictor.predict`, of whose seconds loading the model is no part."""
        return self.loaded.predict(*asked, **words)

    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        return self.loaded.density(crystal, grid_shape, on_patches)
