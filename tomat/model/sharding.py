"""Where the axes of an array lie on the mesh in force.

JAX knows the mesh but not the logical axes, haliax's thread-local mapping knows those; Levanter's attention looks both
up in the same way. Under the planner's abstract mesh these give the abstract mesh.
"""

from dataclasses import dataclass

from haliax.partitioning import physical_axis_name
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

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
    """The mesh in force, concrete or abstract; None where there is none."""
    mesh = mesh_in_force()
    return None if mesh is None or mesh.empty else mesh


def mesh_axes(mesh: Mesh | AbstractMesh, name: str) -> tuple[str, ...]:
    """The axes of `mesh`, of more than one device, over which the current mapping splits the logical axis `name`."""
    physical = physical_axis_name(name)
    if physical is None:
        return ()
    names = (physical,) if isinstance(physical, str) else tuple(physical)
    return tuple(axis for axis in names if mesh.shape.get(axis, 1) > 1)
