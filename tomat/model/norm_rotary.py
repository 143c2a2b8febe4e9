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
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tomat.base.errors import TomatError
from tomat.model.splash import LANES, largest_divisor

ROWS = 64
"""Positions a kernel works on at a time: at D = 256 in float32 a value of them takes 16 of 64 vector registers."""

SUBLANES = 8
"""Rows of a vector register."""


@dataclass(frozen=True)
class QkRotaryConfig:
    """How queries and keys get their norm and rotary embedding."""

    kernel: Literal["xla", "pallas"] = "xla"
    """`xla`: Levanter's formulas. `pallas`: one kernel, beside splash attention, for head sizes that are multiples of
    128. It computes in float32, where Levanter rounds angles and normalised values to the compute type."""
    block_positions: int = 1024
    """Positions per step of the kernel; the largest divisor of the sequence up to this is used."""
    interpret: bool = False
    """Run the kernel in Pallas' interpreter on whatever platform there is: to check values without a TPU."""

    def __post_init__(self) -> None:
        if self.kernel not in ("xla", "pallas"):
            raise TomatError(f"model.qk_rotary.kernel is {self.kernel!r}; expected xla or pallas.")
        if self.block_positions < ROWS or self.block_positions % ROWS:
            raise TomatError(
                f"model.qk_rotary.block_positions is {self.block_positions}; expected a positive multiple of {ROWS}."
            )

    def check_head_size(self, head_size: int) -> None:
        """Refuse a head size that the kernel does not have.

        Raises:
            TomatError: The kernel is Pallas and `head_size` is no multiple of 128.
        """
        if self.kernel == "pallas" and head_size % LANES:
            raise TomatError(
                f"model.qk_rotary.kernel is pallas and the head size is {head_size}; the kernel takes multiples of "
                f"{LANES}. Use fewer, wider heads (model.num_heads), or qk_rotary.kernel: xla."
            )


@dataclass(frozen=True)
class _Spec:
    """What the compiled kernels depend on besides their arrays."""

    eps: float | None
    """Of the norm; None: no norm."""
    block: int
    interpret: bool


def norm_rotate(
    x: jax.Array,
    weight: jax.Array | None,
    cos: jax.Array,
    sin: jax.Array,
    eps: float,
    config: QkRotaryConfig,
) -> jax.Array:
    """Rotary embedding of the RMS norm of `x` over D.

    With n = weight x / sqrt(mean(x^2) + eps) (n = x without a weight), element d of the result is
    n_d cos_d + n_((d + D/2) mod D) sin_d.

    Args:
        x: `[B, H, S, D]`, of the compute type.
        weight: `[D]`; None: no norm.
        cos: Float32 `[S, D]`.
        sin: Float32 `[S, D]`, negative in the first half of D.
        eps: Of the norm.
        config: Most positions per step of the kernel, and whether it runs in Pallas' interpreter.

    Returns:
        `[B, H, S, D]` in the type of `x`. Differentiable by `x` and `weight`.

    Raises:
        TomatError: S is not a multiple of 64, or D not of 128.
    """
    S, D = x.shape[2:]
    if S % ROWS or D % LANES:
        raise TomatError(
            f"the norm and rotary kernel got {S} positions and a head size of {D}; expected multiples of {ROWS} and "
            f"{LANES}. Use model.qk_rotary.kernel: xla."
        )
    spec = _Spec(None if weight is None else eps, largest_divisor(S, config.block_positions, ROWS), config.interpret)
    w = jnp.ones((D,), x.dtype) if weight is None else weight
    return _norm_rotate(spec, x, w, cos, sin)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_rotate(spec: _Spec, x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    B, H, S, D = x.shape
    heads, table, vector = _block_specs(spec.block, D)
    return pl.pallas_call(
        partial(_forward_kernel, spec),
        grid=(S // spec.block, B, H),
        in_specs=[heads, vector, table, table],
        out_specs=heads,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=_cost(x, passes=2, flops_per_element=10),
        interpret=spec.interpret,
        name="norm_rotary_fwd",
    )(x, weight.astype(jnp.float32)[None], cos, sin)


def _forward(spec: _Spec, x: jax.Array, weight: jax.Array, cos: jax.Array, sin: jax.Array):
    return _norm_rotate(spec, x, weight, cos, sin), (x, weight, cos, sin)


def _backward(spec: _Spec, residuals: tuple[jax.Array, ...], by_output: jax.Array):
    x, weight, cos, sin = residuals
    B, H, S, D = x.shape
    heads, table, vector = _block_specs(spec.block, D)
    by_x, by_weight = pl.pallas_call(
        partial(_backward_kernel, spec),
        grid=(S // spec.block, B, H),
        in_specs=[heads, heads, vector, table, table],
        out_specs=[heads, pl.BlockSpec((SUBLANES, D), lambda s, b, h: (0, 0))],
        out_shape=[
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.ShapeDtypeStruct((SUBLANES, D), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3),
        cost_estimate=_cost(x, passes=3, flops_per_element=20),
        interpret=spec.interpret,
        name="norm_rotary_bwd",
    )(by_output, x, weight.astype(jnp.float32)[None], cos, sin)
    return by_x, by_weight.sum(axis=0).astype(weight.dtype), None, None


_norm_rotate.defvjp(_forward, _backward)


def _block_specs(block: int, D: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Blocks of an array `[B, H, S, D]`, of a table `[S, D]` and of a vector `[1, D]`.

    Positions are the outermost dimension of the grid, so that a block of the tables is fetched once for all heads.
    """
    return (
        pl.BlockSpec((1, 1, block, D), lambda s, b, h: (b, h, s, 0)),
        pl.BlockSpec((block, D), lambda s, b, h: (s, 0)),
        pl.BlockSpec((1, D), lambda s, b, h: (0, 0)),
    )


def _cost(x: jax.Array, passes: int, flops_per_element: int) -> pl.CostEstimate:
    """For XLA's scheduler: `passes` readings and writings of all of `x`."""
    return pl.CostEstimate(
        flops=flops_per_element * x.size, bytes_accessed=passes * x.size * x.dtype.itemsize, transcendentals=0
    )


def _swap_halves(x: jax.Array) -> jax.Array:
    """Element (d + D/2) mod D at d."""
    return pltpu.roll(x, x.shape[-1] // 2, x.ndim - 1)


def _normalised(spec: _Spec, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x / rms, and 1 / rms `[rows, 1]`."""
    assert spec.eps is not None
    inverse = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + spec.eps)
    return x * inverse, inverse


def _forward_kernel(spec: _Spec, x_ref, weight_ref, cos_ref, sin_ref, out_ref) -> None:
    def chunk(i, _):
        rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        n = x_ref[0, 0, rows, :].astype(jnp.float32)
        if spec.eps is not None:
            n = _normalised(spec, n)[0] * weight_ref[...]
        rotated = n * cos_ref[rows, :] + _swap_halves(n) * sin_ref[rows, :]
        out_ref[0, 0, rows, :] = rotated.astype(out_ref.dtype)

    lax.fori_loop(0, spec.block // ROWS, chunk, None)


def _backward_kernel(spec: _Spec, by_out_ref, x_ref, weight_ref, cos_ref, sin_ref, by_x_ref, by_weight_ref) -> None:
    first = (pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (pl.program_id(2) == 0)

    # The gradient of the weight stays in VMEM through all of the grid, whose steps run one after the other.
    @pl.when(first)
    def _():
        by_weight_ref[...] = jnp.zeros_like(by_weight_ref)

    def chunk(i, by_weight):
        rows = pl.ds(pl.multiple_of(i * ROWS, ROWS), ROWS)
        by_out = by_out_ref[0, 0, rows, :].astype(jnp.float32)
        by_n = by_out * cos_ref[rows, :] + _swap_halves(by_out * sin_ref[rows, :])
        if spec.eps is None:
            by_x = by_n
        else:
            unit, inverse = _normalised(spec, x_ref[0, 0, rows, :].astype(jnp.float32))
            by_weight += jnp.sum((by_n * unit).reshape(-1, SUBLANES, by_n.shape[-1]), axis=0)
            by_unit = by_n * weight_ref[...]
            by_x = inverse * (by_unit - unit * jnp.mean(by_unit * unit, axis=-1, keepdims=True))
        by_x_ref[0, 0, rows, :] = by_x.astype(by_x_ref.dtype)
        return by_weight

    by_weight_ref[...] += lax.fori_loop(0, spec.block // ROWS, chunk, jnp.zeros(by_weight_ref.shape, jnp.float32))
