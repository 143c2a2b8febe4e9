"""The atoms near the voxels of a shard set's rows, row by row, for a model that reads them."""

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.density.elements import symbol_of
from tomat.data.tokens.structures import Structures
from tomat.model.nearby_atoms import (
    AtomsRead,
    NearbyAtoms,
    Room,
    atoms_of_cell,
    atoms_of_patch,
    filled,
    filled_cell,
    places_in_cell,
    spatial_order,
)

if TYPE_CHECKING:
    from tomat.data.tokens.shards import ShardSet

MATERIALS_KEPT = 256
"""Number of materials whose structures and anchors are kept. A window has some thousand, which cost little."""


class RowAtoms:
    """Gives the `PatchAtoms` of each row of a set of patches, or the `ScatteredAtoms` for a set of scattered voxels."""

    def __init__(self, shards: "ShardSet", config: AtomsRead, seq_len: int | None = None) -> None:
        """`seq_len`: tokens of each row that are used, from its start; None: all of the set's context."""
        self.shards, self.config = shards, config
        self.seq_len = shards.context if seq_len is None else seq_len
        self.crystals = shards.crystals
        self._scattered = shards.layout.is_scattered
        if self._scattered and shards.promolecule is None:
            raise TomatError(
                f"{shards.url} has scattered voxels and no promolecule, which tells how many electrons a cell has. "
                "Tokenize it again with --promolecule TRAINING_SET/promolecule.json."
            )
        self._crystal = lru_cache(maxsize=MATERIALS_KEPT)(self.crystals.__getitem__)
        self._anchors = lru_cache(maxsize=MATERIALS_KEPT)(
            lambda index: shards.manifest.anchors(shards.manifest.materials[index])
        )
        self._cell = lru_cache(maxsize=MATERIALS_KEPT)(self._read_cell)
        self._electrons: dict[int, float] = {}
        if (known := shards.promolecule) is not None:
            # An atom's valence electrons: the number that the densities gave. Where they left it open, the integral of
            # the atom's function, which is some percent off.
            self._electrons = {**known.electrons(), **known.valences}
            for number in np.unique(self.crystals.atomic_numbers) if isinstance(self.crystals, Structures) else ():
                if int(number) not in self._electrons:
                    name = next(each.name for each in self.crystals if number in each.atomic_numbers)
                    said = f"{name} has {symbol_of(int(number))}, which the set's promolecule does not know"
                    raise TomatError(
                        f"{shards.url}: {said}. Leave it out of the set, or fit the promolecule to densities with such "
                        "atoms."
                    )

    def __call__(self, row: int) -> tuple[NearbyAtoms, np.ndarray | None]:
        """The atoms of one row, NumPy arrays in the model's sizes, and the order of its tokens that they belong to,
        int64 [position] (None: as stored)."""
        manifest = self.shards.manifest
        index = int(manifest.material_indices(np.array(row)))
        material, room = manifest.materials[index], Room.of(self.config)
        name = material.material_id
        if self._scattered:
            numbers, positions, mean_density = self._cell(index)
            start = row - material.row_start
            voxels = manifest.voxels(material, start, start + 1)[0, : self.seq_len]
            places = places_in_cell(self._crystal(index), material.grid_shape, voxels)
            order, reach_a = spatial_order(places), self.config.basis.cutoff_a
            return filled_cell(numbers, positions, places[order], mean_density, room, reach_a, name), order
        crystal = self._crystal(index)
        patch_shape = manifest.layout.patch_shape(len(crystal.atomic_numbers))
        anchor = self._anchors(index)[row - material.row_start]
        found = atoms_of_patch(crystal, anchor, material.grid_shape, patch_shape, self.config.basis.cutoff_a)
        return filled(*found, patch_shape, room, name), None

    def _read_cell(self, index: int) -> tuple[np.ndarray, np.ndarray, float]:
        crystal = self._crystal(index)
        atoms = crystal.atomic_numbers.tolist()
        mean_density = sum(self._electrons[number] for number in atoms) / crystal.volume_a3
        return *atoms_of_cell(crystal, self.config.basis.cutoff_a), mean_density
