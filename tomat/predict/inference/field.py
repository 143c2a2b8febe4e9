"""Whole cells by a field model: boxes of voxels, each with the atoms near it. Memory and time are linear in voxels.

Of voxels that a symmetry of the crystal makes equal one is computed, since the model gives the same for all of them.
"""

from math import prod
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax.partitioning import ResourceMapping
from pymatgen.core import Structure
from pymatgen.symmetry.analyzer import SpacegroupAnalyzer, SymmetryUndeterminedError
from scipy.spatial import KDTree

from tomat.data.density.crystal import Crystal
from tomat.model.environment import EnvironmentTables
from tomat.model.field import FieldConfig, FieldModel
from tomat.model.nearby_atoms import GROUP_POSITIONS, Room, ScatteredAtoms, atoms_of_cell, named_atoms
from tomat.predict.inference.interface import OnPatches
from tomat.predict.inference.trained import LoadedRun

BOX = (4, 4, 2)
"""Most voxels of a box along each side: `GROUP_POSITIONS` in all."""
BOXES = 128
"""Boxes on a device at a time: 4,096 voxels."""
ROOM_STEP = 32
"""The arrays of atoms near a box are padded to a multiple of this, so that cells share compiled programs."""
SYMMETRY_TOLERANCE_A = 1e-5
"""How far apart a symmetry may leave atoms: spglib's default. Atoms moved by as much change a density by 0.002 %."""
SYMMETRY_ATOMS = 1000
"""No symmetry is looked for in cells of more atoms: spglib takes 0.4 s for 500, 7 s for 2,000, minutes for 8,000."""
IMAGES = 2**20
"""Images of voxels that are found at a time: 24 MB."""


def cell_density(
    run: LoadedRun, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The density on a grid of the cell, float32 `[nx, ny, nz]`, e/Å³, as the model gives it; and the standard
    deviation over the members of its ensemble, None for a single member."""
    config, tables = cast(FieldConfig, run.config.model), cast(EnvironmentTables, run.tables)
    trainer = run.config.trainer_config()
    first = first_equals(crystal, grid_shape)
    wanted = None if first is None else (first == np.arange(len(first))).reshape(grid_shape)
    boxes = Boxes(crystal, grid_shape, config.basis.cutoff_a, wanted)
    both = np.empty((2, prod(grid_shape)), np.float32)
    with trainer.use_device_mesh():
        model = hax.shard(run.model, trainer.parameter_axis_mapping)
        mapping, policy = trainer.compute_axis_mapping, trainer.mp
        for start in range(0, len(boxes), BOXES * trainer.data_axis_size):
            voxels, batch = boxes.batch(start, trainer.data_axis_size)
            found = densities_of_boxes(cast(FieldModel, model), batch, tables, mapping, policy)
            for values, each in zip(both, found, strict=True):
                values[voxels[voxels >= 0]] = np.asarray(each).reshape(voxels.shape)[voxels >= 0]
            if on_patches is not None:
                on_patches(min(start + len(voxels), len(boxes)), len(boxes))
    rho, deviations = (both if first is None else both[:, first]).reshape(2, *grid_shape)
    return rho, deviations if config.members > 1 else None


def first_equals(crystal: Crystal, grid_shape: tuple[int, int, int]) -> np.ndarray | None:
    """For each voxel the first one that a symmetry of the crystal makes equal to it: flat indices `[nx * ny * nz]`.
    Symmetries that do not take voxels to voxels are left out; None: there are no others."""
    if len(crystal.atomic_numbers) > SYMMETRY_ATOMS:
        return None
    structure = Structure(crystal.lattice, crystal.atomic_numbers.tolist(), crystal.frac_coords)
    try:
        # pymatgen's own list of operations rounds a shift of 0.0004 of the cell to 0.
        found = SpacegroupAnalyzer(structure, SYMMETRY_TOLERANCE_A, angle_tolerance=-1).get_symmetry_dataset()
    except SymmetryUndeterminedError:  # atoms that coincide, which a prediction may be told to accept
        return None
    shape = np.array(grid_shape)
    turns, shifts = found.rotations * shape[:, None] / shape, found.translations * shape
    whole = (abs(turns - turns.round()) < 1e-6).all(axis=(1, 2)) & (abs(shifts - shifts.round()) < 1e-3).all(axis=1)
    turns, shifts = turns[whole].round(), shifts[whole].round()
    if len(turns) == 1:
        return None
    first = np.full(prod(grid_shape), prod(grid_shape))
    left = np.arange(len(first))
    while len(left):
        asked, left = np.split(left, [max(1, IMAGES // len(turns))])
        images = turns @ np.array(np.unravel_index(asked, grid_shape)) + shifts[:, :, None]
        flat = np.ravel_multi_index(tuple(images.astype(int).swapaxes(0, 1)), grid_shape, mode="wrap")
        np.minimum.at(first, flat.ravel(), np.broadcast_to(asked, flat.shape).ravel())
        left = left[first[left] == len(first)]
    while (first[first] != first).any():  # two symmetries are taken to voxels, and their product just is not
        first = first[first]
    return first


@eqx.filter_jit
def densities_of_boxes(
    model: FieldModel,
    batch: dict[str, np.ndarray],
    tables: EnvironmentTables,
    axis_mapping: ResourceMapping | None,
    policy: jmp.Policy,
) -> tuple[jax.Array, jax.Array]:
    """The mean of the members at each place, and their standard deviation."""
    model = policy.cast_to_compute(model)
    with hax.axis_mapping(axis_mapping or {}):
        members, _ = model.densities(hax.shard(cast(ScatteredAtoms, named_atoms(batch))), tables)
        found = jnp.stack([each.rearrange(("batch", "position")).array for each in members])
        return found.mean(axis=0), found.std(axis=0, ddof=1) if len(members) > 1 else jnp.zeros_like(found[0])


class Boxes:
    """Boxes of nearly equal sides that tile the grid of a cell, and the atoms near each. `wanted`, bool `[nx, ny, nz]`:
    only the boxes with these voxels."""

    def __init__(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], reach_a: float, wanted: np.ndarray | None = None
    ) -> None:
        self.crystal, self.grid_shape, self.reach_a = crystal, grid_shape, reach_a
        sides = [np.array_split(np.arange(side), -(-side // most)) for side, most in zip(grid_shape, BOX, strict=True)]
        self._sides = [
            np.array([np.resize(each, most) for each in part]) for part, most in zip(sides, BOX, strict=True)
        ]
        self._real = [
            np.array([np.arange(most) < len(each) for each in part]) for part, most in zip(sides, BOX, strict=True)
        ]
        self._shape = tuple(map(len, sides))
        self._boxes = np.arange(prod(self._shape))
        if wanted is not None:
            for axis, parts in enumerate(sides):
                wanted = np.logical_or.reduceat(wanted, [part[0] for part in parts], axis=axis)
            self._boxes = np.flatnonzero(wanted)
        self.numbers, self.positions = atoms_of_cell(crystal, reach_a)
        self._tree = KDTree(self.positions)
        self._elements = len(np.unique(self.numbers))

    def __len__(self) -> int:
        return len(self._boxes)

    def room(self) -> Room:
        """The room for the atoms near the box that has most of them."""
        each = (self.batch(start, 1)[1]["numbers"].shape[-1] for start in range(0, len(self), BOXES))
        return Room(max(each), self._elements)

    def batch(self, start: int, devices: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """`BOXES` boxes for each device, from box `start` on; the last box is repeated where there are no more. Returns
        their voxels, int [box, voxel], as flat indices (-1 for repeated ones), and the arrays of `ScatteredAtoms`."""
        asked = start + np.arange(BOXES * devices)
        index = np.unravel_index(self._boxes[np.minimum(asked, len(self) - 1)], self._shape)
        x, y, z = (each[i] for each, i in zip(self._sides, index, strict=True))
        voxels = (x[:, :, None, None] * self.grid_shape[1] + y[:, None, :, None]) * self.grid_shape[2] + z[
            :, None, None
        ]
        real = [each[i] for each, i in zip(self._real, index, strict=True)]
        is_real = real[0][:, :, None, None] & real[1][:, None, :, None] & real[2][:, None, None]
        voxels = np.where(is_real & (asked < len(self))[:, None, None, None], voxels, -1).reshape(len(asked), -1)
        every = np.stack(np.broadcast_arrays(x[:, :, None, None], y[:, None, :, None], z[:, None, None]), axis=-1)
        places = (every.reshape(len(asked), -1, 3) / self.grid_shape - 0.5) @ self.crystal.lattice
        centres = (places.min(axis=1) + places.max(axis=1)) / 2
        radii_a = self.reach_a + np.linalg.norm(places - centres[:, None], axis=2).max(axis=1)
        near = self._tree.query_ball_point(centres, radii_a, return_sorted=True)
        counts = np.array([len(each) for each in near])
        room = Room(max(ROOM_STEP, -(-int(counts.max()) // ROOM_STEP) * ROOM_STEP), self._elements)
        shapes = room.shapes(ScatteredAtoms, GROUP_POSITIONS * BOXES)
        arrays = {name: np.zeros((devices, *sizes), dtype) for name, (dtype, *sizes) in shapes.items()}
        box, atom = np.repeat(np.arange(len(asked)), counts), np.concatenate([*map(np.asarray, near)]).astype(int)
        place = np.arange(len(atom)) - np.repeat(np.cumsum(counts) - counts, counts)
        arrays["positions"].reshape(len(asked), room.atoms, 3)[box, place] = self.positions[atom]
        arrays["numbers"].reshape(len(asked), room.atoms)[box, place] = self.numbers[atom]
        arrays["kinds"][:] = np.unique(self.numbers)
        arrays["places"][:] = places.reshape(devices, -1, 3)
        return voxels, arrays
