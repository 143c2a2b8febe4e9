"""Matrix products of a linear layer in int8, for training.

The matrix units of a v6e do twice as many products a second on int8 as on bfloat16 (`hardware/chip_table.py`). Both
operands are cut to 8 bits where they are multiplied, and nowhere else: parameters, gradients, optimizer state and
checkpoints are as without. Each row of the input and each column of the weights has its own scale; sums are int32. The
gradients are straight-through: those of the product of the numbers before they were cut (Bengio et al. 2013,
arXiv:1308.3432; in int8 training: SwitchBack, Wortsman et al. 2023, arXiv:2304.13013, which leaves the gradient of the
weights in 16 bits too).
"""

import importlib.util
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.lax import DotDimensionNumbers
from jax.typing import DTypeLike

from tomat.base.errors import TomatError

_LARGEST_AT_127 = f"absmax,{127.5 / 127}"
"""qwix's own `absmax` puts the largest magnitude at 127.5, where the last bit of a division decides between two codes:
the same model compiled in another way, its layers in a loop or one by one, gave gradients 2 % apart."""


class Int8DotGeneral(eqx.Module):
    """Takes the place of `jax.lax.dot_general` in a Haliax `Linear`. It has no arrays: no checkpoint knows of it."""

    products: str = eqx.field(static=True)

    @staticmethod
    def init(products: str) -> "Int8DotGeneral":
        if importlib.util.find_spec("qwix") is None:
            said = f"model.int8_matmuls is {products}, which needs qwix, and that is not installed"
            raise TomatError(f"{said}; install tomat's extra `compress`, or leave model.int8_matmuls out.")
        return Int8DotGeneral(products)

    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: Any,
        precision: lax.PrecisionLike = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> jax.Array:
        """The product of the input [..., in] with the weights, `in` anywhere among their axes, in Haliax's order of
        operands; `precision` is that of the gradients in floating point."""
        (lhs_in, rhs_in), batch = dimension_numbers
        assert not any(batch)  # of a linear layer
        dims: DotDimensionNumbers = ((tuple(lhs_in), tuple(rhs_in)), ((), ()))
        dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
        return _product(lhs, rhs, _How(dims, precision, dtype, out_sharding), self.products)


class _How(NamedTuple):
    """All arguments of a product but its operands, as `jax.lax.dot_general` takes them."""

    dims: DotDimensionNumbers
    precision: lax.PrecisionLike
    dtype: DTypeLike
    out_sharding: Any = None


def int8_dot_general(
    lhs: jax.Array, rhs: jax.Array, dims: DotDimensionNumbers, dtype: DTypeLike, out_sharding: Any = None
) -> jax.Array:
    """The product of both in int8, summed in int32, without batch axes. Each slice along the axes that are contracted
    is divided by its largest magnitude over 127 and rounded to nearest. The error, for Gaussian numbers, is the step
    over sqrt(12) for each operand: 1 % of the result where 1,000 to 10,000 are summed."""
    import qwix

    def quantised(x: jax.Array, contracted: Any) -> Any:
        # In float32: qwix's scales have the type of the array, and would be multiplied with the sums in that type.
        kept = [axis for axis in range(x.ndim) if axis not in contracted]
        return qwix.quantize(x.astype(jnp.float32), jnp.int8, channelwise_axes=kept, calibration_method=_LARGEST_AT_127)

    (lhs_in, rhs_in), _ = dims
    return qwix.dot_general(
        quantised(lhs, lhs_in), quantised(rhs, rhs_in), dims, preferred_element_type=dtype, out_sharding=out_sharding
    )


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _product(lhs: jax.Array, rhs: jax.Array, how: _How, products: str) -> jax.Array:
    del products  # for the backward pass alone
    return int8_dot_general(lhs, rhs, how.dims, how.dtype, how.out_sharding)


def _forward(lhs, rhs, how, products):
    # What is kept for the backward pass is what the float product keeps, so that checkpoint policies keep the same.
    return _product(lhs, rhs, how, products), (lhs, rhs)


def _backward(how, products, kept, gradient):
    lhs, rhs = kept

    def product(lhs, rhs):
        return lax.dot_general(lhs, rhs, how.dims, how.precision, how.dtype, out_sharding=how.out_sharding)

    (of_rhs,) = jax.linear_transpose(lambda rhs: product(lhs, rhs), rhs)(gradient)
    if products == "forward_and_inputs":
        return _input_gradient(gradient, rhs, how.dims, lhs.ndim).astype(lhs.dtype), of_rhs
    (of_lhs,) = jax.linear_transpose(lambda lhs: product(lhs, rhs), lhs)(gradient)
    return of_lhs, of_rhs


def _input_gradient(gradient: jax.Array, rhs: jax.Array, dims: DotDimensionNumbers, ndim: int) -> jax.Array:
    """Gradient of the input, from that of the result: a product over the axes that weights and result share."""
    (lhs_in, rhs_in), _ = dims
    rhs_out = [axis for axis in range(rhs.ndim) if axis not in rhs_in]
    n_rows = gradient.ndim - len(rhs_out)
    over = (tuple(range(n_rows, gradient.ndim)), tuple(rhs_out))
    found = int8_dot_general(gradient, rhs, (over, ((), ())), gradient.dtype)
    # Axes of `found`: those of the input that were not contracted, then those of the weights that were, in order.
    rows = [axis for axis in range(ndim) if axis not in lhs_in]
    order = [*rows, *(lhs_in[rhs_in.index(axis)] for axis in sorted(rhs_in))]
    return found.transpose([order.index(axis) for axis in range(ndim)])


_product.defvjp(_forward, _backward)
