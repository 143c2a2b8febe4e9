"""The decoders that the planner lowers are those that a predictor runs."""

import re
from collections import Counter
from math import prod

import haliax as hax
import numpy as np
import pytest
from tiny_run import DEMO

from tomat.measure.bench.decode import fresh_run
from tomat.perf.plan.compile.lowering import DecoderBatch, lower_decoder, stand_in_table
from tomat.predict.inference.autoregressive import decode_autoregressive
from tomat.predict.inference.parallel import cell_patches, decode_parallel, first_rows
from tomat.predict.inference.predictor import RunPredictor

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
