"""What the planner lowers is what the trainer runs, to the letter."""

import dataclasses
import re
from collections import Counter
from math import prod
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decode_speed import fresh_run
from haliax import Axis
from jax.sharding import NamedSharding, PartitionSpec
from levanter.tracker import NoopConfig
from small_field import BASIS, CELL, CONFIG, TABLES
from small_field import GRID as CELL_GRID
from tiny_run import DEMO

from tomat.base.errors import TomatError
from tomat.perf.plan.compile.compiler import set_jax_options
from tomat.perf.plan.compile.lowering import DecoderBatch, lower_decoder, lower_step, stand_in_table
from tomat.predict.inference.autoregressive import decode_autoregressive
from tomat.predict.inference.decoding import cell_patches, decode_parallel, first_rows
from tomat.predict.inference.field import BOX, BOXES, Boxes, densities_of_boxes
from tomat.predict.inference.predictor import RunPredictor
from tomat.train.loader import TokenExample
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import load_config
from tomat.train.step import build_trainer

TINY = [
    "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", "--data.n_density_tokens", "64",
    "--model.num_layers", "2", "--model.hidden_dim", "32", "--model.intermediate_dim", "64", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--model.head_dim", "16", "--data.seq_len", "256", "--loss.block_positions", "128",
    "--trainer.train_batch_size", "8",
]  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ["--sharding", "zero1", "--model.gradient_checkpointing", "true"],
        ["--sharding", "fsdp", "--trainer.per_device_parallelism", "2", "--optimizer.type", "muon"],
    ],
)
def test_the_trainers_stablehlo(words):
    config = load_config(None, [*TINY, *words])
    trainer_config = dataclasses.replace(config.trainer_config(), load_checkpoint=False)
    trainer_config.tracker = NoopConfig()
    trainer_config._validate_and_set_defaults()
    table = stand_in_table(config)
    with build_trainer(config, trainer_config, table) as trainer:
        key = jax.random.PRNGKey(0)
        state = trainer.initial_state(key, model_init=model_initialiser(config, key))
        # sharded as the loader shards it
        sharding = NamedSharding(trainer.device_mesh, PartitionSpec(("replica_dcn", "replica", "data")))
        tokens = jax.device_put(jnp.zeros((config.batch_size, config.seq_len), jnp.int32), sharding)
        batch = TokenExample(tokens=hax.named(tokens, ("batch", "position")))
        # Levanter has no public way to its jitted step (0.2.227).
        trained = trainer._jit_train_step_fn_no_hook.lower(state, (batch,), {}).as_text()
        mesh = trainer.device_mesh
    planned = lower_step(config, mesh, table).as_text()
    assert planned == trained
    assert len(planned) > 10_000


def test_the_values_of_the_bins_change_no_operation():
    config = load_config(None, [*TINY, "--loss.kind", "emd"])
    trainer_config = config.trainer_config()
    trainer_config._validate_and_set_defaults()
    mesh = trainer_config.device_mesh
    table = stand_in_table(config)
    assert table is not None
    first, second = (lower_step(config, mesh, values).as_text() for values in (table, np.sqrt(table)))
    assert first != second  # the values are in the program
    operations = [
        [line.split("=")[-1].split()[0] for line in text.splitlines() if "=" in line] for text in (first, second)
    ]
    assert operations[0] == operations[1]


def test_what_a_run_sets_of_jax_is_set_before_the_step_is_traced():
    name, before = "jax_default_matmul_precision", jax.config.jax_default_matmul_precision
    try:
        set_jax_options({name: "highest", "jax_platforms": "nowhere", "jax_compilation_cache_dir": "/nowhere"})
        assert jax.config.jax_default_matmul_precision == "highest"
        assert jax.config.jax_platforms != "nowhere" and jax.config.jax_compilation_cache_dir != "/nowhere"
    finally:
        jax.config.update(name, before)
    for options in ({"jax_of_nobody": 1}, {name: "no precision"}):
        with pytest.raises(TomatError, match=f"trainer.jax_config.{next(iter(options))}"):
            set_jax_options(options)


GRID = (15, 16, 18)
"""27 patches of 7 voxels along each side."""
PATCHES = 16


@pytest.fixture(scope="module")
def fresh():
    return fresh_run(str(DEMO))


def operations(program: str) -> Counter:
    """Each operation with its shapes, and how often it is written; constants are where they are used or further out."""
    named = re.findall(r'"?((?:stablehlo|sdy)\.\w+)"?.* : (.*)$', program, flags=re.MULTILINE)
    return Counter(found for found in named if found[0] != "stablehlo.constant")


@pytest.mark.parametrize(
    ("decoder", "rounds", "decode", "kept"),
    [
        ("parallel", 2, decode_parallel, "compute"),
        ("autoregressive", 1, decode_autoregressive, "compute"),
        ("autoregressive", 1, decode_autoregressive, "int8"),
    ],
)
def test_the_predictors_operations(fresh, decoder, rounds, decode, kept):
    run, crystal = fresh
    predictor = RunPredictor(run, rounds, decoder, kv_cache_dtype=kept)
    patches = cell_patches(run, crystal, GRID)
    n_voxels, trainer = prod(patches.patch_shape), run.config.trainer_config()
    numbers = np.arange(len(patches.anchors), dtype=np.int32)
    arrays = patches.arrays | ({"patch": numbers, "sample": numbers} if decoder == "autoregressive" else {})
    with trainer.use_device_mesh():
        model = hax.shard(run.model, trainer.parameter_axis_mapping)
        arguments = predictor._arguments(model, first_rows(arrays, PATCHES), n_voxels)
        predicted = operations(decode.lower(*arguments).as_text())
        room = [patches.arrays[name].shape[1] for name in ("numbers", "kinds")]
        batch = DecoderBatch(decoder, PATCHES, n_voxels, *room, rounds, kept)
        table = stand_in_table(run.config)
        planned = operations(lower_decoder(run.config, trainer.device_mesh, batch, table).as_text())
    assert planned == predicted
    assert sum(planned.values()) > 300


def test_a_field_models_operations():
    config = load_config(Path("demo"), [])
    config = dataclasses.replace(config, model=dataclasses.replace(CONFIG, max_seq_len=config.seq_len))
    trainer = config.trainer_config()
    trainer._validate_and_set_defaults()
    arguments = trainer.compute_axis_mapping, trainer.mp
    with trainer.use_device_mesh():
        boxes = Boxes(CELL, CELL_GRID, BASIS.cutoff_a)
        arrays = boxes.batch(0, trainer.data_axis_size)[1]
        model = hax.shard(CONFIG.build(Axis("vocab", 10), key=jax.random.PRNGKey(0)), trainer.parameter_axis_mapping)
        predicted = operations(densities_of_boxes.lower(model, arrays, TABLES, *arguments).as_text())
        room, n = boxes.room(), BOXES * trainer.data_axis_size
        batch = DecoderBatch("parallel", n, prod(BOX), room.atoms, room.elements)
        planned = operations(lower_decoder(config, trainer.device_mesh, batch, stand_in_table(config)).as_text())
    assert planned == predicted
    assert sum(planned.values()) > 100
