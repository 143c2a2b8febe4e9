import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from tomat.model.kept_gradient import with_kept_gradient

X = hax.named(jnp.linspace(-6.0, 6.0, 97).reshape(1, 97), (Axis("batch", 1), Axis("mlp", 97)))


def gradient(activation, x):
    return jax.grad(lambda array: jnp.sum(jnp.sin(activation(hax.named(array, x.axes)).array)))(x.array)


@pytest.mark.parametrize("activation", [hnn.silu, hnn.gelu, hnn.relu_squared, hnn.sigmoid])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_values_and_gradients_are_those_of_the_activation(activation, dtype):
    x, kept = X.astype(dtype), with_kept_gradient(activation)
    np.testing.assert_array_equal(kept(x).array, activation(x).array)
    assert kept(x).axes == x.axes
    tolerance = 1e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(
        gradient(kept, x).astype(np.float32), gradient(activation, x).astype(np.float32), atol=tolerance
    )


def test_the_backward_pass_is_one_product():
    _, pull_back = jax.vjp(lambda array: with_kept_gradient(hnn.silu)(hax.named(array, X.axes)).array, X.array)
    assert [equation.primitive.name for equation in jax.make_jaxpr(pull_back)(X.array).eqns] == ["mul"]


def test_what_is_kept_is_as_large_as_the_input():
    _, pull_back = jax.vjp(lambda array: with_kept_gradient(hnn.silu)(hax.named(array, X.axes)).array, X.array)
    assert sum(leaf.size for leaf in jax.tree.leaves(pull_back)) == X.array.size


def test_the_compiled_forward_pass_computes_the_derivative():
    """The barrier: without it XLA may compute it in the backward pass after all."""
    loss = jax.grad(lambda array: jnp.sum(with_kept_gradient(hnn.silu)(hax.named(array, X.axes)).array))
    assert "optimization_barrier" in jax.jit(loss).lower(X.array).as_text()


def test_an_activation_has_one_function_so_that_models_compare_equal():
    assert with_kept_gradient(hnn.silu) is with_kept_gradient(hnn.silu)
