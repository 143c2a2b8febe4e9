"""The atoms near patches, for a model that reads them (`model.environment`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, cast

import haliax as hax
import jax
import numpy as np
from haliax import Axis, NamedArray

from tomat.base.errors import TomatError
from tomat.model.environment import EnvironmentConfig, PatchAtoms

if TYPE_CHECKING:
    from tomat.data.density.crystal import Crystal

XYZ, SIDE = Axis("xyz", 3), Axis("side", 3)
_ARRAYS = ("positions", "numbers", "kinds", "steps", "shape")


def atom_axis(size: int) -> Axis:
    return Axis("atom", size)


def kind_axis(size: int) -> Axis:
    return Axis("kind", size)


def atoms_of_patch(
    crystal: Crystal,
    anchor: np.ndarray,
    grid_shape: tuple[int, int, int],
    patch_shape: tuple[int, int, int],
    reach_a: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the atoms within `reach_a` of a patch, whose first voxel is `anchor`: atomic numbers int64 [n], positions
    float64 [n, 3] from that voxel in A; and the steps from voxel to voxel along each side, float64 [3, 3] in A."""
    steps = crystal.lattice / np.array(grid_shape)[:, None]
    edges = steps * (np.array(patch_shape) - 1)[:, None]
    numbers, positions = crystal.near_box(np.asarray(anchor) @ steps, edges, reach_a)
    return numbers, positions, steps


@dataclass(frozen=True)
class Room:
    """For how many atoms and elements near a patch a row has room."""

    atoms: int
    elements: int

    @staticmethod
    def of(config: EnvironmentConfig) -> Room:
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
    """One patch's atoms in arrays of the sizes of `room`."""
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


def stacked_atoms(patches: Sequence[PatchAtoms]) -> dict[str, np.ndarray]:
    """Those of many patches, one row a patch, by the names of `PatchAtoms`."""
    return {key: np.stack([np.asarray(getattr(patch, key).array) for patch in patches]) for key in _ARRAYS}


def named_atoms(batch: Mapping[str, jax.Array | np.ndarray]) -> PatchAtoms | None:
    """Rows of what `stacked_atoms` made, with names; None where there is nothing of it."""
    if "positions" not in batch:
        return None
    n_sequences, n_atoms = batch["numbers"].shape
    axes = Axis("batch", n_sequences), atom_axis(n_atoms)
    kind = kind_axis(batch["kinds"].shape[1])

    def named(key: str, *more: Axis) -> NamedArray:
        return NamedArray(batch[key], more)  # pyright: ignore[reportArgumentType]  # NumPy's too, as jit takes them

    return PatchAtoms(
        named("positions", *axes, XYZ), named("numbers", *axes), named("kinds", axes[0], kind),
        named("steps", axes[0], SIDE, XYZ), named("shape", axes[0], SIDE),
    )  # fmt: skip
