"""The Pallas loss, in the interpreter, against the plain formulas; and as the TPU compiler makes it."""

import json
import os
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import loss_batches
import numpy as np
import pytest
from forked import Forked
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loss_batches import START, assert_close, largest_terms
from plain_loss import plain_loss

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget
from tomat.model.tiles import LossTiles
from tomat.perf.plan.compile.topology import child_environment

K, E = 200, 16
"""Density ids 7..206 of 211: ids of both other sorts, and neither section a whole number of tiles of 128."""
V = START + K + 4
VALUES = np.concatenate([[0.0], np.geomspace(1e-3, 6.0, K - 1)]).astype(np.float32)
TARGET = DensityTarget(K, VALUES, START)

TWO_BLOCKS, THREE_BLOCKS, ONE_BLOCK = LossTiles(64, 32, 128, 16), LossTiles(48, 16, 256, 16), LossTiles(32, 32, 128, 32)
"""Of the 74 rows below: two groups, the second ragged, of two blocks; two groups of three; three groups of one."""

CASES: list[tuple[Any, ...]] = [
    ("cross_entropy", "full", 0.0, TWO_BLOCKS, {}),
    ("soft_cross_entropy", "full", 0.4, ONE_BLOCK, {}),
    ("soft_cross_entropy", "density", 0.0, TWO_BLOCKS, dict(target_space="rho", target_sigma=0.3)),
    ("ce_emd", "density", 0.4, THREE_BLOCKS, dict(emd_weight=0.7)),
    ("emd", "full", 0.0, ONE_BLOCK, {}),
    ("l1_mean", "density", 0.0, THREE_BLOCKS, {}),
]


def make_batch(seed: int, positions: int = 37, scale: float = 1.0, bins: int = K):
    """Two sequences with four ids behind the bins."""
    return loss_batches.make_batch(seed, 2, positions, bins=bins, width=E, ids=START + bins + 4, scale=scale)


@lru_cache
def differentiated(loss, config: LossConfig):
    """Value, metrics and gradients of a loss, compiled."""
    of = jax.value_and_grad(partial(loss, config=config, target=TARGET), argnums=(0, 1), has_aux=True)
    return jax.jit(of)


@pytest.mark.parametrize(("kind", "vocabulary", "preamble_weight", "tiles", "target"), CASES)
@settings(max_examples=1, deadline=None)
@example(seed=616245, scale=1.5)  # distributions of all but one bin, whose terms cancel to a hundredth
@given(seed=st.integers(0, 10**6), scale=st.floats(0.0, 1.5))
def test_equals_the_plain_formulas(kind, vocabulary, preamble_weight, tiles, target, seed, scale):
    config = LossConfig(
        kind=kind,
        vocabulary=vocabulary,
        preamble_weight=preamble_weight,
        kernel="pallas",
        tiles=tiles,
        interpret=True,
        **target,
    )
    arrays = make_batch(seed, scale=scale)
    (value, metrics), by_arrays = differentiated(density_loss, config)(*arrays)
    (expected, expected_metrics), by_plain = differentiated(plain_loss, config)(*arrays)
    assert_close(value, expected, 1e-5, "loss")
    assert metrics.keys() == expected_metrics.keys()
    for name in expected_metrics:
        assert_close(metrics[name], expected_metrics[name], 1e-5, name)
    for name, got, plain, terms in zip(
        ("hidden", "head"), by_arrays, by_plain, largest_terms(*arrays, config, VALUES), strict=True
    ):
        assert got.shape == plain.shape
        assert_close(got, plain, 1e-5, f"gradient by {name}", terms)


def test_ratios_of_a_relative_codec_are_scaled_as_in_the_plain_formulas():
    config = LossConfig(kind="ce_emd", emd_weight=0.7, kernel="pallas", tiles=THREE_BLOCKS, interpret=True)
    hidden, head, tokens = make_batch(5)
    scale = jnp.asarray(np.random.default_rng(0).lognormal(-1, 1, tokens.shape).astype(np.float32))
    target = DensityTarget(K, np.geomspace(0.2, 5.0, K).astype(np.float32), START, offset_e_per_a3=0.01)
    of = dict(config=config, target=target, scale=scale)
    found, plain = (
        jax.jit(jax.value_and_grad(partial(loss, **of), argnums=(0, 1), has_aux=True))(hidden, head, tokens)
        for loss in (density_loss, plain_loss)
    )
    for got, expected in zip(*map(jax.tree.leaves, (found, plain)), strict=True):
        assert_close(got, expected, 2e-5, "ce_emd")


def test_whole_tiles_of_two_tokens_per_voxel_without_padding_and_no_gradient():
    arrays = make_batch(3, positions=32, bins=256)
    config = LossConfig(
        kind="cross_entropy", vocabulary="full", kernel="pallas", tiles=LossTiles(64, 16, 128, 16), interpret=True
    )
    of = dict(config=config, target=DensityTarget(256, None, START, tokens_per_voxel=2))
    (value, metrics), (expected, expected_metrics) = (
        jax.jit(partial(loss, **of))(*arrays) for loss in (density_loss, plain_loss)
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["cross_entropy_nats"], expected_metrics["cross_entropy_nats"], rtol=1e-5)
    assert "emd_e_per_A3" not in metrics


def test_ties_and_bfloat16():
    """All logits equal: the target is best with the chance 1/K. And types: sums in float32, gradients as the arrays."""
    hidden, head, tokens = make_batch(1)
    config = LossConfig(kind="cross_entropy", kernel="pallas", tiles=TWO_BLOCKS, interpret=True)
    hidden, head = jnp.zeros_like(hidden, jnp.bfloat16), head.astype(jnp.bfloat16)
    (loss, metrics), (by_hidden, by_head) = differentiated(density_loss, config)(hidden, head, tokens)
    np.testing.assert_allclose(metrics["top1_accuracy"], 1 / K, rtol=1e-5)
    np.testing.assert_allclose(loss, np.log(K), rtol=1e-5)
    assert loss.dtype == jnp.float32
    assert by_hidden.dtype == by_head.dtype == jnp.bfloat16
    expected = differentiated(plain_loss, config)(hidden, head, tokens)[1][0]
    assert_close(by_hidden, expected, 0.02, "gradient by hidden")


def test_tiles_that_do_not_fit():
    of = ((1, 65536, 4096), jnp.bfloat16), ((V, 4096), jnp.bfloat16), ((1, 65536), jnp.int32)
    config = LossConfig(kernel="pallas", tiles=LossTiles(65536, 512, 512, 32))
    with pytest.raises(TomatError, match="need .* MiB of VMEM at a width of 4096"):
        jax.eval_shape(partial(density_loss, config=config, target=TARGET), *(jax.ShapeDtypeStruct(*x) for x in of))


COMPILES = """
import json
import sys

from tomat.hardware.chips import slice_named
from tomat.perf.plan.compile.topology import topology_devices
from tomat.perf.tuning.tile_tuning import lower_loss

device = topology_devices(slice_named("v6e-4"))[0]
for request in json.loads({requests!r}):
    print("temporary", lower_loss(request, device).compile().memory_analysis().temp_size_in_bytes, flush=True)
sys.exit()
"""


def test_compiles_for_v6e_without_logits_in_hbm():
    """By the TPU compiler, in a process of its own: what the step holds beside its arrays is less than the logits."""
    pytest.importorskip("libtpu")
    sizes = dict(slice="v6e-4", batch=2, positions=2048, width=256, density_tokens=4096)
    tiles = dict(resident_rows=512, block_rows=128, block_ids=256, chunk_rows=32)
    requests = [
        sizes | {"dtype": "bfloat16", "loss": {"vocabulary": "full", "kernel": kernel, **others}}
        for kernel, others in (("pallas", {"tiles": tiles}), ("xla", {"block_positions": 2048}))
    ]
    environment = os.environ | child_environment(slice_named("v6e-4"), [], [])
    compiling = Forked(before=COMPILES.format(requests=json.dumps(requests)), env=environment)
    said, _ = compiling.communicate(timeout=600)
    assert compiling.returncode == 0, said[-2000:]
    found = [int(line.split()[1]) for line in said.splitlines() if line.startswith("temporary ")]
    logits = 4 * 2 * 2048 * 4096
    assert found[0] < logits <= found[1], (found, "the check must see logits where there are some")
