"""The embedding's rows are what Haliax gathers; their gradient is a float32 sum, rounded once, on any mesh."""

import json
import os
from functools import partial

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import Forked
from haliax import Axis
from haliax.partitioning import set_mesh
from jax.sharding import Mesh
from levanter.models.gpt2 import Gpt2Config
from levanter.models.qwen import Qwen3Config

from tomat.hardware.chips import slice_named
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.embedding import Float32SumEmbedding, embedding_rows, with_float32_sums
from tomat.perf.plan.compile.topology import child_environment

VOCAB, EMBED, BATCH, POSITION = Axis("vocab", 33), Axis("embed", 8), Axis("batch", 4), Axis("position", 600)


def arrays(dtype):
    """A table, ids of which one is frequent, and what the rows are weighted with in the loss."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, VOCAB.size - 1, (BATCH.size, POSITION.size))
    ids[rng.random(ids.shape) < 0.6] = 5
    weights = rng.normal(1.0, 0.5, (BATCH.size, POSITION.size, EMBED.size))
    table = hax.named(jnp.asarray(rng.normal(size=(VOCAB.size, EMBED.size)), dtype), (VOCAB, EMBED))
    return table, hax.named(jnp.asarray(ids, jnp.int32), (BATCH, POSITION)), hax.named(
        jnp.asarray(weights, dtype), (BATCH, POSITION, EMBED)
    )  # fmt: skip


def gradient(table, ids, weights):
    def loss(table):
        rows = embedding_rows(hax.shard(table), hax.shard(ids))
        return (rows * hax.shard(weights)).astype(jnp.float32).sum().scalar()

    return hax.named_jit(eqx.filter_grad(loss))(table)


def expected(ids, weights) -> np.ndarray:
    sums = np.zeros((VOCAB.size, EMBED.size))
    np.add.at(sums, np.asarray(ids.array), np.asarray(weights.array, np.float64))
    return sums


@pytest.mark.parametrize(
    ("dtype", "mapping", "embed_first"),
    [
        (jnp.bfloat16, None, False),
        (jnp.float32, None, True),
        (jnp.bfloat16, {"batch": "data"}, True),
        (jnp.float32, {"position": "data"}, False),
        (jnp.bfloat16, {"batch": "data", "embed": None}, False),
    ],
)
def test_the_gradient_is_rounded_once(dtype, mapping, embed_first):
    table, ids, weights = arrays(dtype)
    if embed_first:
        table = table.rearrange((EMBED, VOCAB))
    if mapping is None:
        found = gradient(table, ids, weights)
    else:
        with set_mesh(Mesh(np.array(jax.devices()[:2]), ("data",))), hax.axis_mapping(mapping):
            found = gradient(table, ids, weights)
    assert found.axes == table.axes and found.dtype == dtype
    found = np.asarray(found.rearrange((VOCAB, EMBED)).array, np.float64)
    # The terms are bfloat16 numbers and the sum is float32; half a unit in the last place of the type comes on top.
    np.testing.assert_allclose(
        found, expected(ids, weights), rtol=2.0**-8 if dtype == jnp.bfloat16 else 2e-6, atol=1e-4
    )


def test_the_rows_are_haliaxs():
    table, ids, _ = arrays(jnp.bfloat16)
    np.testing.assert_array_equal(embedding_rows(table, ids).array, table.take(VOCAB, ids).array)
    one = hax.named(jnp.asarray(7, jnp.int32), ())
    np.testing.assert_array_equal(embedding_rows(table, one).array, table.array[7])


TINY = dict(max_seq_len=8, hidden_dim=8, num_layers=1, num_heads=2)


@pytest.mark.parametrize(
    "config",
    [DensityDecoderConfig(**TINY, num_kv_heads=2), Qwen3Config(**TINY, num_kv_heads=2), Gpt2Config(**TINY)],
    ids=lambda config: type(config).__name__,
)
def test_every_decoder_gets_it_and_keeps_its_parameters_names(config):
    model = eqx.filter_eval_shape(partial(config.build, VOCAB), key=jax.random.PRNGKey(0))
    changed = with_float32_sums(model)
    leaves = jax.tree.leaves(changed, is_leaf=lambda leaf: isinstance(leaf, hnn.Embedding))
    assert {type(leaf) for leaf in leaves if isinstance(leaf, hnn.Embedding)} == {Float32SumEmbedding}
    before, after = (
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(each)]
        for each in (model, changed)
    )
    assert before == after and type(changed) is type(model)


COMPILES = """
import json
import re
import sys

import jax

from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile.lowering import lower_step, stand_in_table
from tomat.perf.plan.compile.topology import slice_mesh, topology_devices
from tomat.train.settings.config import load_config

slice_ = slice_named("v6e-4")
jax.config.update("jax_num_cpu_devices", slice_.n_devices)
WORDS = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "64",
    "--trainer.mp", "compute=bfloat16,params=float32,output=bfloat16", "--model.attn_backend", "vanilla",
    "--model.num_layers", "1", "--model.hidden_dim", "256", "--model.intermediate_dim", "128", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--model.head_dim", "64", "--data.seq_len", "256", "--loss.block_positions", "128",
    "--loss.vocabulary", "full", "--loss.kind", "cross_entropy", "--trainer.train_batch_size", "8",
]
config = load_config(None, [*WORDS, "--sharding", "zero1"])
mesh = slice_mesh(config, topology_devices(slice_))
text = lower_step(config, mesh, stand_in_table(config)).compile().as_text()
# By the type of what adds: libtpu lets an all-reduce of float32 give its rounded result at once.
adding = dict(re.findall(r"^(%[\\w.-]+) \\([\\w.-]+: (\\w+)\\[\\], [\\w.-]+: \\w+\\[\\]\\) -> ", text, re.M))
found = {"scatter": [], "sum": []}
for line in text.splitlines():
    made = re.search(r" (scatter|all-reduce|reduce-scatter|all-reduce-start)\\(.*to_apply=(%[\\w.-]+)", line)
    if made and re.search(rf"\\[(\\d+,)*{config.data.vocabulary.size}\\b", line.split(made[1] + "(")[0]):
        found["scatter" if made[1] == "scatter" else "sum"].append(adding[made[2]])
print("added in", json.dumps(found), flush=True)
sys.exit()
"""


def test_the_tpu_compiler_sums_in_float32():
    """The whole step for a v6e-4, by the TPU compiler in a process of its own: on each device, and over devices."""
    pytest.importorskip("libtpu")
    environment = os.environ | child_environment(slice_named("v6e-4"), [], [])
    compiling = Forked(before=COMPILES, env=environment)
    said, _ = compiling.communicate(timeout=900)
    assert compiling.returncode == 0, said[-2000:]
    (found,) = [json.loads(line[len("added in ") :]) for line in said.splitlines() if line.startswith("added in ")]
    assert set(found["scatter"]) == set(found["sum"]) == {"f32"}, found
