"""The blocked loss against the plain formulas, the formulas against NumPy, and what a batch costs."""

from functools import lru_cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import loss_batches
import numpy as np
import pytest
from haliax import Axis, named
from hypothesis import example, given, settings
from hypothesis import strategies as st
from loss_batches import START, assert_close, largest_terms
from plain_loss import plain_loss

from tomat.base.errors import TomatError
from tomat.model.loss.config import LOSS_KINDS, LossConfig
from tomat.model.loss.density_loss import density_loss, evaluation_sums
from tomat.model.loss.interface import DensityTarget

K, V, E = 24, 33, 6
"""Density ids 7..30 of 33: ids of both other sorts, before and after."""

VALUES = np.concatenate([[0.0], np.geomspace(1e-3, 6.0, K - 1)]).astype(np.float32)
TARGET = DensityTarget(K, VALUES, START)
make_batch = partial(loss_batches.make_batch, bins=K, width=E, ids=V, scale=2.0)


def value_and_gradients(loss, hidden, head, tokens, config):
    def of(hidden, head):
        return loss(hidden, head, tokens, config=config, target=TARGET)

    differentiated = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
    (value, metrics), gradients = jax.jit(differentiated)(hidden, head)
    return value, metrics, gradients


def value_of(loss, hidden, head, tokens, config, target=TARGET):
    of = partial(loss, config=config, target=target)
    return jax.jit(of)(hidden, head, tokens)


BLOCKS = (1, 5, 8, 16, 17, 40)
"""Positions per block, against 17 positions: mostly ragged, one whole, one larger than the sequence."""

CASES = [
    (kind, vocabulary, preamble_weight, BLOCKS[(4 * i + j) % len(BLOCKS)])
    for i, kind in enumerate(LOSS_KINDS)
    for j, (vocabulary, preamble_weight) in enumerate(product(["density", "full"], [0.0, 0.4]))
    if (vocabulary == "full") == (preamble_weight > 0) or kind == "emd"
]


@lru_cache
def compiled_comparison(config: LossConfig):
    """Value, metrics and gradients of the blocked and of the plain loss, in one compiled function."""
    losses = [
        jax.value_and_grad(partial(loss, config=config, target=TARGET), argnums=(0, 1), has_aux=True)
        for loss in (density_loss, plain_loss)
    ]
    return jax.jit(lambda *arrays: [loss(*arrays) for loss in losses])


@pytest.mark.parametrize(("kind", "vocabulary", "preamble_weight", "block"), CASES)
@settings(max_examples=3, deadline=None)
@example(seed=72835, scale=1.1, in_bins=False)  # of crps, whose terms cancel to a 68th
@given(seed=st.integers(0, 10**6), scale=st.floats(0.0, 1.5), in_bins=st.booleans())
def test_blocked_equals_plain(kind, vocabulary, preamble_weight, block, seed, scale, in_bins):
    target: dict[str, Any] = (
        {} if in_bins or kind != "soft_cross_entropy" else dict(target_space="rho", target_sigma=0.3)
    )
    config = LossConfig(
        kind=kind,
        emd_weight=0.7,
        preamble_weight=preamble_weight,
        vocabulary=vocabulary,
        block_positions=block,
        # Every block size in both halves of the cases.
        z_loss_weight=0.3 if block in (5, 16, 40) else 0.0,
        **target,
    )
    arrays = make_batch(seed, 2, 17, scale=scale)
    (blocked, by_blocked), (plain, by_plain) = compiled_comparison(config)(*arrays)
    assert_close(blocked[0], plain[0], 1e-5, "loss")
    assert blocked[1].keys() == plain[1].keys()
    for name, value in plain[1].items():
        assert_close(blocked[1][name], value, 1e-5, name)
    for name, got, wanted, terms in zip(
        ("hidden", "head"), by_blocked, by_plain, largest_terms(*arrays, config, VALUES), strict=True
    ):
        # Both round to 1e-7 of the terms: 1e-6 of these counts where they all but cancel.
        assert_close(got, wanted, 1e-5, f"gradient by {name}", terms / 10)


def test_levanters_program_has_the_same_loss_and_gradients():
    config = LossConfig(kind="cross_entropy", vocabulary="full", kernel="levanter")
    arrays = loss_batches.make_batch(0, 3, 12, bins=K, width=E, ids=9000)  # two of its blocks of 8,192 ids
    (found, gradients), (expected, plain_gradients) = compiled_comparison(config)(*arrays)
    for name in ("density_loss", "cross_entropy_nats", "density_positions"):
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=1e-5)
    assert np.isnan(found[1]["top1_accuracy"]) and np.isnan(found[1]["emd_e_per_A3"])
    for got, wanted in zip(gradients, plain_gradients, strict=True):
        assert_close(got, wanted, 1e-5, "gradient")
    for loss in (found[0], value_of(density_loss, *arrays, config)[0]):
        np.testing.assert_allclose(loss, expected[0], rtol=1e-5)


RELATIVE = DensityTarget(K, np.geomspace(0.2, 5.0, K).astype(np.float32), START, offset_e_per_a3=0.01)
RELATIVE_CASES = [
    LossConfig(kind="ce_emd", emd_weight=0.7, vocabulary="full", block_positions=5),
    LossConfig(kind="crps", block_positions=8),
    LossConfig(kind="l1_mean", block_positions=8),
    LossConfig(target_space="rho", target_sigma=0.3, block_positions=16),
]


@pytest.mark.parametrize("config", RELATIVE_CASES[:2], ids=lambda config: config.kind)
def test_blocked_equals_plain_of_a_relative_codec(config):
    arrays = make_batch(3, 2, 17)
    scale = jnp.asarray(np.random.default_rng(0).lognormal(-1, 1, (2, 17)).astype(np.float32))
    of = dict(config=config, target=RELATIVE, scale=scale)
    found = [
        jax.jit(jax.value_and_grad(partial(loss, **of), argnums=(0, 1), has_aux=True))(*arrays)
        for loss in (density_loss, plain_loss)
    ]
    for got, expected in zip(*map(jax.tree.leaves, found), strict=True):
        assert_close(got, expected, 1e-5, config.kind)


def test_a_relative_codec_is_a_table_of_densities_at_each_voxel():
    t, s = 9, 0.37
    at, one = make_batch(0, 1, 2)[:2], jnp.asarray([[3, START + t]])
    table = DensityTarget(K, (s * RELATIVE.values - 0.01).astype(np.float32), START)
    for config in RELATIVE_CASES:
        expected, metrics = plain_loss(*at, one, config=config, target=table)
        value, of_ratios = plain_loss(*at, one, config=config, target=RELATIVE, scale=jnp.full((1, 2), s))
        np.testing.assert_allclose(value, expected, rtol=1e-4, err_msg=config.kind)
        for name in ("emd_e_per_A3", "rho_mean_e_per_A3"):
            np.testing.assert_allclose(of_ratios[name], metrics[name], rtol=1e-4)


def test_ratios_without_a_scale_are_refused():
    arrays, in_rho = make_batch(0, 1, 4), LossConfig(target_space="rho", kernel="pallas")
    with pytest.raises(TomatError, match="relative to the sum of atoms, which needs model.environment"):
        density_loss(*arrays, config=LossConfig(), target=RELATIVE)
    with pytest.raises(TomatError, match="loss.target_space rho, whose kernels have one width"):
        density_loss(*arrays, config=in_rho, target=RELATIVE, scale=jnp.ones((1, 4)))


@pytest.mark.parametrize("vocabulary", ["density", "full"])
def test_plain_formulas_against_numpy(vocabulary):
    hidden, head, _ = make_batch(0, 1, 2)
    t, preamble = 9, 3
    tokens = jnp.asarray([[preamble, START + t]])
    logits = np.asarray(head, np.float64) @ np.asarray(hidden[0, 0], np.float64)
    p_all = np.exp(logits) / np.exp(logits).sum()
    density = slice(START, START + K)
    z = np.log(np.exp(logits if vocabulary == "full" else logits[density]).sum())
    p = p_all[density] / p_all[density].sum()
    v = VALUES.astype(np.float64)
    distance = np.abs(v - v[t])
    q = np.exp(-0.5 * ((np.arange(K) - t) / 3.0) ** 2)
    widths = np.empty(K)
    widths[1:-1] = (v[2:] - v[:-2]) / 2
    widths[0], widths[-1] = v[1] - v[0], v[-1] - v[-2]
    q_rho = widths * np.exp(-0.5 * ((v - v[t]) / 0.2) ** 2)
    # The energy form, E|X - r| - E|X - X'| / 2 (Gneiting and Raftery 2007, eq. 21), shares no step with ours.
    crps = p @ distance - 0.5 * p @ np.abs(v[:, None] - v[None, :]) @ p
    expected = {
        LossConfig(kind="cross_entropy", z_loss_weight=0.1): -np.log(p[t]) + 0.1 * z**2,
        LossConfig(kind="soft_cross_entropy", target_sigma=3.0): -(q / q.sum()) @ np.log(p),
        LossConfig(target_space="rho", target_sigma=0.2): -(q_rho / q_rho.sum()) @ np.log(p),
        LossConfig(kind="ce_emd", emd_weight=0.3): -np.log(p[t]) + 0.3 * p @ distance,
        LossConfig(kind="emd"): p @ distance,
        LossConfig(kind="l1_mean"): abs(p @ v - v[t]),
        LossConfig(kind="crps"): crps,
    }
    outside = -np.log(p_all[density].sum())
    for config, value in expected.items():
        config = LossConfig(**{**vars(config), "vocabulary": vocabulary})
        loss, metrics = value_of(plain_loss, hidden, head, tokens, config)
        full = outside if vocabulary == "full" else 0.0
        np.testing.assert_allclose(loss, value + full, rtol=2e-5, err_msg=config.kind)
        np.testing.assert_allclose(metrics["emd_e_per_A3"], p @ distance, rtol=1e-5)
        np.testing.assert_allclose(metrics["rho_mean_e_per_A3"], v[t], rtol=1e-6)
        np.testing.assert_allclose(metrics["cross_entropy_nats"], -np.log(p[t]) + full, rtol=1e-5)


def test_full_vocabulary_with_preamble_is_the_usual_language_model_loss_with_its_z_loss():
    hidden, head, tokens = make_batch(3, 3, 17)
    config = LossConfig(
        kind="cross_entropy", vocabulary="full", preamble_weight=1.0, z_loss_weight=0.01, block_positions=5
    )
    loss, metrics = value_of(density_loss, hidden, head, tokens, config)
    logits = np.asarray(hidden @ head.T, np.float64)
    z, expected = np.log(np.exp(logits).sum(axis=-1)), []
    for row in range(3):
        targets = np.asarray(tokens[row, 1:])
        real = np.flatnonzero(targets != 0)
        expected.append((z[row, real] - logits[row, real, targets[real]] + 0.01 * z[row, real] ** 2).mean())
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)
    assert metrics["preamble_cross_entropy_nats"] > 0


def test_padding_later_positions_and_a_sequence_without_density_cost_nothing():
    hidden, head, tokens = make_batch(5, 2, 12)
    tokens = tokens.at[:, 8:].set(0)
    config = LossConfig(kind="crps", preamble_weight=0.5, block_positions=4)
    loss, _, (by_hidden, _) = value_and_gradients(density_loss, hidden, head, tokens, config)
    # The last real token is at 7 and is predicted at 6.
    assert np.all(np.asarray(by_hidden[:, 7:]) == 0) and np.any(np.asarray(by_hidden[:, :7]) != 0)
    short, _ = value_of(density_loss, hidden[:, :8], head, tokens[:, :8], config)
    np.testing.assert_allclose(loss, short, rtol=1e-6)
    # Nor does a sequence without density, which is counted.
    hidden, head, tokens = make_batch(2, 4, 10)
    config = LossConfig(preamble_weight=0.5)
    alone, _ = value_of(density_loss, hidden[:2], head, tokens[:2], config)
    tokens = tokens.at[2:].set(3)
    loss, metrics, (by_hidden, _) = value_and_gradients(density_loss, hidden, head, tokens, config)
    np.testing.assert_allclose(loss, alone / 2, rtol=1e-6)
    assert metrics["sequences_without_density"] == 0.5
    assert np.all(np.asarray(by_hidden[2:]) == 0)


def test_accumulation_over_microbatches_is_exact():
    hidden, head, tokens = make_batch(11, 6, 15)
    config = LossConfig(kind="ce_emd", preamble_weight=0.3, block_positions=4)
    whole, metrics, gradients = value_and_gradients(density_loss, hidden, head, tokens, config)
    counts = np.asarray((tokens >= START) & (tokens < START + K)).sum(axis=1)
    assert len(set(counts)) > 2, "the sequences must differ in length for this to show anything"
    parts = [
        value_and_gradients(density_loss, hidden[i : i + 2], head, tokens[i : i + 2], config) for i in range(0, 6, 2)
    ]
    np.testing.assert_allclose(whole, np.mean([p[0] for p in parts]), rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(value, np.mean([p[1][name] for p in parts]), rtol=1e-5, atol=1e-7, err_msg=name)
    assert_close(sum(p[2][1] for p in parts) / 3, gradients[1], 1e-5, "gradient by head")


def test_evaluation_sums_do_not_depend_on_the_batches():
    """Rows that fill a batch up, and one that is nothing but preamble, do not count; all others weigh the same."""
    hidden, head, tokens = make_batch(31, 6, 15)
    tokens = tokens.at[4].set(3).at[5].set(0)
    config = LossConfig(kind="ce_emd", preamble_weight=0.3, block_positions=4)

    of = {rows: jax.jit(partial(density_loss, config=config, target=TARGET)) for rows in (2, 6)}

    def sums(rows: list[int]) -> dict[str, float]:
        index = jnp.asarray(rows)
        loss, metrics = of[len(rows)](hidden[index], head, tokens[index])
        return {name: float(value) for name, value in evaluation_sums(loss, metrics, len(rows)).items()}

    expected = sums([0, 1, 2, 3, 4, 5])
    assert expected["sequences"] == 4
    for batches in ([[0, 1], [2, 3]], [[0, 4], [1, 5], [2, 4], [3, 4]]):
        parts = [sums(batch) for batch in batches]
        for name, value in expected.items():
            assert sum(part[name] for part in parts) == pytest.approx(value, rel=1e-6), (name, batches)
    # By the plain definitions, of those rows.
    loss = float(value_of(plain_loss, hidden[:4], head, tokens[:4], config)[0])
    assert expected["loss"] / 4 == pytest.approx(loss, rel=1e-5)


def test_a_perfect_prediction_costs_nothing():
    _, _, tokens = make_batch(8, 2, 10)
    hidden = jnp.asarray(30.0 * np.eye(V, dtype=np.float32)[np.pad(tokens[:, 1:], ((0, 0), (0, 1)))])
    loss, metrics = value_of(density_loss, hidden, jnp.eye(V), tokens, LossConfig(kind="crps", block_positions=3))
    assert abs(float(loss)) < 1e-4 and metrics["emd_e_per_A3"] < 1e-5
    np.testing.assert_allclose(metrics["top1_accuracy"], 1.0, rtol=1e-6)


def test_top1_of_a_tie_is_the_chance_of_the_target():
    hidden, head = jnp.zeros((1, 3, E)), jnp.ones((V, E))
    tokens = jnp.asarray([[1, START, START + 1]])
    for loss in (density_loss, plain_loss):
        _, metrics = value_of(loss, hidden, head, tokens, LossConfig())
        np.testing.assert_allclose(metrics["top1_accuracy"], 1 / K, rtol=1e-6)


def test_bfloat16_keeps_types_and_stays_near_float32():
    hidden, head, tokens = make_batch(4, 2, 16, scale=1.0)
    config = LossConfig(block_positions=5)
    value, _, exact = value_and_gradients(density_loss, hidden, head, tokens, config)
    half = value_and_gradients(density_loss, hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16), tokens, config)
    rounded, _, (by_hidden, by_head) = half
    assert rounded.dtype == jnp.float32
    assert by_hidden.dtype == by_head.dtype == jnp.bfloat16
    # bfloat16 has 8 bits of mantissa: 0.4 % a value.
    assert_close(rounded, value, 0.01, "loss")
    assert_close(by_hidden, exact[0], 0.03, "gradient by hidden")
    assert_close(by_head, exact[1], 0.03, "gradient by head")


def test_named_arrays_in_any_axis_order():
    hidden, head, tokens = make_batch(9, 2, 8)
    batch, position, embed, vocab = Axis("batch", 2), Axis("position", 8), Axis("embed", E), Axis("vocab", V)
    expected, _ = value_of(density_loss, hidden, head, tokens, LossConfig())
    got, _ = value_of(
        density_loss,
        named(hidden.transpose(1, 0, 2), (position, batch, embed)),
        named(head.T, (embed, vocab)),
        named(tokens, (batch, position)),
        LossConfig(),
    )
    np.testing.assert_array_equal(got, expected)


def test_two_tokens_per_voxel():
    hidden, head, tokens = make_batch(10, 2, 12)
    config = LossConfig(kind="cross_entropy", vocabulary="full", block_positions=5)
    target = DensityTarget(K, None, START, tokens_per_voxel=2)
    loss, metrics = value_of(density_loss, hidden, head, tokens, config, target)
    expected, _ = value_of(plain_loss, hidden, head, tokens, config)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert "emd_e_per_A3" not in metrics


def test_memory_does_not_grow_with_positions_times_vocabulary():
    """Compiled temporary memory of value and gradient, 8 times the positions, the block the same."""
    k, embed = 1024, 8
    target = DensityTarget(k, np.linspace(0.0, 3.0, k), START)

    def temporary_bytes(loss, positions):
        def of(hidden, head, tokens):
            config = LossConfig(kind="emd", block_positions=64)
            return loss(hidden, head, tokens, config=config, target=target)[0]

        shapes = [
            jax.ShapeDtypeStruct((2, positions, embed), jnp.float32),
            jax.ShapeDtypeStruct((START + k, embed), jnp.float32),
            jax.ShapeDtypeStruct((2, positions), jnp.int32),
        ]
        compiled = jax.jit(jax.value_and_grad(of, argnums=(0, 1))).lower(*shapes).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    added_logits = 2 * (1024 - 128) * k * 4
    assert temporary_bytes(plain_loss, 1024) - temporary_bytes(plain_loss, 128) >= added_logits
    assert temporary_bytes(density_loss, 1024) - temporary_bytes(density_loss, 128) < 0.1 * added_logits


def test_refuses():
    for bins, message in (((K, VALUES, 20), "20..43 and the head has 33 rows"), ((K, None, START), "codec's table")):
        with pytest.raises(TomatError, match=message):
            density_loss(*make_batch(1, 2, 8), config=LossConfig(), target=DensityTarget(*bins))
