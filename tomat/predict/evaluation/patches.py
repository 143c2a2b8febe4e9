"""Which voxels of a held-out cell are evaluated: random patches, or a tiling that counts every voxel once.

Where a patch is larger than the cell it wraps round and holds voxels again; the model has then read their density
already, and a copy counts for nothing.

A patch carries its tokens (what the model reads) beside the **unquantised** reference density of the same voxels (what
the answer is held against), so the codec's own rounding is part of every figure and is reported apart as its floor.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import UNIT_E_PER_A3, DensityCodec, require_unit
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import check_encodable, encode_rows
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START

if TYPE_CHECKING:  # baselines need no JAX
    from tomat.model.environment import EnvironmentConfig, PatchAtoms


@dataclass(frozen=True, eq=False)
class EvaluationPatches:
    """Patches of one material, all of one shape."""

    tokens: np.ndarray
    """uint16 [patch, position]: the sequences, cut to what the model reads."""
    density_start: int
    """Position of the first density token, the same in every row: the preamble's length follows from the material."""
    reference: np.ndarray
    """float32 [patch, px, py, pz], e/A^3: the true density, not rounded to the codec."""
    true_bins: np.ndarray
    """uint16 [patch, voxel]: density ids of the patch in C order, also where `counted` is False."""
    counted: np.ndarray
    """bool [patch, voxel]: the voxels that enter every figure, of the model and of the baselines alike."""
    voxel_volume_a3: float
    crystal: Crystal
    """Of the material."""
    grid_shape: tuple[int, int, int]
    """Voxels of its cell."""
    anchors: np.ndarray
    """int [patch, 3]."""

    def atoms(self, environment: "EnvironmentConfig") -> "list[PatchAtoms]":
        """The atoms near each patch, in the arrays of a model."""
        from tomat.model.patch_atoms import Room, atoms_of_patch, filled

        x, y, z = self.reference.shape[1:]
        return [
            filled(
                *atoms_of_patch(self.crystal, anchor, self.grid_shape, (x, y, z), environment.basis.cutoff_a),
                (x, y, z),
                Room.of(environment),
                self.crystal.name,
            )
            for anchor in self.anchors
        ]

    @property
    def n_patches(self) -> int:
        """Number of patches."""
        return self.tokens.shape[0]

    @property
    def n_voxels(self) -> int:
        """Voxels that are counted."""
        return int(np.count_nonzero(self.counted))

    def visible(self, codec: DensityCodec) -> np.ndarray:
        """float32 [patch, px, py, pz], e/A^3: the true density as the tokens hold it."""
        return codec.decode(self.true_bins, decoder="median").reshape(self.reference.shape)


def random_anchors(material_id: str, grid_shape: Sequence[int], count: int, seed: int) -> np.ndarray:
    """`count` anchors of a material, uniform over its voxels, without replacement where it has that many.

    Philox keyed by SHA-256 of seed and material: a material keeps its patches whatever else is evaluated, on any
    machine, and they are unrelated to the anchors drawn for training.

    Returns:
        int64 [count, 3].
    """
    digest = hashlib.sha256(f"evaluation anchors:{seed}:{material_id}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    voxels = int(np.prod([int(side) for side in grid_shape]))
    flat = generator.choice(voxels, size=count, replace=count > voxels)
    return np.stack(np.unravel_index(flat, tuple(grid_shape)), axis=-1).astype(np.int64)


def inside_cell(anchors: np.ndarray, grid_shape: Sequence[int], patch_shape: Sequence[int]) -> np.ndarray:
    """bool [tile, voxel]: whether a tile's voxel lies in the cell without wrapping round (C order)."""
    inside = [anchors[:, axis, None] + np.arange(patch_shape[axis])[None, :] < grid_shape[axis] for axis in range(3)]
    x, y, z = inside
    return (x[:, :, None, None] & y[:, None, :, None] & z[:, None, None, :]).reshape(len(anchors), -1)


def make_patches(
    grid: DensityGrid,
    anchors: np.ndarray,
    layout: SequenceLayout,
    codec: DensityCodec,
    *,
    seq_len: int | None = None,
    tiling: bool = False,
) -> EvaluationPatches:
    """Tokenise patches of `grid`, and keep the true density of the same voxels.

    Args:
        grid: the material, e/A^3.
        anchors: int [patch, 3].
        layout, codec: those the model was trained on; one token a voxel.
        seq_len: positions the model reads; None for the layout's context. Voxels beyond it are not counted.
        tiling: `anchors` are those of `tiling_anchors`: count each voxel of the cell once.
    """
    check_codec(codec)
    patch_shape = check_encodable(grid, layout, codec)
    n_voxels = prod(patch_shape)
    length = layout.context if seq_len is None else seq_len
    rows = encode_rows(grid, anchors, layout, codec)
    # Every row of a material has the same preamble, so the first row tells where the density block starts.
    density_start = int(np.flatnonzero(rows[0] == DENSITY_BLOCK_START)[0]) + 1
    reached = int(np.clip(length - density_start, 0, n_voxels))
    if reached == 0 or (tiling and reached < n_voxels):
        raise TomatError(
            f"the model reads {length} tokens, of which the preamble of {grid.material_id or 'this material'} takes "
            f"{density_start}: {reached} of {n_voxels} voxels of a patch fit. Evaluate a model with a longer sequence"
            + (", or random patches instead of the whole cell." if tiling and reached else ".")
        )
    counted = np.zeros((len(anchors), n_voxels), dtype=bool)
    counted[:, :reached] = True
    # Of a random patch all is counted that it has not held before, which is what fits into a cell from its origin.
    counted &= inside_cell(anchors if tiling else np.zeros((1, 3)), grid.grid_shape, patch_shape)
    return EvaluationPatches(
        tokens=np.ascontiguousarray(rows[:, :length]),
        density_start=density_start,
        reference=np.stack([grid.patch(tuple(int(i) for i in anchor), patch_shape) for anchor in anchors]),
        true_bins=(rows[:, density_start : density_start + n_voxels] - DENSITY_START).astype(np.uint16),
        counted=counted,
        voxel_volume_a3=float(grid.voxel_volume_a3),
        crystal=Crystal.of(grid),
        grid_shape=grid.grid_shape,
        anchors=np.asarray(anchors),
    )


def check_codec(codec: DensityCodec) -> None:
    """Refuse what teacher-forced evaluation has no meaning for."""
    if codec.tokens_per_voxel != 1:
        raise TomatError(
            f"the codec has {codec.tokens_per_voxel} tokens a voxel; teacher-forced evaluation needs one, since the "
            "distribution over densities is that of a single token. Evaluate a model trained with a Lloyd-Max codec."
        )
    require_unit(codec, UNIT_E_PER_A3, "the reference density of the evaluation")
