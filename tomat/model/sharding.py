"""Where the axes of an array lie on the mesh in force.

JAX knows the mesh but not the logical axes, which Haliax's thread-local mapping knows. Levanter's attention looks both
up in the same way. Under the planner's abstract mesh these functions give the abstract mesh.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from haliax import Axis, NamedArray
from haliax.partitioning import physical_axis_name, pspec_for_axis
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from tomat.base.errors import TomatError
from tomat.base.ports.haliax import mesh_in_force


@dataclass(frozen=True)
class Sharding:
    """How batch and positions are spread over a mesh; everything else is whole on every device."""

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    """Mesh axes over which the batch is split."""
    position: tuple[str, ...]

    def spec(self, rank: int) -> PartitionSpec:
        return PartitionSpec(self.batch or None, self.position or None, *(None,) * (rank - 2))


def current_mesh() -> Mesh | AbstractMesh | None:
    mesh = mesh_in_force()
    return None if mesh is None or mesh.empty else mesh


def mesh_axes(mesh: Mesh | AbstractMesh, name: str) -> tuple[str, ...]:
    """The axes of `mesh`, with more than one device, over which the current mapping splits the logical axis `name`."""
    physical = physical_axis_name(name)
    if physical is None:
        return ()
    names = (physical,) if isinstance(physical, str) else tuple(physical)
    return tuple(axis for axis in names if mesh.shape.get(axis, 1) > 1)


def on_mesh(function: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: PartitionSpec) -> Callable[..., Any]:
    """`function` of arrays in a `shard_map` over the mesh in scope; `function` itself where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function
    # Unchecked: a Pallas call does not say over which mesh axes its result varies.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def split_over(axes: tuple[Axis, ...]) -> tuple[str, ...] | None:
    """The mesh axes that split a (flattened) group of logical axes; None if there are none."""
    names: list[str] = []
    for entry in pspec_for_axis(axes):
        names += () if entry is None else (entry,) if isinstance(entry, str) else entry
    return tuple(names) or None


def flatten_group(array: NamedArray, axes: tuple[Axis, ...], name: str) -> NamedArray:
    """`array` with `axes` flattened into one axis `name`, or with a new leading axis of size 1 if `axes` is empty."""
    return array.flatten_axes(axes, name) if axes else array.broadcast_axis(Axis(name, 1))


def by_heads(
    q: NamedArray, k: NamedArray, v: NamedArray, kernel: str, *, positions_first: bool = False
) -> tuple[list[jax.Array], PartitionSpec, tuple[Axis, ...]]:
    """Queries, keys and values as kernels take them: q `[B, H, S, D]`, k and v `[B, key heads, S, D]`, or with
    positions before heads. Then how the mesh in scope splits them (empty if there is none), and the axes of the queries
    in that order. `kernel` is named where a mesh that splits positions is refused."""
    KvHead, Group, Pos, HeadSize = (
        q.resolve_axis(name) for name in ("kv_head", "q_heads_per_group", "position", "head_size")
    )
    KeyPos = k.resolve_axis("key_position")
    Batch = tuple(axis for axis in q.axes if axis not in (KvHead, Group, Pos, HeadSize))
    if any(entry is not None for entry in (*pspec_for_axis(Pos), *pspec_for_axis(KeyPos))):
        raise TomatError(f"the mesh splits `position`, which {kernel} cannot do; map it to no mesh axis.")

    def ordered(at: Axis, heads: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return (*Batch, at, *heads, HeadSize) if positions_first else (*Batch, *heads, at, HeadSize)

    arrays = []
    for each, at, heads in ((q, Pos, (KvHead, Group)), (k, KeyPos, (KvHead,)), (v, KeyPos, (KvHead,))):
        named = each.rearrange(ordered(at, heads))
        arrays.append(flatten_group(flatten_group(named, heads, "heads"), Batch, "batch").array)
    spec = PartitionSpec()
    if not jax.sharding.get_abstract_mesh().empty:
        batch, of_heads = split_over(Batch), split_over((KvHead,))
        spec = PartitionSpec(batch, None, of_heads) if positions_first else PartitionSpec(batch, of_heads)
    return arrays, spec, ordered(Pos, (KvHead, Group))
