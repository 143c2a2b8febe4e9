"""The atoms near the patch of each row, for a model that reads them (`model.environment`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import cast

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.tokens.shards import ShardSet
from tomat.model.environment import EnvironmentConfig, PatchAtoms

XYZ, SIDE = Axis("xyz", 3), Axis("side", 3)


def atom_axis(size: int) -> Axis:
    """The axis of a patch's atoms."""
    return Axis("atom", size)


def kind_axis(size: int) -> Axis:
    """The axis of the elements among a patch's atoms."""
    return Axis("kind", size)


def atoms_of_patch(
    crystal: Crystal,
    anchor: np.ndarray,
    grid_shape: tuple[int, int, int],
    patch_shape: tuple[int, int, int],
    reach_a: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a patch sees.

    Args:
        crystal: Cell and atoms.
        anchor: int [3], the patch's first voxel.
        grid_shape: Voxels of the cell.
        patch_shape: Voxels of the patch.
        reach_a: Radius of an atom, A.

    Returns:
        Atomic numbers int64 [n], positions float64 [n, 3] from the first voxel in A, and the steps from voxel to voxel
        along each side, float64 [3, 3] in A.
    """
    steps = crystal.lattice / np.array(grid_shape)[:, None]
    edges = steps * (np.array(patch_shape) - 1)[:, None]
    numbers, positions = crystal.near_box(np.asarray(anchor) @ steps, edges, reach_a)
    return numbers, positions, steps


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


@dataclass(frozen=True)
class Room:
    """For how many atoms and elements near a patch a row has room."""

    atoms: int
    elements: int

    @staticmethod
    def of(config: EnvironmentConfig) -> Room:
        """That of a model's rows."""
        return Room(config.max_atoms, config.max_elements)

    def enlarged(self, numbers: Iterable[np.ndarray]) -> Room:
        """With room for patches with these atomic numbers too: neither count is part of a model's weights."""
        atoms, elements = self.atoms, self.elements
        for each in numbers:
            atoms, elements = max(atoms, -(-len(each) // 16) * 16), max(elements, len(np.unique(each)))
        return Room(atoms, elements)


def filled(
    numbers: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    patch_shape: tuple[int, int, int],
    room: Room,
    name: str,
) -> PatchAtoms:
    """One patch's atoms in arrays of the sizes of `room`.

    Raises:
        TomatError: There are more.
    """
    n, kinds = len(numbers), np.unique(numbers)
    for knob, found, most, needed in (
        ("max_atoms", f"{n} atoms", room.atoms, -(-n // 16) * 16 if n > room.atoms else 0),
        ("max_elements", f"{len(kinds)} elements", room.elements, len(kinds)),
    ):
        if needed > most:
            raise TomatError(
                f"a patch of {name} of {prod(patch_shape):,} voxels has {found} near it and model.environment.{knob} "
                f"is {most}; set it to {needed} or more."
            )
    all_numbers, all_positions = np.zeros(room.atoms, np.int32), np.zeros((room.atoms, 3), np.float32)
    all_numbers[:n], all_positions[:n] = numbers, positions
    all_kinds = np.zeros(room.elements, np.int32)
    all_kinds[: len(kinds)] = kinds
    atom = atom_axis(room.atoms)

    def named(array: np.ndarray, *axes: Axis) -> NamedArray:
        # Levanter stacks NumPy arrays on the host.
        return hax.NamedArray(cast(jax.Array, array), axes)

    return PatchAtoms(
        named(all_positions, atom, XYZ),
        named(all_numbers, atom),
        named(all_kinds, kind_axis(room.elements)),
        named(steps.astype(np.float32), SIDE, XYZ),
        named(np.array(patch_shape, np.int32), SIDE),
    )
