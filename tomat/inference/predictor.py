"""A trained run as a predictor: from a structure to its density."""

from __future__ import annotations

import time
from collections.abc import Mapping
from math import prod
from pathlib import Path

import haliax as hax
import numpy as np

from tomat.base.errors import TomatError
from tomat.codec.base import UNIT_E_PER_A3, require_unit
from tomat.density.crystal import Crystal
from tomat.inference.interface import OnPatches, Prediction, normalised
from tomat.inference.parallel import batches, cell_patches, decode_parallel
from tomat.inference.trained import LoadedRun, load_trained

BATCH_SEQUENCES = 16
"""Patches of a forward pass on one device."""


class RunPredictor:
    """The model of a run, all voxels of a patch at a time.

    Args:
        run: A trained run whose model has `environment`.
        rounds: Forward passes a patch.

    Raises:
        TomatError: A run that was not trained for this.
    """

    def __init__(self, run: LoadedRun, rounds: int = 1) -> None:
        name = run.config.run_name
        if run.tables is None or run.promolecule is None:
            raise TomatError(
                f"run '{name}' has no model.environment: its model knows atoms from the preamble alone, rounded to "
                "0.05 A, and predicts nothing without true densities. Train one with model.environment and "
                "density_dropout."
            )
        if run.config.density_dropout == 0:
            raise TomatError(
                f"run '{name}' was trained with density_dropout 0: it has never predicted a voxel without the density "
                "before it. Train with density_dropout above 0."
            )
        require_unit(run.codec, UNIT_E_PER_A3, "a prediction")
        if rounds < 1:
            raise TomatError(f"rounds is {rounds}; expected at least 1.")
        self.run, self.rounds, self.promolecule = run, rounds, run.promolecule
        self._means = run.codec.decode(np.arange(run.codec.n_density_tokens), decoder="mean")

    @property
    def elements(self) -> tuple[int, ...]:
        """Atomic numbers that its training had."""
        return self.promolecule.elements

    @property
    def shortest_distance_a(self) -> Mapping[tuple[int, int], float] | None:
        """Shortest distances of neighbours in its training, A."""
        return self.promolecule.shortest_distance_a or None

    @property
    def spacing_a(self) -> float | None:
        """Median voxel spacing of its training, A."""
        return self.promolecule.spacing_a or None

    @property
    def valences(self) -> Mapping[int, float] | None:
        """Electrons that an atom of each element brings, learnt from the training set."""
        return self.promolecule.valences or None

    @property
    def identity(self) -> str:
        """The run, its step and decoder."""
        config = self.run.config
        return (
            f"run {config.run_name} step {self.run.step}, weights {self.run.weights}, codec {self.run.codec.sha256}, "
            f"promolecule {self.promolecule.sha256}, parallel, rounds {self.rounds}"
        )

    def predict(
        self,
        crystal: Crystal,
        grid_shape: tuple[int, int, int],
        *,
        electrons: float | None,
        on_patches: OnPatches | None = None,
    ) -> Prediction:
        """As `Predictor.predict`.

        Raises:
            TomatError: An element that no training density had, or a structure that the layout cannot hold.
        """
        started = time.monotonic()
        self.promolecule.check_elements(crystal)
        patches = cell_patches(self.run, crystal, grid_shape)
        trainer = self.run.config.trainer_config()
        total, n_voxels = len(patches.anchors), prod(patches.patch_shape)
        parts: list[np.ndarray] = []
        with trainer.use_device_mesh():
            model = hax.shard(self.run.model, trainer.parameter_axis_mapping)
            size = BATCH_SEQUENCES * trainer.data_axis_size
            for real, batch in batches(patches.arrays, size):
                rho = decode_parallel(
                    model, batch, self.run.tables, self._means, n_voxels, self.rounds,
                    trainer.compute_axis_mapping, trainer.mp,
                )  # fmt: skip
                parts.append(np.asarray(rho)[:real])
                if on_patches is not None:
                    on_patches(min(len(parts) * size, total), total)
        rho, before = normalised(patches.assembled(np.concatenate(parts)), crystal, electrons)
        return Prediction(rho, before, time.monotonic() - started)


def load(run_dir: str | Path, *, step: int | None = None, rounds: int = 1) -> RunPredictor:
    """The predictor of a run.

    Args:
        run_dir: The run's folder.
        step: Of its checkpoint; None: the newest.
        rounds: Forward passes a patch.

    Raises:
        TomatError: No such run, or one whose model cannot predict from a structure.
    """
    return RunPredictor(load_trained(run_dir, step), rounds)
