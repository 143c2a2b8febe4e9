"""The optimizer's moments in a type of their own between steps, to save memory or to keep more digits."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import optax


def with_state_dtype(optimizer: optax.GradientTransformation, dtype: str) -> optax.GradientTransformation:
    """`optimizer` with the arrays of its state kept as `dtype` between steps.

    Within a step they are float32. Scalars (learning rates, counters) and whole numbers stay what they are, and updates
    have the type of the parameters.

    Args:
        optimizer: What updates.
        dtype: Such as `bfloat16`, in which a moment has 8 binary digits: one that changes by less than 1/256 of itself
            in a step stays what it was.
    """
    inner = optax.with_extra_args_support(optimizer)
    kept = jnp.dtype(dtype)

    def cast_state(state: Any, to: jnp.dtype) -> Any:
        def one(leaf: Any) -> Any:
            is_moment = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.ndim > 0
            return leaf.astype(to) if is_moment else leaf

        return jax.tree.map(one, state)

    def init(params: optax.Params) -> Any:
        return cast_state(inner.init(params), kept)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any):
        new_updates, new_state = inner.update(updates, cast_state(state, jnp.dtype("float32")), params, **extra_args)
        if params is not None:
            new_updates = jax.tree.map(lambda new, old: new.astype(old.dtype), new_updates, params)
        return new_updates, cast_state(new_state, kept)

    return optax.GradientTransformationExtraArgs(init, cast(Any, update))
