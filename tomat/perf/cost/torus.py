"""The links of a TPU slice, who takes part in a collective, and which links its bytes cross."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from tomat.hardware.chips import Slice
from tomat.perf.profile.hlo import HloProgram

Link = tuple[tuple[int, ...], int, int]
"""A directed link: the chip it leaves, the axis, +1 or -1."""


def coordinates(device_id: int, slice_: Slice) -> tuple[int, ...]:
    """Place of a chip: ids count along the first axis first (`device.coords` of v6e:4x8 and v5p:2x2x2 topologies)."""
    place = []
    chip_id = device_id // slice_.chip.jax_devices_per_chip
    for side in slice_.topology:
        place.append(chip_id % side)
        chip_id //= side
    return tuple(place)


def route(source: Sequence[int], target: Sequence[int], slice_: Slice) -> list[Link]:
    """The links of the shortest way, one axis after the other, around the ring where that is shorter."""
    links: list[Link] = []
    here = list(source)
    for axis, side in enumerate(slice_.topology):
        distance = target[axis] - here[axis]
        if slice_.wrap[axis] and abs(distance) > side // 2:
            distance -= side if distance > 0 else -side
        step = 1 if distance > 0 else -1
        for _ in range(abs(distance)):
            links.append((tuple(here), axis, step))
            here[axis] = (here[axis] + step) % side
    return links


def link_loads(transfers: Iterable[tuple[Sequence[int], Sequence[int], float]], slice_: Slice) -> dict[Link, float]:
    """Bytes over each link when (source, target, bytes) all go their way at once."""
    loads: dict[Link, float] = defaultdict(float)
    for source, target, count in transfers:
        for link in route(source, target, slice_):
            loads[link] += count
    return loads


def spans(group: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Distinct places of a group along each axis."""
    return tuple(len(set(column)) for column in zip(*group, strict=True))


def entrances(group: Sequence[tuple[int, ...]], slice_: Slice) -> int:
    """Links over which the worst-placed chip of a group can receive: one an axis, two where the axis closes.

    A chip in the corner of an open mesh has one neighbour an axis, and no schedule can give it more. At least one: the
    members of a group that skips chips still reach each other.
    """
    links = 0
    for axis, span in enumerate(spans(group)):
        if span > 1:
            links += 2 if slice_.wrap[axis] and span == slice_.topology[axis] and span > 2 else 1
    return max(1, links)


def hops_across(group: Sequence[tuple[int, ...]], slice_: Slice) -> int:
    """Links between the two chips of a group farthest apart."""
    hops = 0
    for axis, span in enumerate(spans(group)):
        hops += span // 2 if slice_.wrap[axis] and span == slice_.topology[axis] else span - 1
    return hops


def participants(program: HloProgram, collective: Any) -> list[list[int]]:
    """The groups of partitions that a collective's `HloInstructionProto` names, in all of HLO's ways to name them."""
    device_list = collective.collective_device_list.replica_groups or collective.replica_groups
    if any(group.replica_ids for group in device_list):
        return [list(group.replica_ids) for group in device_list]
    iota = collective.iota_collective_device_list
    if iota.num_replica_groups:
        ids = np.arange(prod(iota.iota_reshape_dims)).reshape(list(iota.iota_reshape_dims))
        if iota.iota_transpose_perm:
            ids = ids.transpose(list(iota.iota_transpose_perm))
        return ids.reshape(iota.num_replica_groups, iota.num_devices_per_group).tolist()
    mesh_axes = collective.mesh_axes_replica_group_list
    if mesh_axes.mesh.axes:
        return _mesh_groups(mesh_axes)
    assignment = program.module.device_assignment
    return [list(range(max(1, assignment.computation_count * max(1, assignment.replica_count))))]


def _mesh_groups(mesh_axes: Any) -> list[list[int]]:
    """Groups along named axes of a device mesh, or along parts of an axis (`pre_size`, `size`)."""
    mesh = mesh_axes.mesh
    sizes = [axis.size for axis in mesh.axes]
    ids = np.array(mesh.device_ids) if mesh.device_ids else np.arange(prod(sizes))
    if mesh.iota_transform.reshape_dims:
        ids = ids.reshape(list(mesh.iota_transform.reshape_dims)).transpose(list(mesh.iota_transform.transpose_perm))
    cuts: dict[int, set[int]] = defaultdict(set)
    wanted = []
    for reference in mesh_axes.axes:
        size = sizes[reference.mesh_axis_index]
        sub = reference.sub_axis_info
        first = max(1, sub.pre_size) if sub.size else 1
        last = first * sub.size if sub.size else size
        cuts[reference.mesh_axis_index] |= {first, last}
        wanted.append((reference.mesh_axis_index, first, last))
    shape: list[int] = []
    chosen: list[int] = []
    for axis, size in enumerate(sizes):
        bounds = sorted({1, size} | cuts[axis])
        for low, high in zip(bounds, bounds[1:], strict=False):
            if any(axis == a and first <= low and high <= last for a, first, last in wanted):
                chosen.append(len(shape))
            shape.append(high // low)
    rest = [place for place in range(len(shape)) if place not in chosen]
    members = prod(shape[place] for place in chosen)
    return ids.reshape(shape).transpose(rest + chosen).reshape(-1, members).tolist()


def places(program: HloProgram, slice_: Slice) -> list[tuple[int, ...]]:
    """Place of each partition on the slice: by the program's device assignment, else in the order of the ids."""
    assigned = [c.replica_device_ids[0] for c in program.module.device_assignment.computation_devices]
    count = slice_.n_devices
    if len(assigned) < count or len(set(assigned)) < len(assigned):
        assigned = list(range(count))
    return [coordinates(device_id, slice_) for device_id in assigned]
