"""Which voxels of a held-out cell are evaluated: random patches, or a tiling that counts every voxel once.

A patch that is larger than the cell wraps round and repeats voxels. The model has then already read their density, so
the copies are not counted.

A patch carries its tokens (what the model reads) beside the **unquantised** reference density of the same voxels (what
the answer is compared with). So the codec's rounding is part of every figure, and is also reported alone as its floor.

A teacher-forced model reads the true neighbours of every voxel, so its error means little without the error of
baselines that read the same neighbours. Each baseline sees the same patch, in the same order (C order, z fastest): it
reads true values **as the codec decodes them** and its answer is **rounded to the codec**, as the model's answer is.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import UNIT_E_PER_A3, DensityCodec, require_unit
from tomat.data.codec.relative import CellCodec, cell_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import check_encodable, encode_rows
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START

if TYPE_CHECKING:  # baselines need no JAX
    from tomat.model.nearby_atoms import AtomsRead, PatchAtoms


@dataclass(frozen=True, eq=False)
class EvaluationPatches:
    tokens: np.ndarray
    """uint16 [patch, position]: the sequences, cut to what the model reads."""
    density_start: int
    """Position of the first density token. It is the same in every row, as the material sets the preamble's length."""
    reference: np.ndarray
    """float32 [patch, px, py, pz], e/Å³: the true density, not rounded to the codec."""
    true_bins: np.ndarray
    """uint16 [patch, voxel]: density ids of the patch in C order, also where `counted` is False."""
    counted: np.ndarray
    """bool [patch, voxel]: the voxels that every figure is computed over, for the model and the baselines alike."""
    voxel_volume_a3: float
    crystal: Crystal
    grid_shape: tuple[int, int, int]
    anchors: np.ndarray
    codec: CellCodec
    """The codec at the voxels of `reference`."""

    def atoms(self, environment: "AtomsRead") -> "list[PatchAtoms]":
        from tomat.model.nearby_atoms import Room, atoms_of_patch, filled

        x, y, z = self.reference.shape[1:]
        reach_a, room, name = environment.basis.cutoff_a, Room.of(environment), self.crystal.name
        near = (atoms_of_patch(self.crystal, each, self.grid_shape, (x, y, z), reach_a) for each in self.anchors)
        return [filled(*found, (x, y, z), room, name) for found in near]

    @property
    def n_patches(self) -> int:
        return self.tokens.shape[0]

    @property
    def n_voxels(self) -> int:
        return int(np.count_nonzero(self.counted))

    @property
    def visible(self) -> np.ndarray:
        """float32 [patch, px, py, pz], e/Å³: the true density, rounded as the tokens hold it."""
        return self.codec.decode(self.true_bins.reshape(self.reference.shape), decoder="median")


def random_anchors(material_id: str, grid_shape: Sequence[int], count: int, seed: int) -> np.ndarray:
    """`count` anchors of a material, int64 [count, 3], uniform over its voxels; without replacement if it has at least
    `count` voxels.

    The generator is Philox keyed by SHA-256 of seed and material. A material's patches are therefore the same on any
    machine and whatever else is evaluated, and unrelated to the anchors drawn for training.
    """
    digest = hashlib.sha256(f"evaluation anchors:{seed}:{material_id}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    voxels = prod(int(side) for side in grid_shape)
    flat = generator.choice(voxels, size=count, replace=count > voxels)
    return np.stack(np.unravel_index(flat, tuple(grid_shape)), axis=-1).astype(np.int64)


def inside_cell(anchors: np.ndarray, grid_shape: Sequence[int], patch_shape: Sequence[int]) -> np.ndarray:
    """bool [tile, voxel]: whether a voxel of a tile lies in the cell without wrapping round (C order)."""
    x, y, z = (anchors[:, axis, None] + np.arange(patch_shape[axis]) < grid_shape[axis] for axis in range(3))
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
    """Tokenise the patches of a material at anchors, int [patch, 3], and keep the true density of the same voxels.
    Voxels beyond `seq_len` (None: the layout's context) are not counted. A tiling counts each voxel once."""
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
    # A random patch counts each voxel once: only offsets within the patch that are below the cell's sides are counted.
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
        codec=cell_codec(codec, grid).patches(np.asarray(anchors) % grid.grid_shape, patch_shape),
    )


def check_codec(codec: DensityCodec) -> None:
    """Refuse a codec for which teacher-forced evaluation has no meaning."""
    if codec.tokens_per_voxel != 1:
        said = f"the codec has {codec.tokens_per_voxel} tokens a voxel; a teacher-forced evaluation needs one"
        raise TomatError(f"{said}, whose distribution is over densities. Evaluate a model with a Lloyd-Max codec.")
    require_unit(codec, UNIT_E_PER_A3, "the reference density of the evaluation")


def constant_median(patches: np.ndarray, constant_e_per_a3: float) -> np.ndarray:
    """The same density for every voxel. The median of the evaluated voxels is the constant of least absolute error."""
    return np.full(patches.shape, constant_e_per_a3, dtype=np.float32)


def copy_previous(patches: np.ndarray, constant_e_per_a3: float) -> np.ndarray:
    """The value of the voxel before, in C order inside the patch; the constant for the first voxel."""
    flat = patches.reshape(patches.shape[0], -1).astype(np.float32)
    return np.insert(flat[:, :-1], 0, constant_e_per_a3, axis=1).reshape(patches.shape)


def lorenzo(patches: np.ndarray, constant_e_per_a3: float) -> np.ndarray:
    """Lorenzo extrapolation from the 7 earlier corners of each voxel's unit cube (Ibarria et al., 2003).

    `f(x-1) + f(y-1) + f(z-1) - f(x-1,y-1) - f(x-1,z-1) - f(y-1,z-1) + f(x-1,y-1,z-1)`: exact wherever the mixed third
    difference vanishes. Terms outside the patch count as zero. On the three faces this leaves the planar rule, such as
    `f(y-1) + f(z-1) - f(y-1,z-1)`, and on the edges the previous voxel. Negative answers become zero.
    """
    padded = np.pad(patches.astype(np.float64), ((0, 0), (1, 0), (1, 0), (1, 0)))
    now, before = slice(1, None), slice(None, -1)
    predicted = (
        padded[:, before, now, now]
        + padded[:, now, before, now]
        + padded[:, now, now, before]
        - padded[:, before, before, now]
        - padded[:, before, now, before]
        - padded[:, now, before, before]
        + padded[:, before, before, before]
    )
    predicted[:, 0, 0, 0] = constant_e_per_a3
    return np.maximum(predicted, 0.0).astype(np.float32)


def predict_baselines(visible: np.ndarray, codec: CellCodec, constant_e_per_a3: float) -> dict[str, np.ndarray]:
    """Every baseline by name, rounded to the codec, from patches as the codec decodes them, [patch, px, py, pz]."""
    predictors = {"lorenzo": lorenzo, "copy_previous": copy_previous, "constant_median": constant_median}
    return {name: codec.rounded(predict(visible, constant_e_per_a3)) for name, predict in predictors.items()}
