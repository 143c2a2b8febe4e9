"""Rows whose density the model does not read: which, how many, and what is logged of them."""

import dataclasses

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from levanter.metrics import fold, unwrap_metrics

from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START, PAD
from tomat.model.any_decoder import hidden_and_head
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.loss.config import LossConfig
from tomat.model.loss.density_loss import density_loss
from tomat.model.loss.interface import DensityTarget
from tomat.train.loader import TokenExample
from tomat.train.step import DensityLossFunction, mean_metrics, without_density

BINS, ROWS, LENGTH = 16, 8, 24
Batch, Position = Axis("batch", ROWS), Axis("position", LENGTH)
LOSS = DensityLossFunction(
    LossConfig(kind="cross_entropy"), DensityTarget(BINS, np.arange(BINS, dtype=np.float32)), None
)


@pytest.fixture(scope="module")
def model():
    config = DensityDecoderConfig(
        max_seq_len=LENGTH, hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=2
    )
    vocab = Axis("vocab", DENSITY_START + BINS)
    return eqx.filter_jit(lambda: config.build(vocab, key=jax.random.PRNGKey(0)))()


@pytest.fixture(scope="module")
def tokens() -> NamedArray:
    ids = np.random.default_rng(0).integers(DENSITY_START, DENSITY_START + BINS, (ROWS, LENGTH))
    ids[:, :4] = [1, 20, 21, DENSITY_BLOCK_START]
    ids[:, -1] = 2
    return NamedArray(jnp.asarray(ids, jnp.int32), (Batch, Position))


def test_only_the_density_of_those_rows_is_hidden(tokens):
    unread = NamedArray(jnp.arange(ROWS) % 3 == 0, (Batch,))
    hidden = np.asarray(without_density(tokens, unread).array)
    before = np.asarray(tokens.array)
    expected = before.copy()
    expected[::3, 4:-1] = PAD
    assert np.array_equal(hidden, expected)


def test_the_loss_is_that_of_the_rows_as_they_were_read(model, tokens):
    def called(loss: DensityLossFunction, key=None):
        return eqx.filter_jit(lambda model, key: loss(model, TokenExample(tokens), key=key))(model, key)

    @eqx.filter_jit
    def unread(model):
        hidden, head, _ = hidden_and_head(model, without_density(tokens, hax.ones(Batch, dtype=bool)))
        return density_loss(hidden, head, tokens, config=LOSS.config, target=LOSS.target)[0]

    whole, metrics = called(LOSS)
    assert not {"density_loss_unread", "density_loss_read"} & set(metrics)
    dropping = dataclasses.replace(LOSS, density_dropout=1.0)
    read, rows, _ = dropping.read(tokens, None)
    assert read is tokens and rows is None, "without a key, as in validation, all is read"
    dropped, metrics = called(dropping, jax.random.PRNGKey(1))
    assert dropped == pytest.approx(float(unread(model)), rel=1e-6) and dropped != whole
    assert metrics["density_loss_unread"].value() == pytest.approx(float(dropped), rel=1e-5)


@pytest.mark.parametrize("share", [0.5, 0.3])
def test_as_many_rows_as_the_share_says_and_both_kinds_logged(model, tokens, share):
    loss = eqx.filter_jit(dataclasses.replace(LOSS, density_dropout=share))
    counts = []
    for seed in range(40 if share == 0.3 else 3):
        _, metrics = loss(model, TokenExample(tokens), key=jax.random.PRNGKey(seed))
        values = {name: float(metrics[name].value()) for name in metrics}
        read, unread = values["density_loss_read"], values["density_loss_unread"]
        part = (values["density_loss"] - read) / (unread - read)
        counts.append(round(ROWS * part))
        assert ROWS * part == pytest.approx(counts[-1], abs=0.02)
    assert set(counts) == ({4} if share == 0.5 else {2, 3})
    assert np.mean(counts) == pytest.approx(ROWS * share, abs=0.3)


def test_microbatches_without_one_kind_of_row_add_up_to_the_batch(model, tokens):
    """Half the microbatches of one row have no row of either kind: their means alone would be NaN."""
    hidden, head, _ = eqx.filter_jit(hidden_and_head)(model, tokens)
    unread = hax.named(jnp.arange(ROWS) % 2 == 0, Batch)

    @eqx.filter_jit
    def of(first, count):
        here, ids, which = (array["batch", hax.dslice(first, count)] for array in (hidden, tokens, unread))
        _, metrics = density_loss(here, head, ids, config=LOSS.config, target=LOSS.target, unread=which)
        return mean_metrics(metrics)

    whole = unwrap_metrics(of(jnp.array(0), ROWS))
    folded = of(jnp.array(0), 1)
    for row in range(1, ROWS):
        each = of(jnp.array(row), 1)
        folded = {name: fold(folded[name], each[name]) for name in folded}
    folded = unwrap_metrics(folded)
    assert float(whole["unread_share"]) == 0.5
    for name in ("density_loss_unread", "density_loss_read", "unread_share", "density_loss"):
        assert float(folded[name]) == pytest.approx(float(whole[name]), rel=1e-5)
    assert whole["density_loss_unread"] != whole["density_loss_read"]
