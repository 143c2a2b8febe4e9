"""Operations that chips have timed and tokamax 0.0.12 has no more, from their formula.

`chunked_xla_linear_softmax_cross_entropy_loss` was in tokamax when its rows were timed (its repository at commit
6c65b547, `linear_softmax_cross_entropy_loss/chunked_xla.py`): the loss of a linear layer in blocks of rows and columns,
so that the logits of all never exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tomat.base.errors import TomatError
from tomat.perf.timed_kernels.timings import ARRAY, KernelTiming, array_shape

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32, "i32": jnp.int32}


def blockwise_loss(
    x: jax.Array, labels: jax.Array, w: jax.Array, *, block_rows: int, block_columns: int, mean: bool
) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of `x @ w`, summed or its mean, and the log-normaliser of each row; both in `x`'s type but for
    the loss, which is float32.

    Args:
        x: `[rows, width]`.
        labels: Column that is right, `[rows]`.
        w: `[width, columns]`.
        block_rows: Rows of which logits exist at one time.
        block_columns: Columns of the same.
        mean: Over the rows; else the sum.
    """
    n_rows, n_columns = x.shape[0], w.shape[1]
    # Of columns that are padding too, whose logit is 0: tokamax's operation counts them, and its time is at stake here.
    x = jnp.pad(x, ((0, -n_rows % block_rows), (0, 0)))
    labels = jnp.pad(labels, (0, -n_rows % block_rows))
    w = jnp.pad(w, ((0, 0), (0, -n_columns % block_columns)))
    real = (jnp.arange(x.shape[0]) < n_rows).astype(x.dtype)

    def of_rows(block: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        normalisers, loss = carry
        first_row = block * block_rows

        def of_columns(inner: jax.Array, inner_carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            normaliser, right = inner_carry
            first_column = inner * block_columns
            of_block = lax.dynamic_slice_in_dim(x, first_row, block_rows)
            columns = lax.dynamic_slice_in_dim(w, first_column, block_columns, axis=1)
            logits = (of_block @ columns).astype(x.dtype)
            place = lax.dynamic_slice_in_dim(labels, first_row, block_rows) - first_column
            normaliser = jnp.logaddexp(normaliser, jax.nn.logsumexp(logits, axis=-1))
            return normaliser, right + jnp.sum(logits * jax.nn.one_hot(place, block_columns, dtype=x.dtype), axis=-1)

        start = (jnp.full(block_rows, -jnp.inf, x.dtype), jnp.zeros(block_rows, x.dtype))
        normaliser, right = lax.fori_loop(0, w.shape[1] // block_columns, of_columns, start)
        counted = lax.dynamic_slice_in_dim(real, first_row, block_rows)
        normalisers = lax.dynamic_update_slice_in_dim(normalisers, normaliser, first_row, axis=0)
        return normalisers, loss + jnp.sum((normaliser - right) * counted)

    start = (jnp.zeros(x.shape[0], x.dtype), jnp.zeros((), x.dtype))
    normalisers, loss = lax.fori_loop(0, x.shape[0] // block_rows, of_rows, start)
    loss = loss / n_rows if mean else loss
    return loss.astype(jnp.float32), normalisers[:n_rows]


CHUNKED_LOSS = "chunked_xla_linear_softmax_cross_entropy_loss"
FORMULAS = (CHUNKED_LOSS,)
"""Operations that are built here."""


def formula(timing: KernelTiming) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The function of a timing whose operation is one of `FORMULAS`, and its arguments.

    Raises:
        TomatError: Arguments or settings that the operation does not have.
    """
    arguments, settings = dict(timing.arguments), dict(timing.settings)
    arrays = [_array(arguments.pop(name, None)) for name in ("x", "labels", "w")]
    reduction, residuals = arguments.pop("reduction", "sum"), arguments.pop("return_residuals", False)
    rows, columns = settings.pop("b_block_size", None), settings.pop("v_block_size", None)
    blocks = all(isinstance(block, int) and block > 0 for block in (rows, columns))
    if not blocks or None in arrays or arguments or settings or reduction not in ("sum", "mean"):
        raise TomatError(
            f"{timing.op} has the arrays x, labels and w ({', '.join(DTYPES)}), reduction, return_residuals and the "
            f"settings b_block_size and v_block_size; found {dict(timing.arguments)}, {dict(timing.settings)}"
        )
    run = partial(blockwise_loss, block_rows=rows, block_columns=columns, mean=reduction == "mean")
    return (run if residuals else lambda *values: run(*values)[0]), [array for array in arrays if array is not None]


def _array(text: object) -> jax.ShapeDtypeStruct | None:
    """`bf16[8,4]` as an array to be; None for what is none, or of another type than `DTYPES`."""
    shape, found = array_shape(text), ARRAY.fullmatch(text) if isinstance(text, str) else None
    if shape is None or found is None or found[1] not in DTYPES:
        return None
    return jax.ShapeDtypeStruct(shape, DTYPES[found[1]])
