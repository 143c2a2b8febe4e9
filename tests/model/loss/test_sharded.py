"""The loss on a mesh: the same values and gradients, and one reduction of the head's gradient.

The process that runs the tests has one device, and the number is fixed once JAX starts; so these run in a process of
their own with four.
"""

import json
import subprocess
import sys
import textwrap

SCRIPT = """
import json
import re
from dataclasses import replace
from functools import partial

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 4)

from tomat.base.errors import TomatError
from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget
from tomat.model.tiles import LossTiles

START, K, V, E, B, T = 7, 24, 33, 8, 4, 12
TARGET = DensityTarget(K, np.geomspace(1e-3, 6.0, K), START)
BATCH, POSITION, EMBED, VOCAB = Axis("batch", B), Axis("position", T), Axis("embed", E), Axis("vocab", V)

rng = np.random.default_rng(0)
tokens = rng.integers(START, START + K, (B, T)).astype(np.int32)
tokens[:, :3] = 2
tokens[1, 7:] = 0
tokens[2, 9:] = 0
hidden = rng.normal(size=(B, T, E)).astype(np.float32)
head = rng.normal(size=(V, E)).astype(np.float32)


def loss(config, hidden, head, tokens):
    named = NamedArray(hidden, ("batch", "position", "embed")), NamedArray(head, ("vocab", "embed"))
    return density_loss(*named, NamedArray(tokens, ("batch", "position")), config=config, target=TARGET)


def step(config):
    differentiated = jax.value_and_grad(partial(loss, config), argnums=(0, 1), has_aux=True)
    return jax.jit(differentiated, compiler_options={"xla_backend_optimization_level": "0"})


def reductions(text):
    \"\"\"All-reduces in the whole module, and in computations that a while loop reaches.\"\"\"
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\\w.-]+) .*?\\{\\n(.*?)^\\}", text, re.M | re.S))
    reached, todo = set(), re.findall(r"body=%?([\\w.-]+)", text)
    assert todo, "the compiled loss has no loop"
    while todo:
        name = todo.pop()
        if name not in reached and name in computations:
            reached.add(name)
            todo += re.findall(r"(?:to_apply|calls|body|condition)=%?([\\w.-]+)", computations[name])
    find = lambda body: len(re.findall(r"= .* all-reduce(?:-start)?\\(", body))
    return sum(map(find, computations.values())), sum(find(computations[name]) for name in reached)


def error(got, expected):
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max()) for a, b in leaves)


report = {"errors": {}}
cases = {
    "batch over 4": ((4,), ("data",), {"batch": ("replica", "data")}, P("data"), P()),
    "batch over 2 x 2, head sharded over embed": (
        (2, 2), ("replica", "data"), {"batch": ("replica", "data")}, P(("replica", "data")), P(None, "data")
    ),
    "batch over 2, positions over 2": (
        (2, 2), ("data", "context"), {"batch": "data", "position": "context"}, P("data", "context"), P()
    ),
    "batch over 2, model axis idle": ((2, 2), ("data", "model"), {"batch": "data", "heads": "model"}, P("data"), P()),
}
xla = LossConfig(kind="ce_emd", vocabulary="full", preamble_weight=0.5, block_positions=5)
pallas = replace(xla, kernel="pallas", tiles=LossTiles(16, 16, 128, 16), interpret=True)
alone = step(xla)(hidden, head, tokens)
for name, (shape, names, mapping, spec, head_spec) in cases.items():
    mesh = jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(shape))
    arrays = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((hidden, spec), (head, head_spec), (tokens, spec))
    ]
    with jax.set_mesh(mesh), hax.axis_mapping(mapping):
        report["errors"][name] = error(step(xla)(*arrays), alone)
        if "positions" in name:
            report["errors"][f"{name}, in Pallas"] = error(step(pallas)(*arrays), alone)

mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
    for x, s in ((hidden, P("data")), (head, P()), (tokens, P("data")))
]
config = LossConfig(block_positions=4)
with jax.set_mesh(mesh):
    report["left to the partitioner"] = reductions(step(config).lower(*shapes).compile().as_text())
    with hax.axis_mapping({"batch": "data"}):
        report["on the mesh"] = reductions(step(config).lower(*shapes).compile().as_text())
        try:
            density_loss(hidden[:3], head, tokens[:3], config=config, target=TARGET)
        except TomatError as refusal:
            report["refusal"] = str(refusal)
with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping({"batch": "data"}):
    report["abstract mesh"] = reductions(step(config).lower(*shapes).compile().as_text())
print(json.dumps(report))
"""


def test_sharded_equals_unsharded_and_the_heads_gradient_is_reduced_once():
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert len(report["errors"]) == 5
    assert max(report["errors"].values()) < 1e-5, report["errors"]
    in_all, in_loops = report["on the mesh"]
    assert in_loops == 0 and in_all >= 1
    assert report["left to the partitioner"][1] > 0, "the CPU's partitioner no longer reduces in the loop"
    assert report["abstract mesh"] == report["on the mesh"]
    assert report["refusal"] == "a batch of 3 does not divide over 4 devices (mesh axes data); use a multiple of 4."
