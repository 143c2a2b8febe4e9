"""Private names of Haliax: of another version, look again at what `base/ports/haliax.py` touches."""

import importlib.metadata

import haliax.nn as hnn
import jax
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh

from tomat.base.ports.haliax import VERSION, mesh_in_force, reparametrisation


def test_the_version_is_the_one_that_this_was_written_for():
    assert importlib.metadata.version("marin-haliax") == VERSION


def test_the_mesh_in_force_is_the_one_that_was_set():
    mesh = Mesh(jax.devices()[:1], ("data",))
    with set_mesh(mesh):
        found = mesh_in_force()
    assert found is not None and found.shape == mesh.shape


def test_an_embedding_is_made_anew_of_its_parts():
    made = hnn.Embedding.init(Axis("vocab", 4), Axis("embed", 2), key=jax.random.PRNGKey(0))
    again = hnn.Embedding(made.weight, made.Vocab, made.Embed, reparametrisation(made))
    assert again.reparam.active_scale == made.reparam.active_scale
