"""One voxel after another from a cache: what the whole forward pass says at each of them."""

from functools import cache
from typing import Any, get_args

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest
from haliax import Axis
from jax.sharding import AxisType
from levanter.layers.rotary import DefaultRotaryEmbeddingsConfig, YarnRotaryEmbeddingsConfig
from levanter.models.llama import LlamaConfig
from small_promolecule import promolecule
from traced_operations import random_model

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START, PAD, Vocabulary
from tomat.model.any_decoder import hidden_and_head
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.environment import EnvironmentConfig, EnvironmentTables, environment_tables
from tomat.model.nearby_atoms import named_atoms
from tomat.predict.inference.autoregressive import CachedModel, decode_autoregressive
from tomat.predict.inference.decoding import decode_speculative
from tomat.predict.inference.interface import ChoiceKind

BINS, LENGTH, SIDES = 40, 64, (3, 3, 4)
VOXELS = 36
F32 = jmp.get_policy("f32")
VALUES = np.linspace(0.0, 4.0, BINS, dtype=np.float32) ** 2
TABLES = environment_tables(promolecule(), VALUES)
RELATIVE = environment_tables(promolecule(), VALUES + 0.1, 0.01)
"""Of a relative codec; for the variant that mixes values."""
SMALL = dict(
    hidden_dim=32, intermediate_dim=48, num_layers=2, num_heads=4, num_kv_heads=4, max_seq_len=LENGTH,
    environment=EnvironmentConfig(channels=4, hidden_dim=16, basis=promolecule().basis, max_atoms=6),
)  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "with environment": {},
    "grouped queries, sliding window, a head of its own, mixed values": dict(
        num_kv_heads=2, sliding_window=7, tie_word_embeddings=False, value_mix=0.3, embedding_skip=0.2, fused_qkv=True
    ),
    "without prior, unrolled, hybrid norm, plain rotary embedding": dict(
        scan_layers=False, hybrid_norm=True, rope=DefaultRotaryEmbeddingsConfig(200.0), input_embedding_norm=True,
        environment=EnvironmentConfig(4, 16, promolecule().basis, 6, prior_anchors=0),
    ),
    "paired, no norm of queries and keys, yarn, mixed values, unrolled": dict(
        num_kv_heads=2, paired_heads=True, use_qk_norm=False, rope=YarnRotaryEmbeddingsConfig(), value_mix=0.3,
        scan_layers=False, environment=None,
    ),
}  # fmt: skip


@cache
def built(variant: str):
    return random_model(DensityDecoderConfig(**{**SMALL, **VARIANTS[variant]}), Axis("vocab", Vocabulary(BINS).size))


def patches(n: int, start: int = 20, seed: int = 1) -> dict[str, np.ndarray]:
    """A batch: ids that end with DENS at `start`, and atoms."""
    rng = np.random.default_rng(seed)
    tokens = np.full((n, LENGTH), PAD, np.int32)
    tokens[:, :start] = rng.integers(DENSITY_BLOCK_START + 1, DENSITY_START, (n, start))
    tokens[:, start] = DENSITY_BLOCK_START
    return {
        "tokens": tokens,
        "positions": rng.uniform(-1, 3, (n, 6, 3)).astype(np.float32),
        "numbers": rng.choice([0, 9, 11, 12], (n, 6)).astype(np.int32),
        "kinds": np.tile(np.array([9, 11, 12, 0], np.int32), (n, 1)),
        "steps": np.tile(np.eye(3, dtype=np.float32) * 0.4, (n, 1, 1)),
        "shape": np.tile(np.array(SIDES, np.int32), (n, 1)),
        "patch": np.arange(n, dtype=np.int32),
        "sample": np.zeros(n, np.int32),
    }


def tables_of(model) -> EnvironmentTables | None:
    if model.environment is None:
        return None
    return TABLES if model.config.value_mix == 0 else RELATIVE


def decoded(model, batch, kind: ChoiceKind = "greedy", seed: int = 0):
    bins, values = decode_autoregressive(
        model, batch, tables_of(model), VALUES, VOXELS, kind, np.float32(1), np.uint32(seed),
        None, F32,
    )  # fmt: skip
    np.testing.assert_array_equal(values, VALUES[np.asarray(bins)])
    return np.asarray(bins)


@eqx.filter_jit
def whole_logits(model, batch, ids, tables):
    """Of every position's density bins, by the forward pass over whole sequences."""
    named = hax.named(ids, (Axis("batch", ids.shape[0]), Axis("position", ids.shape[1])))
    hidden, head, _ = hidden_and_head(model, named, named_atoms(batch), tables)
    logits = hax.dot(hidden, head, axis="embed").rearrange(("batch", "position", "vocab")).array
    return logits[..., DENSITY_START : DENSITY_START + BINS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_cached_and_the_whole_forward_pass_agree(variant):
    model, batch, start = built(variant), patches(2), 20
    tables = tables_of(model)

    def whole(bins):
        """Causal: each position of this pass is the last of a pass over what precedes it."""
        ids = batch["tokens"].copy()
        ids[:, start + 1 : start + VOXELS] = bins[:, :-1] + DENSITY_START
        return ids, np.asarray(whole_logits(model, batch, ids, tables))[:, start : start + VOXELS]

    if variant == "with environment":
        greedy = decoded(model, batch)
        np.testing.assert_array_equal(greedy, whole(greedy)[1].argmax(axis=-1))
    drawn = np.random.default_rng(2).integers(0, BINS, (2, VOXELS))
    ids, expected = whole(drawn)

    @eqx.filter_jit
    def cached_logits(model, batch, ids):
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        cached = CachedModel.of(model, arrays, tables, BINS)

        def step(caches, position):
            logits, caches = cached.logits(jnp.asarray(ids)[:, position], position, caches)
            return caches, logits

        found = jax.lax.scan(step, cached.filled(arrays["tokens"]), start + jnp.arange(VOXELS))[1].swapaxes(0, 1)
        return found, cached.logits_without_cache(jnp.asarray(ids), jnp.int32(start + 5))

    found, sixth = cached_logits(model, batch, ids)
    within = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=within)
    np.testing.assert_allclose(sixth, expected[:, 5], atol=within)


@pytest.mark.parametrize(
    ("variant", "kind"), [*((list(VARIANTS)[0], kind) for kind in get_args(ChoiceKind)), (list(VARIANTS)[3], "sampled")]
)
def test_whole_passes_find_the_bins_of_one_voxel_after_another(variant, kind):
    model, batch = built(variant), patches(3)
    how = np.float32(1), np.uint32(0), None, F32
    bins, values = decode_speculative(model, batch, tables_of(model), VALUES, VOXELS, kind, *how)
    np.testing.assert_array_equal(values, VALUES[np.asarray(bins)])
    np.testing.assert_array_equal(bins, decoded(model, batch, kind))


def test_another_preamble_runs_the_same_program(caplog):
    model = built("with environment")
    long = decoded(model, patches(2, start=20))
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        short = decoded(model, patches(2, start=9))
    assert short.shape == long.shape and (short != long).any()
    assert not [message for message in caplog.messages if "decode_autoregressive" in message]


def test_what_is_drawn_depends_on_seed_patch_and_sample_alone():
    model, batch = built("grouped queries, sliding window, a head of its own, mixed values"), patches(4)
    batch["patch"][:] = [5, 5, 6, 7]
    for name in ("tokens", "positions", "numbers"):
        batch[name][1] = batch[name][0]
    batch["sample"][:] = [0, 1, 0, 0]
    first = decoded(model, batch, "sampled")
    np.testing.assert_array_equal(first, decoded(model, batch, "sampled"))
    assert (first[0] != first[1]).any(), "two samples of one patch"
    assert (first != decoded(model, batch, "sampled", seed=1)).any(axis=1).all()
    reverse = {name: array[::-1].copy() for name, array in batch.items()}
    np.testing.assert_array_equal(first, decoded(model, reverse, "sampled")[::-1])


def test_on_two_devices_it_is_the_same():
    model, batch = built("with environment"), patches(4)
    alone = decoded(model, batch, "sampled")
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        spread = hax.shard(model, {"embed": "data"})  # as training leaves its parameters
        bins, _ = decode_autoregressive(
            spread, batch, TABLES, VALUES, VOXELS, "sampled", np.float32(1), np.uint32(0), {"batch": "data"}, F32
        )
    assert len(bins.sharding.device_set) == 2 and not bins.sharding.is_fully_replicated
    np.testing.assert_array_equal(bins, alone)


def test_another_model_is_refused_by_name():
    config = LlamaConfig(
        hidden_dim=32, intermediate_dim=48, num_layers=1, num_heads=2, num_kv_heads=2, max_seq_len=LENGTH
    )
    model = config.build(Axis("vocab", Vocabulary(BINS).size), key=jax.random.PRNGKey(0))
    with pytest.raises(TomatError, match=r"model\.type is llama.*parallel"):
        CachedModel.of(model, {}, None, BINS)
