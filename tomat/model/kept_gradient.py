"""An activation whose derivative is computed beside its value, and kept for the backward pass.

JAX keeps what went into an activation and computes the derivative from it again, in the backward pass. XLA's CPU
compiler (jaxlib 0.11.1) fuses that with the copy that transposes the gradient for the weights' product, and the fused
loop runs in one thread, without vectors: 20 of the 214 ms of the demo's step for a million values. A derivative that
is there already leaves a product of two arrays. What is kept has the same size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from haliax import NamedArray


@functools.cache
def with_kept_gradient(activation: Callable[[jax.Array], jax.Array]) -> Callable[[NamedArray], NamedArray]:
    """`activation` with the same values and, to rounding, the same gradients.

    The same function for the same `activation`: models keep it in their structure, which is compared.

    Args:
        activation: Of one value, for arrays of any shape, such as `haliax.nn.silu`.
    """

    @jax.custom_vjp
    def kept(x: jax.Array) -> jax.Array:
        return activation(x)

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Without the barrier XLA moves the derivative into the backward pass again.
        return jax.lax.optimization_barrier(jax.jvp(activation, (x,), (jnp.ones_like(x),)))

    def backward(derivative: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
        return (gradient * derivative,)

    kept.defvjp(forward, backward)
    return lambda x: NamedArray(kept(x.array), x.axes)
