"""The value a loss has before anything is learnt, and the check of the first logged one."""

import math
from functools import lru_cache, partial
from itertools import permutations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_loss import plain_loss

from tomat.base.errors import TomatError
from tomat.model.loss.config import LOSS_KINDS, LossConfig, LossVocabulary
from tomat.model.loss.interface import DensityTarget
from tomat.model.loss.start import TIED_LOGIT_STD, UNTIED_LOGIT_STD, check_first_loss, uniform_loss

START, K, V = 7, 512, 530
VALUES = np.concatenate([[0.0], np.geomspace(1e-3, 6.0, K - 1)])
TARGET = DensityTarget(K, VALUES, START)
VARIANTS: list[tuple[LossVocabulary, float]] = [("density", 0.0), ("full", 0.5)]
CONFIGS = [
    LossConfig(kind=kind, vocabulary=vocabulary, preamble_weight=preamble, emd_weight=0.4)
    for kind, (vocabulary, preamble) in product(LOSS_KINDS, VARIANTS)
] + [
    LossConfig(vocabulary=vocabulary, preamble_weight=preamble, z_loss_weight=0.1) for vocabulary, preamble in VARIANTS
]


def make_tokens(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(START, START + K, (3, 40))
    tokens[:, :5] = rng.integers(1, START, (3, 5))
    tokens[0, 30:] = 0
    tokens[1, 20:] = V - 1
    return tokens


@lru_cache
def compiled(config: LossConfig):
    return jax.jit(partial(plain_loss, config=config, target=TARGET))


def loss_of_logits(config: LossConfig, logits: np.ndarray, tokens: np.ndarray) -> float:
    """The loss for given logits `[batch, position, V]`: hidden states that are the logits, and a unit head."""
    return float(compiled(config)(jnp.asarray(logits, jnp.float32), jnp.eye(V), jnp.asarray(tokens))[0])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kind}-{c.vocabulary}")
def test_uniform_loss_is_the_loss_of_equal_logits(config):
    tokens = make_tokens(0)
    tokens[2] = 3
    expected = loss_of_logits(config, np.zeros((3, 40, V)), tokens)
    np.testing.assert_allclose(uniform_loss(config, tokens, vocab_size=V, target=TARGET), expected, rtol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.kind}-{c.vocabulary}")
@pytest.mark.parametrize("logit_std", [TIED_LOGIT_STD, UNTIED_LOGIT_STD])
def test_fresh_models_pass(config, logit_std):
    tokens = make_tokens(1)
    expected = uniform_loss(config, tokens, vocab_size=V, target=TARGET)
    for seed in range(2):
        # One row for all positions: the positions of a fresh model differ little, so nothing averages out.
        row = np.random.default_rng(seed).normal(size=V) * logit_std
        measured = loss_of_logits(config, np.broadcast_to(row, (3, 40, V)), tokens)
        check_first_loss(config, measured, expected, target=TARGET, logit_std=logit_std)


def test_another_loss_is_refused():
    """Every pair of kinds, at the size of a production codec, but for the two cross-entropies: both are log K."""
    table = np.concatenate([[0.0], np.geomspace(1e-3, 20.0, 16383)])
    target = DensityTarget(16384, table)
    tokens = np.random.default_rng(0).integers(2186, 2186 + 16384, (2, 500))
    configs = [LossConfig(kind=kind) for kind in LOSS_KINDS]
    first = {c: uniform_loss(c, tokens, target=target, vocab_size=18570) for c in configs}
    for configured, ran in permutations(configs, 2):
        if {configured.kind, ran.kind} == {"cross_entropy", "soft_cross_entropy"}:
            continue
        with pytest.raises(TomatError, match=f"{configured.kind} over the density vocabulary gives"):
            check_first_loss(configured, first[ran], first[configured], target=target, logit_std=TIED_LOGIT_STD)


@pytest.mark.parametrize("measured", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_refused(measured):
    with pytest.raises(TomatError, match="the first loss is (nan|inf)"):
        check_first_loss(LossConfig(), measured, 6.2, target=TARGET)
