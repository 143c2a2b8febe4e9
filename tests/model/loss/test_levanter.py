"""Levanter's fused cross-entropy in the place of tomat's: the same loss and gradients, and what it does not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss, plain_loss
from tomat.model.loss.target import DensityTarget

START, K, E, B, T = 7, 24, 8, 3, 12
TARGET = DensityTarget(K, np.geomspace(1e-3, 6.0, K), START)
CONFIG = LossConfig(kind="cross_entropy", vocabulary="full", kernel="levanter")


@pytest.mark.parametrize("vocabulary", [33, 9000])  # all logits at once, and two blocks of 8,192
def test_loss_and_gradients_are_those_of_the_formula(vocabulary):
    rng = np.random.default_rng(0)
    tokens = rng.integers(START, START + K, (B, T)).astype(np.int32)
    tokens[:, :3] = 2
    tokens[1, 7:] = 0
    hidden = jnp.asarray(rng.normal(size=(B, T, E)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(vocabulary, E)), jnp.float32)

    def both(loss):
        call = jax.value_and_grad(
            lambda h, w: loss(h, w, jnp.asarray(tokens), config=CONFIG, target=TARGET), argnums=(0, 1), has_aux=True
        )
        return jax.jit(call)(hidden, head)

    (loss, metrics), gradients = both(density_loss)
    (expected, plain_metrics), plain_gradients = both(plain_loss)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for got, wanted in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())
    for name in ("density_loss", "cross_entropy_nats", "density_positions"):
        np.testing.assert_allclose(metrics[name], plain_metrics[name], rtol=1e-5)
    assert np.isnan(metrics["top1_accuracy"]) and np.isnan(metrics["emd_e_per_A3"])
    alone, _ = density_loss(hidden, head, jnp.asarray(tokens), config=CONFIG, target=TARGET)
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "change", [{"kind": "ce_emd"}, {"vocabulary": "density"}, {"preamble_weight": 0.1}, {"z_loss_weight": 1e-4}]
)
def test_other_losses_are_refused(change):
    with pytest.raises(TomatError, match="loss.kernel levanter"):
        LossConfig(**{"kind": "cross_entropy", "vocabulary": "full", "kernel": "levanter", **change})
