"""A Lloyd-Max codec relative to the sum of atoms: one token a voxel, bins of the ratio of density to promolecule.

A density rho at a voxel where the promolecule is rho_0 has the value u = (rho + e) / (rho_0 + e), where e is the
codec's `offset_e_per_a3`. Two values differ in density by the voxel's scale: rho_b - rho_t = (rho_0 + e) (u_b - u_t).
So a table of values and one number per voxel give every density. Far from all atoms too, u = 1 is the promolecule.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import numpy as np

from tomat.base.errors import TomatError
from tomat.data.codec.base import UNIT_E_PER_A3, Decoder, DensityCodec, content_sha256
from tomat.data.codec.lloyd_max import TABLES, LloydMaxCodec
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule

OFFSET_E_PER_A3 = 0.01
"""Differences below it hardly count in NMAE. Without it, ratios of tails to almost zero would take half of the bins."""

UNIT_RATIO = "ratio_to_sum_of_atoms"
"""Unit of decoded values when the scales of their voxels are not at hand."""

_SCALES: "WeakKeyDictionary[DensityGrid, tuple[str, np.ndarray]]" = WeakKeyDictionary()
"""The last scale of each density in memory, since its count and each chunk of its rows ask for the same scale."""


@dataclass(frozen=True, eq=False)
class RelativeCodec(LloydMaxCodec):
    """Bins of the ratio u; made by `fit_codec` (`ratios.py`). `encode` and `decode` work on u, `cell_codec` on
    densities. Edges, medians, means and the fitted range are values of u. No bin is for u = 0, which no voxel has."""

    promolecule: Promolecule = field(kw_only=True)
    offset_e_per_a3: float = field(default=OFFSET_E_PER_A3, kw_only=True)

    kind: ClassVar[str] = "relative"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.unit != UNIT_E_PER_A3:
            raise TomatError(f"A relative codec has the unit {self.unit!r}; expected {UNIT_E_PER_A3}.")
        check_offset(self.offset_e_per_a3)
        if not self.medians[0] > 0 < self.means[0]:
            raise TomatError("A relative codec's first value is 0; expected ratios above 0.")

    def scale(self, crystal: Crystal, grid_shape: tuple[int, int, int]) -> np.ndarray:
        """Promolecule + offset on a grid, float32 [nx, ny, nz], e/Å³: how much 1 more in u adds to the density."""
        return scale_of(self.promolecule, self.offset_e_per_a3, crystal, grid_shape)

    @property
    def sha256(self) -> str:
        identity: dict[str, str | int | float] = {
            "kind": self.kind,
            "objective": self.objective,
            "offset_e_per_a3": self.offset_e_per_a3,
            "promolecule": self.promolecule.sha256,
        }
        return content_sha256(identity, {name: getattr(self, name) for name in TABLES})

    def to_dict(self) -> dict[str, Any]:
        more = {"offset_e_per_a3": self.offset_e_per_a3, "promolecule": json.loads(self.promolecule.to_text())}
        return super().to_dict() | more

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        if "promolecule" not in content:
            raise TomatError("it is relative to a sum of atoms, but contains none.")
        promolecule = Promolecule.from_text(json.dumps(content["promolecule"]), "the sum of atoms in it")
        plain = LloydMaxCodec.from_dict(content)
        values = {each.name: getattr(plain, each.name) for each in fields(plain)}
        return cls(**values, promolecule=promolecule, offset_e_per_a3=float(content["offset_e_per_a3"]))


def check_offset(offset_e_per_a3: float) -> None:
    if not 0 < offset_e_per_a3 < np.inf:
        raise TomatError(f"The offset of a relative codec is {offset_e_per_a3} e/Å³; expected a positive number.")


def scale_of(
    promolecule: Promolecule, offset_e_per_a3: float, crystal: Crystal, grid_shape: tuple[int, int, int]
) -> np.ndarray:
    """`RelativeCodec.scale`, before there is a codec."""
    return promolecule.density(crystal, grid_shape) + np.float32(offset_e_per_a3)


def grid_scale(promolecule: Promolecule, offset_e_per_a3: float, grid: DensityGrid) -> np.ndarray:
    """`scale_of` on the grid of a density, from its structure alone. The scale is kept as long as the density."""
    key = f"{promolecule.sha256} {offset_e_per_a3!r}"
    of, scale = _SCALES.get(grid, ("", None))
    if scale is None or of != key:
        scale = scale_of(promolecule, offset_e_per_a3, Crystal.of(grid), grid.grid_shape)
        _SCALES[grid] = key, scale
    return scale


def ratios(rho: np.ndarray, scale: np.ndarray, offset_e_per_a3: float) -> np.ndarray:
    """u of densities, e/Å³, at voxels of these scales: float32, the shape of both."""
    return (np.asarray(rho, np.float32) + np.float32(offset_e_per_a3)) / scale


def relative_to(codec: DensityCodec) -> Promolecule | None:
    return codec.promolecule if isinstance(codec, RelativeCodec) else None


def offset_of(codec: DensityCodec) -> float | None:
    return codec.offset_e_per_a3 if isinstance(codec, RelativeCodec) else None


def check_promolecule(codec: DensityCodec, promolecule: Promolecule | None, source: str) -> None:
    """Refuse a relative codec beside no promolecule or beside another than its own; errors name `source`."""
    own = relative_to(codec)
    if own is not None and (promolecule is None or promolecule.sha256 != own.sha256):
        found = "no promolecule" if promolecule is None else f"{promolecule.sha256[:12]}..."
        raise TomatError(
            f"{source} has a codec relative to the promolecule {own.sha256[:12]}..., but {found}. Use the promolecule "
            "that the codec was fitted with."
        )


@dataclass(frozen=True, eq=False)
class CellCodec:
    """A codec at the voxels of a cell, or of patches of one: densities in e/Å³ go in and come out."""

    codec: DensityCodec
    volume_a3: float
    """Volume of the cell, since some codecs have bins of density times volume."""
    scale: np.ndarray | None = None
    """Scale of a relative codec: float32, the shape of the densities, e/Å³."""

    def values(self, rho: np.ndarray) -> np.ndarray:
        """Densities as the quantity that the codec has bins of, float32."""
        offset = offset_of(self.codec)
        if offset is not None and self.scale is not None:
            return ratios(rho, self.scale, offset)
        return rho if self.codec.unit == UNIT_E_PER_A3 else (rho * np.float64(self.volume_a3)).astype(np.float32)

    def density(self, values: np.ndarray) -> np.ndarray:
        """Inverse of `values`, float32, also for means of values. A density below 0 becomes 0 in a relative codec."""
        offset = offset_of(self.codec)
        if offset is not None and self.scale is not None:
            return np.maximum(values * self.scale - np.float32(offset), np.float32(0))
        return values if self.codec.unit == UNIT_E_PER_A3 else (values / self.volume_a3).astype(np.float32)

    def encode(self, rho: np.ndarray) -> np.ndarray:
        return self.codec.encode(self.values(rho))

    def decode(self, ids: np.ndarray, decoder: Decoder = "median") -> np.ndarray:
        """The densities, float32, that ids stand for."""
        return self.density(self.codec.decode(ids, decoder))

    def rounded(self, rho: np.ndarray) -> np.ndarray:
        """Densities as the codec keeps them: encoded, then decoded with the medians."""
        return self.decode(self.encode(np.ascontiguousarray(rho, dtype=np.float32)))

    def at(self, voxels: np.ndarray | tuple[np.ndarray, ...]) -> Self:
        """This codec at some of the voxels, chosen by a mask or by indices of the array of densities."""
        return self if self.scale is None else replace(self, scale=self.scale[voxels])

    def patches(self, anchors: np.ndarray, patch_shape: Sequence[int]) -> Self:
        """This codec for patches [patch, px, py, pz], periodic, from the voxels `anchors`: int [patch, 3]."""
        if self.scale is None:
            return self
        return replace(self, scale=np.stack([wrapped(self.scale, anchor, patch_shape) for anchor in anchors]))


def cell_codec(codec: DensityCodec, grid: DensityGrid) -> CellCodec:
    """A codec at the voxels of a density. Reads only the structure and the grid."""
    if not isinstance(codec, RelativeCodec):
        return CellCodec(codec, grid.volume_a3)
    return CellCodec(codec, grid.volume_a3, grid_scale(codec.promolecule, codec.offset_e_per_a3, grid))


def wrapped(values: np.ndarray, anchor: np.ndarray, patch_shape: Sequence[int]) -> np.ndarray:
    """The box of voxels from `anchor` (inside the cell), wrapped; `values` is [nx, ny, nz, ...]."""
    ends = [int(start) + side for start, side in zip(anchor, patch_shape, strict=True)]
    if all(end <= length for end, length in zip(ends, values.shape, strict=False)):
        return values[tuple(slice(int(start), end) for start, end in zip(anchor, ends, strict=True))]
    steps = [np.arange(int(start), end) for start, end in zip(anchor, ends, strict=True)]
    return values[np.ix_(*(each % length for each, length in zip(steps, values.shape, strict=False)))]
