"""The atoms near the patch of each row, for a model that reads them (`model.environment`)."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import cast

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from tomat.base.errors import TomatError
from tomat.density.crystal import Crystal
from tomat.model.environment import EnvironmentConfig, PatchAtoms
from tomat.tokens.shards import ShardSet

XYZ, SIDE = Axis("xyz", 3), Axis("side", 3)


def atom_axis(size: int) -> Axis:
    """The axis of a patch's atoms."""
    return Axis("atom", size)


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
            TomatError: More atoms than `model.environment.max_atoms`.
        """
        manifest = self.shards.manifest
        index = int(manifest.material_indices(np.array(row)))
        material, crystal = manifest.materials[index], self._crystal(index)
        patch_shape = manifest.layout.patch_shape(len(crystal.atomic_numbers))
        anchor = self._anchors(index)[row - material.row_start]
        found = atoms_of_patch(crystal, anchor, material.grid_shape, patch_shape, self.config.basis.cutoff_a)
        return filled(*found, patch_shape, self.config.max_atoms, material.material_id)


def filled(
    numbers: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    patch_shape: tuple[int, int, int],
    max_atoms: int,
    name: str,
) -> PatchAtoms:
    """One patch's atoms in arrays of `max_atoms`.

    Raises:
        TomatError: There are more.
    """
    n = len(numbers)
    if n > max_atoms:
        raise TomatError(
            f"a patch of {name} of {prod(patch_shape):,} voxels has {n} atoms near it and model.environment.max_atoms "
            f"is {max_atoms}; set it to {-(-n // 16) * 16} or more."
        )
    all_numbers, all_positions = np.zeros(max_atoms, np.int32), np.zeros((max_atoms, 3), np.float32)
    all_numbers[:n], all_positions[:n] = numbers, positions
    atom = atom_axis(max_atoms)

    def named(array: np.ndarray, *axes: Axis) -> NamedArray:
        # Levanter stacks NumPy arrays on the host.
        return hax.NamedArray(cast(jax.Array, array), axes)

    return PatchAtoms(
        named(all_positions, atom, XYZ),
        named(all_numbers, atom),
        named(steps.astype(np.float32), SIDE, XYZ),
        named(np.array(patch_shape, np.int32), SIDE),
    )
