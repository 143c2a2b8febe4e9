"""Operations from their formula: what they compute, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.perf.timed_kernels.programs import CHUNKED_LOSS, blockwise_loss, formula, kept_backward
from tomat.perf.timed_kernels.timings import KernelTiming

CALL = {"x": "f32[48,16]", "labels": "i32[48]", "w": "bf16[16,96]", "reduction": "mean"}
BLOCKS = {"b_block_size": 16, "v_block_size": 32}


def timing(arguments: dict, settings: dict) -> KernelTiming:
    return KernelTiming(2, "v6e", CHUNKED_LOSS, arguments, settings, 1e-3, 1e-3, 1e-3, 5, None)


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("block_rows", "block_columns"), [(16, 32), (32, 96), (64, 32)])
def test_the_loss_in_blocks_is_that_of_all_logits(mean, block_rows, block_columns):
    one, two, three = jax.random.split(jax.random.key(0), 3)
    x, w = jax.random.normal(one, (48, 16)), jax.random.normal(two, (16, 96))
    labels = jax.random.randint(three, (48,), 0, 96)
    logits = x @ w
    each = jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    loss, normalisers = blockwise_loss(x, labels, w, block_rows=block_rows, block_columns=block_columns, mean=mean)
    np.testing.assert_allclose(loss, each.mean() if mean else each.sum(), rtol=1e-5)
    np.testing.assert_allclose(normalisers, jax.nn.logsumexp(logits, axis=-1), rtol=1e-5)


def test_a_row_becomes_its_function():
    run, arrays = formula(timing(CALL, BLOCKS))
    assert [(array.shape, str(array.dtype)) for array in arrays] == [
        ((48, 16), "float32"), ((48,), "int32"), ((16, 96), "bfloat16"),
    ]  # fmt: skip
    loss = jax.eval_shape(run, *arrays)
    assert (loss.shape, str(loss.dtype)) == ((), "float32")
    run, arrays = formula(timing({**CALL, "return_residuals": True}, BLOCKS))
    assert [each.shape for each in jax.eval_shape(run, *arrays)] == [(), (48,)]


@pytest.mark.parametrize(
    ("arguments", "settings"),
    [
        ({**CALL, "reduction": "none"}, BLOCKS), ({**CALL, "bias": "f32[3]"}, BLOCKS), (CALL, {}),
        (CALL, {**BLOCKS, "unroll": 2}), ({**CALL, "x": 3}, BLOCKS), (CALL, {**BLOCKS, "b_block_size": 0}),
        ({**CALL, "x": "f16[48,16]"}, BLOCKS),
    ],
)  # fmt: skip
def test_other_arguments_are_refused(arguments, settings):
    with pytest.raises(TomatError, match="b_block_size"):
        formula(timing(arguments, settings))


def test_a_backward_pass_of_what_is_kept_computes_nothing_again():
    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        inner = jnp.exp(x)
        out = jnp.tanh(inner @ w)
        return out, (inner, w, out)

    one, two, three = jax.random.split(jax.random.key(0), 3)
    x, w, d_out = jax.random.normal(one, (4, 8)), jax.random.normal(two, (8, 3)), jax.random.normal(three, (4, 3))
    out, backward, kept = jax.vjp(forward, x, w, has_aux=True)
    of_kept = kept_backward(forward, x, w)
    for found, expected in zip(of_kept(kept, d_out), backward(d_out), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    compiled = jax.jit(of_kept).lower(kept, d_out).compile().as_text()
    assert compiled is not None and "dot(" in compiled and "tanh(" not in compiled and "exponential(" not in compiled
    # Other values than those that the inputs have: it reads what it is given.
    assert not np.allclose(of_kept((*kept[:2], 0.5 * out), d_out)[0], backward(d_out)[0])


def test_what_is_not_kept_cannot_be_had_back():
    with pytest.raises(TomatError, match="needs more than what the forward pass keeps"):
        kept_backward(lambda x: (jnp.sin(x), ()), jnp.ones(3))


def test_a_constant_may_be_kept():
    mask = jnp.array([True, False, True])
    x, d_out = jnp.arange(3.0), jnp.ones(3)
    (gradient,) = kept_backward(lambda x: (jnp.where(mask, x * x, 0.0), (x, mask)), x)((x, mask), d_out)
    np.testing.assert_allclose(gradient, [0.0, 0.0, 4.0])
