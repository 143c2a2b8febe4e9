"""The optimizer's state in a type of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tomat.train.state_dtype import with_state_dtype

PARAMETERS = {"a": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "b": np.ones(5, np.float32)}


def steps(optimizer, parameters, number: int = 3):
    """Updates and states of some steps, in which the gradient is the cube of the parameters."""
    found = []
    state = optimizer.init(parameters)
    for _ in range(number):
        updates, state = optimizer.update(jax.tree.map(lambda x: x**3, parameters), state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        found.append((updates, state))
    return found


def moments(state):
    return [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 0]


@pytest.mark.parametrize("build", [optax.adam, optax.lion, optax.adafactor], ids=lambda build: build.__name__)
def test_in_the_parameters_type_nothing_changes(build):
    parameters = jax.tree.map(jnp.asarray, PARAMETERS)
    for one, other in zip(
        steps(build(1e-2), parameters), steps(with_state_dtype(build(1e-2), "float32"), parameters), strict=True
    ):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_moments_are_rounded_between_steps_and_nothing_else_is():
    """The formula of Adam, with its moments rounded to bfloat16 after each step."""
    optimizer = with_state_dtype(optax.adam(0.1, b1=0.9, b2=0.95, eps=1e-8), "bfloat16")
    parameters = {"a": jnp.asarray(PARAMETERS["a"])}
    mu = nu = np.zeros((3, 4), np.float32)
    value = PARAMETERS["a"]
    for number, (updates, state) in enumerate(steps(optimizer, parameters), 1):
        gradient = value**3
        mu, nu = 0.9 * mu + 0.1 * gradient, 0.95 * nu + 0.05 * gradient**2
        update = -0.1 * (mu / (1 - 0.9**number)) / (np.sqrt(nu / (1 - 0.95**number)) + 1e-8)
        np.testing.assert_allclose(updates["a"], update, rtol=1e-4)
        mu, nu = (np.asarray(jnp.asarray(one, jnp.bfloat16), np.float32) for one in (mu, nu))
        assert all(leaf.dtype == jnp.bfloat16 for leaf in moments(state)) and len(moments(state)) == 2
        assert updates["a"].dtype == jnp.float32 and state[0].count.dtype == jnp.int32 and int(state[0].count) == number
        value = value + np.asarray(updates["a"])


def test_more_digits_than_the_parameters_have_are_kept():
    parameters = {"a": jnp.asarray(PARAMETERS["a"], jnp.bfloat16)}
    (updates, state), *_ = steps(with_state_dtype(optax.adam(0.1), "float32"), parameters)
    assert all(leaf.dtype == jnp.float32 for leaf in moments(state)) and updates["a"].dtype == jnp.bfloat16
