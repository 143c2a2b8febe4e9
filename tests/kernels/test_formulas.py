"""Operations from their formula: what they compute, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.kernels.formulas import CHUNKED_LOSS, blockwise_loss, formula
from tomat.kernels.timings import KernelTiming

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
