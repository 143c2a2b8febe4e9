"""The atoms near the patch of each row of a shard set, for a model that reads them (`model.environment`)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tomat.data.tokens.shards import ShardSet
from tomat.model.environment import EnvironmentConfig, PatchAtoms
from tomat.model.patch_atoms import Room, atoms_of_patch, filled


class RowAtoms:
    """The atoms near the patches of a shard set, row by row.

    Args:
        shards: An open set.
        config: Of the model.

    Raises:
        TomatError: An imported set, of which no patch's place is known.
    """

    def __init__(self, shards: ShardSet, config: EnvironmentConfig) -> None:
        self.shards, self.config = shards, config
        self.crystals = shards.crystals
        self._crystal = lru_cache(maxsize=256)(self.crystals.__getitem__)
        self._anchors = lru_cache(maxsize=256)(lambda index: shards.manifest.anchors(shards.manifest.materials[index]))

    def __call__(self, row: int) -> PatchAtoms:
        """Of one row, NumPy arrays in the model's sizes.

        Raises:
            TomatError: More atoms or elements than the model has room for.
        """
        manifest = self.shards.manifest
        index = int(manifest.material_indices(np.array(row)))
        material, crystal = manifest.materials[index], self._crystal(index)
        patch_shape = manifest.layout.patch_shape(len(crystal.atomic_numbers))
        anchor = self._anchors(index)[row - material.row_start]
        found = atoms_of_patch(crystal, anchor, material.grid_shape, patch_shape, self.config.basis.cutoff_a)
        return filled(*found, patch_shape, Room.of(self.config), material.material_id)
