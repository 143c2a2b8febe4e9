"""The divergence from a teacher: the formula, its gradient, blocks that change nothing."""

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import NamedArray

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import DENSITY_START, PAD
from tomat.model.loss.interface import DensityTarget
from tomat.predict.distillation.subject import HiddenHead, divergence, teacher_divergence

BINS, ROWS = 6, DENSITY_START + 6
TARGET = DensityTarget(BINS, np.arange(1.0, BINS + 1.0))
RANDOM = np.random.default_rng(0)
BATCH, POSITION, VOCAB = hax.Axis("batch", 3), hax.Axis("position", 10), hax.Axis("vocab", ROWS)


def model_of(embed: int, rows: hax.Axis = VOCAB) -> HiddenHead:
    Embed = hax.Axis("embed", embed)
    hidden, head = (
        RANDOM.normal(size=[axis.size for axis in axes]) for axes in ((BATCH, POSITION, Embed), (rows, Embed))
    )
    return (
        NamedArray(jnp.asarray(hidden, jnp.float32), (BATCH, POSITION, Embed)),
        NamedArray(jnp.asarray(head, jnp.float32), (rows, Embed)),
    )


def tokens_of() -> NamedArray:
    ids = RANDOM.integers(DENSITY_START, ROWS, (3, 10))
    ids[:, :4], ids[1, 7:], ids[2] = 5, PAD, 5
    return NamedArray(jnp.asarray(ids, jnp.int32), (BATCH, POSITION))


STUDENT, TEACHER, TOKENS = model_of(4), model_of(8), tokens_of()


def value(student: HiddenHead, top_k: int = BINS, temperature: float = 1.0, block: int = 4) -> jax.Array:
    return teacher_divergence(
        student, TEACHER, TOKENS, target=TARGET, top_k=top_k, temperature=temperature, block_positions=block
    )


def by_hand(top_k: int, temperature: float) -> float:
    sums = []
    for row in range(3):
        own = []
        for position in range(9):
            if int(TOKENS.array[row, position + 1]) < DENSITY_START:
                continue
            p, q = (
                np.exp(np.asarray(head.array[DENSITY_START:] @ hidden.array[row, position], np.float64) / temperature)
                for hidden, head in (TEACHER, STUDENT)
            )
            p, q = p / p.sum(), q / q.sum()
            order = np.argsort(-p)
            p, q = ([*x[order[:top_k]], *([x[order[top_k:]].sum()] if top_k < BINS else [])] for x in (p, q))
            own.append(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))
        sums.append(np.mean(own) if own else 0.0)
    return float(np.mean(sums))


@pytest.mark.parametrize("top_k, temperature, block", [(6, 1.0, 4), (2, 1.0, 10), (1, 3.0, 64), (9, 2.0, 3)])
def test_it_is_the_formula(top_k, temperature, block):
    assert float(value(STUDENT, top_k, temperature, block)) == pytest.approx(by_hand(top_k, temperature), rel=1e-5)


def test_the_gradient_is_that_of_the_formula_and_the_teacher_has_none():
    def plain(head: jax.Array) -> jax.Array:
        logits = jnp.einsum("bpe,ve->bpv", STUDENT[0].array, head)[:, :-1, DENSITY_START:]
        teacher = jnp.einsum("bpe,ve->bpv", TEACHER[0].array, TEACHER[1].array)[:, :-1, DENSITY_START:]
        p, q = jax.nn.softmax(teacher), jax.nn.log_softmax(logits)
        density = (TOKENS.array[:, 1:] >= DENSITY_START).astype(jnp.float32)
        each = jnp.sum(p * (jnp.log(p) - q), axis=-1) * density
        return jnp.mean(each.sum(axis=1) / jnp.maximum(density.sum(axis=1), 1))

    found = jax.grad(lambda head: value((STUDENT[0], NamedArray(head, STUDENT[1].axes))))(STUDENT[1].array)
    np.testing.assert_allclose(found, jax.grad(plain)(STUDENT[1].array), atol=1e-6)
    assert np.abs(found).max() > 1e-3
    of_teacher = jax.grad(
        lambda head: teacher_divergence(
            STUDENT, (TEACHER[0], NamedArray(head, TEACHER[1].axes)), TOKENS, target=TARGET, top_k=2, temperature=1.0,
            block_positions=4,
        )
    )(TEACHER[1].array)  # fmt: skip
    assert not np.asarray(of_teacher).any()


def test_a_student_that_says_the_same_costs_nothing():
    assert float(value(TEACHER)) == pytest.approx(0.0, abs=1e-6)
    # Bins as probable as the last of the top are told apart too: no mass is left, and nothing is not a number.
    equal = jnp.zeros((2, BINS))
    assert np.allclose(divergence(equal, equal, 3), 0.0)
    assert np.isfinite(jax.grad(lambda x: divergence(x, equal, 3).sum())(equal + 1.0)).all()


def test_another_vocabulary_is_refused():
    with pytest.raises(TomatError, match=f"teacher's head has {ROWS:,} rows and the student's {ROWS + 1:,}"):
        value(model_of(4, hax.Axis("vocab", ROWS + 1)))
