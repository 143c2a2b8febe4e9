"""The exact structures of a set's materials, in one object beside its rows. For older sets, the structures in the rows:
their preambles round the lattice to 0.05 A and 0.2 degrees, which is too coarse to place atoms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tomat.base.checked_arrays import arrays_checksum, pack_arrays, unpack_arrays
from tomat.base.errors import TomatError
from tomat.base.reporting import counted, warn
from tomat.data.codec.base import DensityCodec
from tomat.data.density.crystal import Crystal
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.manifest import ShardManifest
from tomat.data.tokens.patch import ANGLE_STEP_DEGREES, LENGTH_STEP_A, decode_sequence


@dataclass(frozen=True, eq=False)
class Structures:
    lattices: np.ndarray
    """float64 [materials, 3, 3], rows a, b, c in A."""
    atom_ends: np.ndarray
    """int64 [materials]: one past the last atom of each material."""
    atomic_numbers: np.ndarray
    """uint8 [atoms]."""
    frac_coords: np.ndarray
    """float64 [atoms, 3]."""
    names: Sequence[str] = ()

    @classmethod
    def of(cls, crystals: Iterable[Crystal]) -> Structures:
        parts = list(crystals)
        return cls(
            np.array([each.lattice for each in parts], np.float64).reshape(-1, 3, 3),
            np.cumsum([len(each.atomic_numbers) for each in parts], dtype=np.int64),
            np.concatenate([np.empty(0, np.uint8), *(each.atomic_numbers.astype(np.uint8) for each in parts)]),
            np.concatenate([np.empty((0, 3)), *(each.frac_coords for each in parts)]),
        )

    def __len__(self) -> int:
        return len(self.lattices)

    def __iter__(self) -> Iterator[Crystal]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Crystal:
        index = range(len(self))[index]
        atoms = slice(int(self.atom_ends[index - 1]) if index else 0, int(self.atom_ends[index]))
        name = self.names[index] if self.names else ""
        return Crystal(self.lattices[index], self.atomic_numbers[atoms], self.frac_coords[atoms], name)

    @property
    def _arrays(self) -> dict[str, np.ndarray]:
        return {key: getattr(self, key) for key in ("lattices", "atom_ends", "atomic_numbers", "frac_coords")}

    @cached_property
    def sha256(self) -> str:
        """Hash of the structures; names do not count."""
        return arrays_checksum(self._arrays)

    def to_bytes(self) -> bytes:
        """The content of an `.npz` file with a checksum, the same bytes for the same structures."""
        return pack_arrays(self._arrays)

    @classmethod
    def from_bytes(cls, content: bytes, source: str, names: Sequence[str], remedy: str) -> Structures:
        arrays = unpack_arrays(content, source, "the structures of materials", remedy)
        try:
            found = cls(**arrays, names=names)
        except TypeError as error:
            raise TomatError(f"{source} is not the structures of materials ({error}). {remedy}") from error
        if len(found) != len(names):
            held = f"the structures of {counted(len(found), 'material')}"
            raise TomatError(f"{source} has {held}, expected {len(names):,}. {remedy}")
        return found


class PreambleStructures:
    """The structures of a set without exact ones: read from the first row of each material, and rounded."""

    def __init__(
        self, url: str, manifest: ShardManifest, codec: DensityCodec, read_rows: Callable[[int, int], np.ndarray]
    ) -> None:
        self.manifest, self.codec, self.read_rows = manifest, codec, read_rows
        self._read: dict[int, Crystal] = {}
        warn(
            f"{url} has no exact structures (an earlier version wrote it, or it was imported). They are read "
            f"from its rows, which round the lattice to {LENGTH_STEP_A} A and {ANGLE_STEP_DEGREES} degrees: atoms are "
            "off by some hundredths of an angstrom. Tokenize the densities again to have them."
        )

    def __len__(self) -> int:
        return len(self.manifest.materials)

    def __iter__(self) -> Iterator[Crystal]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Crystal:
        """The rounded structure; refused for an imported set in version 3 of the layout, whose rows place the atoms
        relative to patches that are not known (`crystal_of_row` reads them as they are)."""
        index = range(len(self))[index]
        if index not in self._read:
            material, layout = self.manifest.materials[index], self.manifest.layout
            shift = np.zeros(3)
            if layout.version == "v3":
                shift = self.manifest.anchors(material)[0] / np.array(material.grid_shape)
            row = self.read_rows(material.row_start, material.row_start + 1)[0]
            found = crystal_of_row(row, layout, self.codec, material.material_id)
            coords = (found.frac_coords + shift) % 1.0
            self._read[index] = Crystal(found.lattice, found.atomic_numbers, coords, found.name)
        return self._read[index]


def crystal_of_row(ids: np.ndarray, layout: SequenceLayout, codec: DensityCodec, name: str = "") -> Crystal:
    """The structure in a row's preamble, its lattice rounded to 0.05 A and 0.2 degrees. Its origin is the patch's first
    voxel in version 3, and the cell's origin in version 2. `ids`: integers [context]."""
    read = decode_sequence(ids, layout, codec)
    a, b, c = read.lattice_parameters[:3]
    cos_alpha, cos_beta, cos_gamma = np.cos(np.radians(read.lattice_parameters[3:]))
    sin_gamma = float(np.sqrt(1 - cos_gamma**2))
    # a along x and b in the plane of x and y (International Tables for Crystallography B, 3.3.1); a cell that rounding
    # made flat is refused by `Crystal`.
    y = (cos_alpha - cos_beta * cos_gamma) / sin_gamma
    z = np.sqrt(max(0.0, 1 - cos_beta**2 - y**2))
    lattice = np.array([[a, 0, 0], [b * cos_gamma, b * sin_gamma, 0], [c * cos_beta, c * y, c * z]])
    return Crystal(lattice, read.atomic_numbers, read.frac_coords, name)
