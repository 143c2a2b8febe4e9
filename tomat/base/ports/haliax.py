"""Private names of Haliax (`marin-haliax`), which has no public ones for these."""

from typing import Any

import haliax.nn as hnn
from haliax.partitioning import _get_mesh
from jax.sharding import AbstractMesh, Mesh

VERSION = "0.2.227.dev40316220070"


def mesh_in_force() -> Mesh | AbstractMesh | None:
    """The mesh in force, concrete or abstract; public functions give only the axes' mapping."""
    return _get_mesh()


def reparametrisation(embedding: hnn.Embedding) -> Any:
    """The reparametrisation of an embedding. A subclass of it is made with the same, and no property gives it."""
    return embedding._reparam_cls
