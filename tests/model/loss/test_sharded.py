"""The loss on a mesh of two devices: the same values and gradients, and one reduction of the head's gradient."""

import re
from dataclasses import replace
from typing import Any

import haliax as hax
import jax
import numpy as np
import pytest
from haliax import NamedArray
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from loss_batches import START, assert_close, make_batch

from tomat.base.errors import TomatError
from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget
from tomat.model.tiles import LossTiles

TARGET = DensityTarget(24, np.geomspace(1e-3, 6.0, 24), START)
RELATIVE = replace(TARGET, offset_e_per_a3=0.01)
ARRAYS = make_batch(0, 4, 12, bins=24, width=8, ids=33)
MESH = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
XLA = LossConfig(kind="ce_emd", vocabulary="full", preamble_weight=0.5, block_positions=5)
PALLAS = replace(XLA, kernel="pallas", tiles=LossTiles(16, 16, 128, 16), interpret=True)


def step(config: LossConfig, target: DensityTarget = TARGET) -> Any:
    def loss(hidden, head, tokens):
        named = NamedArray(hidden, ("batch", "position", "embed")), NamedArray(head, ("vocab", "embed"))
        ids = NamedArray(tokens, ("batch", "position"))
        scale = None if target is TARGET else 0.1 + 0.01 * ids
        return density_loss(*named, ids, config=config, target=target, scale=scale)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


@pytest.mark.parametrize(
    ("config", "mapping", "spec", "head_spec", "target"),
    [
        pytest.param(XLA, {"batch": ("replica", "data")}, P("data"), P(None, "data"), TARGET, id="batch, head sharded"),
        pytest.param(XLA, {"position": "data"}, P(None, "data"), P(), RELATIVE, id="positions, relative codec"),
        pytest.param(PALLAS, {"position": "data"}, P(None, "data"), P(), TARGET, id="positions, in Pallas"),
    ],
)
def test_sharded_equals_unsharded(config, mapping, spec, head_spec, target):
    specs = (spec, head_spec, spec)
    arrays = [jax.device_put(x, NamedSharding(MESH, each)) for x, each in zip(ARRAYS, specs, strict=True)]
    with jax.set_mesh(MESH), hax.axis_mapping(mapping):
        found = step(config, target)(*arrays)
    for got, expected in zip(*map(jax.tree.leaves, (found, step(XLA, target)(*ARRAYS))), strict=True):
        assert_close(got, expected, 1e-5, str(mapping))


def reductions(text: str) -> tuple[int, int]:
    """All-reduces in the whole module, and in computations that a while loop reaches."""
    computations = dict(re.findall(r"^(?:ENTRY )?%?([\w.-]+) .*?\{\n(.*?)^\}", text, re.M | re.S))
    reached, todo = set(), re.findall(r"body=%?([\w.-]+)", text)
    assert todo, "the compiled loss has no loop"
    while todo:
        name = todo.pop()
        if name not in reached and name in computations:
            reached.add(name)
            todo += re.findall(r"(?:to_apply|calls|body|condition)=%?([\w.-]+)", computations[name])
    found = {name: len(re.findall(r"= .* all-reduce(?:-start)?\(", body)) for name, body in computations.items()}
    return sum(found.values()), sum(found[name] for name in reached)


def test_the_heads_gradient_is_reduced_once():
    specs = (P("data"), P(), P("data"))
    shapes = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, each))
        for x, each in zip(ARRAYS, specs, strict=True)
    ]
    lowered = step(config := LossConfig(block_positions=4))
    with jax.set_mesh(MESH):
        assert reductions(lowered.lower(*shapes).compile().as_text())[1] > 0, "the partitioner reduces in the loop"
        with hax.axis_mapping({"batch": "data"}):
            on_mesh = reductions(step(config).lower(*shapes).compile().as_text())
            with pytest.raises(TomatError, match="a batch of 3 does not divide over 2 devices .mesh axes data.; use a"):
                density_loss(ARRAYS[0][:3], ARRAYS[1], ARRAYS[2][:3], config=config, target=TARGET)
    assert on_mesh[0] >= 1 and on_mesh[1] == 0
    with jax.sharding.use_abstract_mesh(MESH.abstract_mesh), hax.axis_mapping({"batch": "data"}):
        assert reductions(step(config).lower(*shapes).compile().as_text()) == on_mesh
