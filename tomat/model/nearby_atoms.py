"""The atoms near the voxels of a row, with periodic images, in arrays of the same size for every row. The loader and
predictions make them on the host; models read them.

Rows are patches, or voxels scattered over a cell.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, Self

import equinox as eqx
import jax
import numpy as np
from haliax import Axis, NamedArray

from tomat.base.errors import TomatError
from tomat.data.density.promolecule import RadialBasis

if TYPE_CHECKING:
    from tomat.data.density.crystal import Crystal


class AtomsRead(Protocol):
    """What a configuration says of the atoms that a model reads: `EnvironmentConfig`, or that of a field model."""

    @property
    def basis(self) -> RadialBasis: ...
    @property
    def max_atoms(self) -> int: ...
    @property
    def max_elements(self) -> int: ...


GROUP_POSITIONS = 32
"""Positions of a row of scattered voxels that share the atoms near them. A small dense cell has up to 380 atoms near
it, of which a voxel has 92 within 5 A at most; 32 of 512 voxels that lie together have 151."""


class NearbyAtoms(eqx.Module):
    """The atoms near the voxels of each row of a batch; without `batch` those of one row."""

    positions: NamedArray
    """float32 [atom, xyz]: from the row's origin, A; for scattered voxels [group, atom, xyz]."""
    numbers: NamedArray
    """int32 [atom], or [group, atom]: Z; 0: no atom."""
    kinds: NamedArray
    """int32 [kind]: Z of each element among them, once; 0: none."""

    @classmethod
    def of(cls, arrays: Mapping[str, Any], *before: Axis) -> Self:
        """From arrays by field, or from their shapes; `before` are the axes before those of one row."""
        named = {}
        for each in fields(cls):
            _, *names = cls._fields()[each.name]
            sizes = arrays[each.name].shape[len(before) :]
            named[each.name] = NamedArray(arrays[each.name], (*before, *map(Axis, names, sizes)))
        return cls(**named)

    @classmethod
    def _fields(cls) -> Mapping[str, tuple[Any, ...]]:
        return _FIELDS


class PatchAtoms(NearbyAtoms):
    """The atoms near a patch, whose first voxel is the origin, and the places of its voxels."""

    steps: NamedArray
    """float32 [side, xyz]: from a voxel to the next along each side, A."""
    shape: NamedArray
    """int32 [side]: voxels of the patch."""


class ScatteredAtoms(NearbyAtoms):
    """The atoms near groups of `GROUP_POSITIONS` voxels of a row of the `scattered` layout, and the voxels' places; the
    origin is the centre of the cell."""

    places: NamedArray
    """float32 [position, xyz], A: place of the voxel whose density is the token at the same position; 0 where that is
    PAD. It is counted from the cell's centre, so that in a cell of 100 A a place is rounded by 4e-6 A at most."""
    mean_density: NamedArray
    """float32 []: electrons of the cell over its volume, e/Å³."""

    @classmethod
    def _fields(cls) -> Mapping[str, tuple[Any, ...]]:
        grouped = {name: (dtype, "group", *axes) for name, (dtype, *axes) in _FIELDS.items() if "atom" in axes}
        return {**_FIELDS, **grouped}


_FIELDS: Mapping[str, tuple[Any, ...]] = {
    "positions": (np.float32, "atom", "xyz"),
    "numbers": (np.int32, "atom"),
    "kinds": (np.int32, "kind"),
    "steps": (np.float32, "side", "xyz"),
    "shape": (np.int32, "side"),
    "places": (np.float32, "position", "xyz"),
    "mean_density": (np.float32,),
}
"""Type and axes of each field."""


def atoms_of_patch(
    crystal: "Crystal",
    anchor: np.ndarray,
    grid_shape: tuple[int, int, int],
    patch_shape: tuple[int, int, int],
    reach_a: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The atoms within `reach_a` of a patch whose first voxel is `anchor`: atomic numbers int64 [n], and positions
    float64 [n, 3] from that voxel in A. Also the steps from voxel to voxel along each side, float64 [3, 3] in A."""
    steps = crystal.lattice / np.array(grid_shape)[:, None]
    edges = steps * (np.array(patch_shape) - 1)[:, None]
    numbers, positions = crystal.near_box(np.asarray(anchor) @ steps, edges, reach_a)
    return numbers, positions, steps


def atoms_of_cell(crystal: "Crystal", reach_a: float) -> tuple[np.ndarray, np.ndarray]:
    """The atoms within `reach_a` of any point of the cell, periodic images too, and few others: atomic numbers int64
    [n], and positions float64 [n, 3] from the cell's centre in A, nearest first."""
    lattice = crystal.lattice
    numbers, positions = crystal.near_box(np.zeros(3), lattice, reach_a)
    positions = positions - lattice.sum(axis=0) / 2
    inverse = np.linalg.inv(lattice)
    # `near_box` takes the sphere around the cell, which for a slab holds several times the atoms. Atoms too far from
    # both faces across an axis are left out: along it fractions grow by |column of the inverse| an angstrom at most.
    most = 0.5 + reach_a * np.linalg.norm(inverse, axis=0)
    near = (np.abs(positions @ inverse) < most).all(axis=1)
    return numbers[near], positions[near]


def spatial_order(places: np.ndarray) -> np.ndarray:
    """An order of places, float [n, 3], in which each `GROUP_POSITIONS` in a row lie together, int64 [n]. The places
    are halved along the widest side, again and again."""

    def halved(index: np.ndarray) -> list[np.ndarray]:
        groups = -(-len(index) // GROUP_POSITIONS)
        if groups < 2:
            return [index]
        along = places[index][:, np.ptp(places[index], axis=0).argmax()]
        middle = groups // 2 * GROUP_POSITIONS
        parts = np.argpartition(along, middle)
        return halved(index[parts[:middle]]) + halved(index[parts[middle:]])

    return np.concatenate(halved(np.arange(len(places))))


def near_groups(positions: np.ndarray, places: np.ndarray, reach_a: float) -> Iterator[np.ndarray]:
    """For each group of places in turn, which atoms at `positions`, float [n, 3], are within `reach_a`: int [m]."""
    for start in range(0, len(places), GROUP_POSITIONS):
        of_group = places[start : start + GROUP_POSITIONS]
        centre = (of_group.min(axis=0) + of_group.max(axis=0)) / 2
        radius_a = reach_a + np.linalg.norm(of_group - centre, axis=1).max()
        near = np.flatnonzero(((positions - centre) ** 2).sum(axis=1) < radius_a**2)
        squared = ((positions[near, None] - of_group) ** 2).sum(axis=2).min(axis=1)
        yield near[squared < reach_a**2]


def places_in_cell(crystal: "Crystal", grid_shape: tuple[int, int, int], voxels: np.ndarray) -> np.ndarray:
    """Places, float32 [n, 3] in A from the cell's centre, of voxels int64 [n] of its flat grid in C order; 0 for -1."""
    index = np.stack(np.unravel_index(np.maximum(voxels, 0), grid_shape), axis=-1)
    places = (index / np.array(grid_shape) - 0.5) @ crystal.lattice
    return np.where(voxels[:, None] < 0, 0.0, places).astype(np.float32)


@dataclass(frozen=True)
class Room:
    """How many atoms and elements near its voxels a row has room for."""

    atoms: int
    elements: int

    @staticmethod
    def of(config: AtomsRead) -> "Room":
        return Room(config.max_atoms, config.max_elements)

    def enlarged(self, numbers: Iterable[np.ndarray]) -> "Room":
        """A room for rows with these atomic numbers too; no weight of a model depends on either count."""
        atoms, elements = self.atoms, self.elements
        for each in numbers:
            atoms, elements = max(atoms, -(-len(each) // 16) * 16), max(elements, len(np.unique(each)))
        return Room(atoms, elements)

    def shapes(self, of: type[NearbyAtoms] = PatchAtoms, positions: int = 0) -> dict[str, tuple[Any, ...]]:
        """Type and sizes of each array of a row, by the fields of `of`; `positions` counts the scattered voxels."""
        groups = -(-positions // GROUP_POSITIONS)
        sizes = {"atom": self.atoms, "kind": self.elements, "xyz": 3, "side": 3, "position": positions, "group": groups}
        types = {each.name: of._fields()[each.name] for each in fields(of)}
        return {key: (dtype, *(sizes[name] for name in names)) for key, (dtype, *names) in types.items()}


def filled(
    numbers: np.ndarray,
    positions: np.ndarray,
    steps: np.ndarray,
    patch_shape: tuple[int, int, int],
    room: Room,
    name: str,
) -> PatchAtoms:
    """One patch's atoms in arrays of the sizes of `room`, on the host."""
    _check_room(numbers, room, f"a patch of {name} of {prod(patch_shape):,} voxels")
    n, kinds = len(numbers), np.unique(numbers)
    arrays = {key: np.zeros(sizes, dtype) for key, (dtype, *sizes) in room.shapes().items()}
    arrays["positions"][:n] = positions
    arrays["numbers"][:n] = numbers
    arrays["kinds"][: len(kinds)] = kinds
    arrays["steps"][:] = steps
    arrays["shape"][:] = patch_shape
    return PatchAtoms.of(arrays)


def filled_cell(
    numbers: np.ndarray,
    positions: np.ndarray,
    places: np.ndarray,
    mean_density_e_per_a3: float,
    room: Room,
    reach_a: float,
    name: str,
) -> ScatteredAtoms:
    """The same for a row of scattered voxels: those of `atoms_of_cell` within `reach_a` of each group of `places`,
    which are in `spatial_order`."""
    arrays = {key: np.zeros(sizes, dtype) for key, (dtype, *sizes) in room.shapes(ScatteredAtoms, len(places)).items()}
    for group, near in enumerate(near_groups(positions, places, reach_a)):
        _check_room(numbers[near], room, f"{GROUP_POSITIONS} voxels of {name} that lie together", "have")
        arrays["positions"][group, : len(near)] = positions[near]
        arrays["numbers"][group, : len(near)] = numbers[near]
    kinds = np.unique(numbers)
    # No group of voxels may be near them all, but there is one list for the cell.
    _check_room(kinds, Room(len(kinds), room.elements), f"the cell of {name}")
    arrays["kinds"][: len(kinds)] = kinds
    arrays["places"][:] = places
    arrays["mean_density"][...] = mean_density_e_per_a3
    return ScatteredAtoms.of(arrays)


def _check_room(numbers: np.ndarray, room: Room, what: str, has: str = "has") -> None:
    """Refuse a row with more atoms or elements near it than there is room for."""
    n, kinds = len(numbers), np.unique(numbers)
    for knob, near, most, needed in (
        ("max_atoms", f"{n} atoms", room.atoms, -(-n // 16) * 16 if n > room.atoms else 0),
        ("max_elements", f"{len(kinds)} elements", room.elements, len(kinds)),
    ):
        if needed > most:
            it = "it" if has == "has" else "them"
            said = f"{what} {has} {near} near {it} and the model's {knob}"
            raise TomatError(f"{said} is {most}; set it to {needed} or more.")


def stacked_atoms(rows: Sequence[NearbyAtoms]) -> dict[str, np.ndarray]:
    """The atoms of many rows of one kind, stacked, by the names of their fields."""
    names = [each.name for each in fields(rows[0])]
    return {name: np.stack([np.asarray(getattr(row, name).array) for row in rows]) for name in names}


def named_atoms(batch: Mapping[str, jax.Array | np.ndarray]) -> PatchAtoms | ScatteredAtoms | None:
    """What `stacked_atoms` made, with named axes; None where there are no atoms."""
    if "positions" not in batch:
        return None
    kind = ScatteredAtoms if "places" in batch else PatchAtoms
    return kind.of(batch, Axis("batch", len(batch["numbers"])))
