"""All voxels of a patch in one forward pass: the model is told the atoms and no density.

Rounds of refinement give it the densities of the round before as if they were known: `rounds` passes a patch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping
from levanter.models.lm_model import LmHeadModel

from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import PatchShape
from tomat.data.tokens.patch import encode_rows, tiling_anchors
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START, PAD
from tomat.model.any_decoder import environment_of, hidden_and_head
from tomat.model.environment import EnvironmentConfig, EnvironmentTables
from tomat.model.patch_atoms import Room, atoms_of_patch, filled, named_atoms, stacked_atoms
from tomat.predict.inference.trained import LoadedRun

BLOCK_VOXELS = 128
"""Voxels of each patch whose logits exist at once."""


@dataclass(frozen=True, eq=False)
class CellPatches:
    """Patches that tile a cell, as a model reads them that is told no density."""

    anchors: np.ndarray
    """int [patch, 3]: first voxel of each."""
    patch_shape: PatchShape
    grid_shape: tuple[int, int, int]
    arrays: dict[str, np.ndarray]
    """`tokens` int32 [patch, position], and the arrays of `stacked_atoms` for a model with `environment`."""

    def assembled(self, values: np.ndarray) -> np.ndarray:
        """The cell from the values of its patches, float [patch, voxel]; what reaches past the cell is left out."""
        cell = np.zeros(self.grid_shape, values.dtype)
        boxes = values.reshape(len(self.anchors), *self.patch_shape)
        for anchor, box in zip(self.anchors, boxes, strict=True):
            sides = [min(p, n - a) for p, n, a in zip(self.patch_shape, self.grid_shape, anchor, strict=True)]
            place = tuple(slice(a, a + side) for a, side in zip(anchor, sides, strict=True))
            cell[place] = box[tuple(slice(side) for side in sides)]
        return cell


def cell_patches(run: LoadedRun, crystal: Crystal, grid_shape: tuple[int, int, int]) -> CellPatches:
    """The patches of a cell for the model of a run."""
    layout, environment = run.config.data.sequence_layout, environment_of(run.config.model)
    patch_shape = layout.patch_shape(len(crystal.atomic_numbers))
    anchors = tiling_anchors(grid_shape, patch_shape)
    # The rows are encoded from an empty cell: nothing but the structure can be in them.
    empty = DensityGrid(
        np.zeros(grid_shape, np.float32), crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name
    )
    tokens = encode_rows(empty, anchors, layout, run.codec)[:, : run.config.seq_len].astype(np.int32)
    tokens[tokens >= DENSITY_START] = PAD
    arrays = {"tokens": tokens}
    if environment is not None:
        near, room = atoms_near(environment, crystal, anchors, grid_shape, patch_shape)
        arrays |= stacked_atoms([filled(*found, patch_shape, room, crystal.name) for found in near])
    return CellPatches(anchors, patch_shape, grid_shape, arrays)


def atoms_near(
    environment: EnvironmentConfig,
    crystal: Crystal,
    anchors: np.ndarray,
    grid_shape: tuple[int, int, int],
    patch_shape: PatchShape,
) -> tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray]], Room]:
    """`atoms_of_patch` of each patch, and the room that they are given."""
    reach_a = environment.basis.cutoff_a
    near = [atoms_of_patch(crystal, anchor, grid_shape, patch_shape, reach_a) for anchor in anchors]
    # A structure that is denser than any trained, or of more elements, gets room of its own.
    return near, Room.of(environment).enlarged(numbers for numbers, *_ in near)


def batches(arrays: dict[str, np.ndarray], size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Batches of one size, each with its number of real rows; the last is filled up with its last row."""
    for start in range(0, len(arrays["tokens"]), size):
        rest = {name: array[start:] for name, array in arrays.items()}
        yield min(size, len(rest["tokens"])), first_rows(rest, size)


def first_rows(arrays: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The first rows, filled up with the last one."""
    rows = np.minimum(np.arange(size), len(arrays["tokens"]) - 1)
    return {name: array[rows] for name, array in arrays.items()}


@eqx.filter_jit
def decode_parallel(
    model: LmHeadModel,
    batch: dict[str, np.ndarray],
    tables: EnvironmentTables | None,
    values: np.ndarray,
    n_voxels: int,
    rounds: int,
    axis_mapping: ResourceMapping | None,
    policy: jmp.Policy | None,
) -> jax.Array:
    """Expected density of every voxel of a batch of patches.

    Args:
        values: float32 [bin], e/A^3: the codec's means.
        rounds: Forward passes; each after the first reads the most probable densities of the one before.
        axis_mapping: Levanter's compute mapping where the model lives on a mesh.

    Returns:
        float32 [batch, voxel], e/A^3.
    """
    if policy is not None:
        model = policy.cast_to_compute(model)
    with hax.axis_mapping(axis_mapping or {}):
        n_sequences, length = batch["tokens"].shape
        axes = Axis("batch", n_sequences), Axis("position", length)
        ids = jnp.asarray(batch["tokens"])
        start = jnp.argmax(ids == DENSITY_BLOCK_START, axis=1)[:, None]
        places = jnp.minimum(start + jnp.arange(n_voxels), length - 1)
        atoms = named_atoms(batch)
        rho = jnp.zeros((n_sequences, n_voxels))
        for _ in range(rounds):
            hidden, head = hidden_and_head(model, hax.shard(NamedArray(ids, axes)), atoms, tables)
            head = head[model.Vocab.name, slice(DENSITY_START, DENSITY_START + len(values))]
            rho, best = _expected(
                hidden.rearrange(("batch", "position", "embed")).array,
                head.rearrange((model.Vocab.name, "embed")).array.astype(hidden.dtype),
                places,
                jnp.asarray(values),
            )
            rows = jnp.arange(n_sequences)[:, None]
            ids = ids.at[rows, jnp.minimum(places + 1, length - 1)].set(best + DENSITY_START)
    return rho


def _expected(hidden: jax.Array, head: jax.Array, places: jax.Array, values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Expectation and most probable bin at positions [B, V] of hidden [B, T, E]: float32 and int32 [B, V]."""
    n_sequences, n_voxels = places.shape
    block = min(BLOCK_VOXELS, n_voxels)
    n_blocks = -(-n_voxels // block)
    padded = jnp.pad(places, ((0, 0), (0, n_blocks * block - n_voxels)), mode="edge")

    def one(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        states = jnp.take_along_axis(hidden, at[..., None], axis=1)
        logits = jnp.einsum("bve,ke->bvk", states, head, preferred_element_type=jnp.float32)
        return jax.nn.softmax(logits) @ values, jnp.argmax(logits, axis=-1).astype(jnp.int32)

    parts = jax.lax.map(one, padded.reshape(n_sequences, n_blocks, block).swapaxes(0, 1))
    rho, best = (part.swapaxes(0, 1).reshape(n_sequences, -1)[:, :n_voxels] for part in parts)
    return rho, best
