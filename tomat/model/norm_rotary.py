"""RMS norm, rotary embedding and scale of queries or keys in one pass over them, as a Pallas kernel for TPUs.

Left to XLA (libtpu 0.0.46) the norm, the swapped halves and the sum are three kernels that each read and write all
queries in HBM, before attention and again, with more of them, in the backward pass: 64 of 391 ms of the best 200M step
on a v6e-16 (model time, `docs/tracking/mfu-campaign.md`). Here the projection's output is read once and what attention
takes is written once, both laid out by heads: with positions before the heads, libtpu 0.0.46 writes the projection in
another order and copies it.

Axis letters: B batch, S positions, H heads, D head size.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tomat.base.errors import TomatError
from tomat.model.tiles import LANES, ROTARY_ROWS, QkRotaryConfig, largest_divisor

SUBLANES = 8


@dataclass(frozen=True)
class Rotary:
    """Norm and rotary embedding of queries and keys, as kernels take them."""

    q_weight: jax.Array
    """Float32 `[head_size]`: weight of the norm of the queries; ones without a norm."""
    k_weight: jax.Array
    table: jax.Array
    """Float32 `[position, head_size]`, cosines and, in the second half, sines."""
    eps: float | None
    """Epsilon of both norms; None: no norm."""


@dataclass(frozen=True)
class _Spec:
    eps: float | None
    block: int
    interpret: bool


def norm_rotate(
    x: jax.Array, weight: jax.Array, table: jax.Array, eps: float | None, config: QkRotaryConfig
) -> jax.Array:
    """Rotary embedding of the RMS norm of `x` `[B, H, S, D]` over D, in its type; differentiable by `x` and `weight`.

    With n = weight x / sqrt(mean(x^2) + eps) (weight x where eps is None), whose halves are (a, b), the result is (a
    cos - b sin, b cos + a sin); cosines and, in the second half of D, sines are in `table`, float32 `[S, D]`.
    """
    positions = x.shape[2]
    if positions % ROTARY_ROWS:
        said = f"the norm and rotary kernel got {positions} positions; expected a multiple of {ROTARY_ROWS}"
        raise TomatError(f"{said}. Choose another length, or model.qk_rotary.kernel: xla.")
    spec = _Spec(eps, largest_divisor(positions, config.block_positions, ROTARY_ROWS), config.interpret)
    return _norm_rotate(spec, x, weight, table)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_rotate(spec: _Spec, x: jax.Array, weight: jax.Array, table: jax.Array) -> jax.Array:
    B, H, S, D = x.shape
    heads, positions, vector = _block_specs(spec.block, D)
    return pl.pallas_call(
        partial(_forward_kernel, spec),
        grid=(S // spec.block, B, H),
        in_specs=[heads, vector, positions],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=_cost(x, passes=2, flops_per_element=10),
        interpret=spec.interpret,
        name="norm_rotary_fwd",
    )(x, weight.astype(jnp.float32)[None], table)


def _backward(spec: _Spec, residuals: tuple[jax.Array, ...], by_output: jax.Array):
    x, weight, table = residuals
    B, H, S, D = x.shape
    heads, positions, vector = _block_specs(spec.block, D)
    by_x, by_weight = pl.pallas_call(
        partial(_backward_kernel, spec),
        grid=(S // spec.block, B, H),
        in_specs=[heads, heads, vector, positions],
        out_specs=[heads, pl.BlockSpec((SUBLANES, D), lambda s, b, h: (0, 0))],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((SUBLANES, D), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=_cost(x, passes=3, flops_per_element=20),
        interpret=spec.interpret,
        name="norm_rotary_bwd",
    )(by_output, x, weight.astype(jnp.float32)[None], table)
    return by_x, by_weight.sum(axis=0).astype(weight.dtype), None


_norm_rotate.defvjp(lambda spec, *arrays: (_norm_rotate(spec, *arrays), arrays), _backward)


def _block_specs(block: int, D: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Blocks of an array `[B, H, S, D]`, of a table `[S, D]` and of a vector `[1, D]`. Positions are the outermost
    dimension of the grid, so that a block of the table is fetched once for all heads."""
    return (
        pl.BlockSpec((1, 1, block, D), lambda s, b, h: (b, h, s, 0)),
        pl.BlockSpec((block, D), lambda s, b, h: (s, 0)),
        pl.BlockSpec((1, D), lambda s, b, h: (0, 0)),
    )


def _cost(x: jax.Array, passes: int, flops_per_element: int) -> pl.CostEstimate:
    """Cost for XLA's scheduler: `x` is read or written `passes` times as a whole."""
    return pl.CostEstimate(flops=flops_per_element * x.size, bytes_accessed=passes * x.nbytes, transcendentals=0)


def _swap_halves(x: jax.Array) -> jax.Array:
    """Element (d + D/2) mod D at d."""
    return pltpu.roll(x, x.shape[-1] // 2, x.ndim - 1)


def _normalised(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """x / rms, and 1 / rms `[rows, 1]`."""
    inverse = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * inverse, inverse


def rotated(x: jax.Array, weight: jax.Array, table: jax.Array, eps: float | None) -> jax.Array:
    """The formula of `norm_rotate` inside a kernel, all in float32: `x` and `table` `[rows, D]`, `weight` `[1, D]`."""
    return _turn((x if eps is None else _normalised(x, eps)[0]) * weight, table, back=False)


def rotated_gradients(
    by_out: jax.Array, x: jax.Array, weight: jax.Array, table: jax.Array, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    """Gradients by `x`, `[rows, D]`, and by `weight`, `[8, D]`, to be summed over its rows, since a kernel sums
    registers and not their rows. `by_out` is the gradient by the result of `rotated`."""
    by_n = _turn(by_out, table, back=True)
    by_unit = by_n * weight
    unit, by_x = x, by_unit
    if eps is not None:
        unit, inverse = _normalised(x, eps)
        by_x = inverse * (by_unit - unit * jnp.mean(by_unit * unit, axis=-1, keepdims=True))
    return by_x, jnp.sum((by_n * unit).reshape(-1, SUBLANES, by_n.shape[-1]), axis=0)


def _turn(x: jax.Array, table: jax.Array, *, back: bool) -> jax.Array:
    """The halves (a, b) of `x` as (a cos - b sin, b cos + a sin), or `back` by the same angles."""
    D = x.shape[1]
    if D % (2 * LANES) == 0:  # halves are whole registers
        a, b, cos, sin = x[:, : D // 2], x[:, D // 2 :], table[:, : D // 2], table[:, D // 2 :]
        sin = -sin if back else sin
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
    other = _swap_halves(table)
    first = lax.broadcasted_iota(jnp.int32, table.shape, 1) < D // 2
    cos, sin = jnp.where(first, table, other), jnp.where(first, -other, table)
    return x * cos + _swap_halves(x) * (-sin if back else sin)


def _forward_kernel(spec: _Spec, x_ref, weight_ref, table_ref, out_ref) -> None:
    def chunk(i, _):
        rows = pl.ds(pl.multiple_of(i * ROTARY_ROWS, ROTARY_ROWS), ROTARY_ROWS)
        x = x_ref[0, 0, rows, :].astype(jnp.float32)
        out_ref[0, 0, rows, :] = rotated(x, weight_ref[...], table_ref[rows, :], spec.eps).astype(out_ref.dtype)

    lax.fori_loop(0, spec.block // ROTARY_ROWS, chunk, None)


def _backward_kernel(spec: _Spec, by_out_ref, x_ref, weight_ref, table_ref, by_x_ref, by_weight_ref) -> None:
    first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (pl.program_id(2) == 0)

    # The gradient of the weight stays in VMEM through all of the grid, whose steps run one after the other.
    @pl.when(first)
    def _():
        by_weight_ref[...] = jnp.zeros_like(by_weight_ref)

    def chunk(i, by_weight):
        rows = pl.ds(pl.multiple_of(i * ROTARY_ROWS, ROTARY_ROWS), ROTARY_ROWS)
        by_out, x = (ref[0, 0, rows, :].astype(jnp.float32) for ref in (by_out_ref, x_ref))
        by_x, more = rotated_gradients(by_out, x, weight_ref[...], table_ref[rows, :], spec.eps)
        by_x_ref[0, 0, rows, :] = by_x.astype(by_x_ref.dtype)
        return by_weight + more

    by_weight_ref[...] += lax.fori_loop(
        0, spec.block // ROTARY_ROWS, chunk, jnp.zeros(by_weight_ref.shape, jnp.float32)
    )
