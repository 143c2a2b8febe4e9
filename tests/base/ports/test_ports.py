"""Each private name of a dependency does what tomat takes it for, in the version that its module was written for.

Of another version, look again at what the module touches. More is held by `tests/train/test_checkpointer.py` (order of
checksums and callback, when Levanter saves), `tests/train/test_dispatch.py` (its compiled step gives its own numbers),
`tests/perf/plan/compile/test_lowering.py` (the step lowered is the step trained) and `tests/perf/cost/data` (libtpu's
dumps).
"""

import importlib.metadata

import haliax.nn as hnn
import jax
import jax.numpy as jnp
import pytest
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh
from levanter.metrics import Metric, ReductionType, unwrap_metrics

from tomat.base.ports import haliax, jaxlib, levanter, libtpu
from tomat.base.ports import jax as jax_port

PORTS = {"marin-haliax": haliax, "jax": jax_port, "jaxlib": jaxlib, "marin-levanter": levanter, "libtpu": libtpu}
HLO_TEXT = "HloModule m\n\nENTRY e {\n  ROOT a = f32[4]{0} parameter(0)\n}\n"


@pytest.mark.parametrize("package", PORTS)
def test_the_version_is_the_one_that_this_was_written_for(package):
    if package == "libtpu":
        pytest.importorskip(package)
    assert importlib.metadata.version(package) == PORTS[package].VERSION


def test_haliax_has_the_mesh_in_force_and_an_embedding_its_parts():
    mesh = Mesh(jax.devices()[:1], ("data",))
    with set_mesh(mesh):
        found = haliax.mesh_in_force()
    assert found is not None and found.shape == mesh.shape
    made = hnn.Embedding.init(Axis("vocab", 4), Axis("embed", 2), key=jax.random.PRNGKey(0))
    again = hnn.Embedding(made.weight, made.Vocab, made.Embed, haliax.reparametrisation(made))
    assert again.reparam.active_scale == made.reparam.active_scale


def test_kinds_of_cluster_say_whether_they_are_here():
    kinds = jax_port.kinds_of_cluster()
    assert len(kinds) > 3
    assert all(isinstance(kind.is_env_present(), bool) and isinstance(kind.opt_in_only_method, bool) for kind in kinds)


def test_hlo_text_becomes_a_module_or_a_reason():
    done = jaxlib.parse_hlo_text(HLO_TEXT, 60.0)
    assert done.returncode == 0 and b"parameter" in done.stdout
    done = jaxlib.parse_hlo_text(HLO_TEXT.replace("parameter", "nothing"), 60.0)
    assert done.returncode == 1 and done.stderr


def test_a_weighted_mean_is_the_sum_over_its_weight():
    mean = levanter.weighted_mean(jnp.float32(3.0), jnp.float32(0.5))
    assert unwrap_metrics({"mean": mean})["mean"] == 6.0
    assert levanter.value_of(Metric.from_value(jnp.float32(2.0), ReductionType.MEAN)) == 2.0
