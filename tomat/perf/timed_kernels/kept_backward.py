"""The backward pass of attention written out, from what its forward pass has kept.

tokamax 0.0.12 makes it with `jax.core.DropVar`, which JAX 0.11 has no more (`tokamax/_src/ad.py`), and has no way in to
give it another. Here the same is made with what JAX has for that: the backward pass that JAX derives, without what of
the forward pass it would compute again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var, jaxpr_as_fun

from tomat.base.errors import TomatError


def kept_backward(forward: Callable[..., tuple[Any, Any]], *inputs: Any) -> Callable[[Any, Any], tuple[Any, ...]]:
    """The backward pass of `forward` as a function of what it has kept and of the gradients of what it returned.

    Args:
        forward: Gives what it returns, and what it keeps: of its inputs, of what it returns, of what is between them.
        inputs: Arrays, trees of them, or their shapes.

    Returns:
        `(kept, gradients of the outputs) -> gradients of each input`.

    Raises:
        TomatError: What is kept does not suffice.
    """

    def both(inputs: tuple[Any, ...], d_out: Any) -> tuple[Any, tuple[Any, ...]]:
        _, backward, kept = jax.vjp(forward, *inputs, has_aux=True)
        return kept, backward(d_out)

    outputs, kept = jax.eval_shape(forward, *inputs)
    closed = jax.make_jaxpr(both)(inputs, outputs)
    whole: Jaxpr = closed.jaxpr
    n_inputs, n_kept = len(jax.tree.leaves(inputs)), len(jax.tree.leaves(kept))
    kept_places, gradients = whole.outvars[:n_kept], whole.outvars[n_kept:]
    # A constant that is kept, such as a mask, is known without.
    number_of = {
        place: number
        for number, place in enumerate(kept_places)
        if isinstance(place, Var) and place not in whole.constvars
    }
    given = [*number_of, *whole.invars[n_inputs:]]
    known = {*given, *whole.constvars}
    equations = []
    for equation in whole.eqns:
        if all(isinstance(place, Literal) or place in known for place in equation.invars):
            # What was kept is not overwritten by what computes it.
            made = [Var(place.aval) if place in number_of else place for place in equation.outvars]
            equations.append(equation.replace(outvars=made))
            known.update(made)
    if not all(isinstance(place, Literal) or place in known for place in gradients):
        raise TomatError("the backward pass needs more than what the forward pass keeps")
    run = jaxpr_as_fun(
        closed.replace(jaxpr=whole.replace(invars=given, outvars=gradients, eqns=equations, debug_info=None))
    )

    def backward(kept: Any, d_out: Any) -> tuple[Any, ...]:
        values = jax.tree.leaves(kept)
        found = run(*(values[number] for number in number_of.values()), *jax.tree.leaves(d_out))
        return jax.tree.unflatten(jax.tree.structure(inputs), found)

    return backward


def attention_backward(backward_op: type, forward_op: type) -> Callable[..., tuple[Any, None]]:
    """`_fwd` of tokamax's backward pass of attention written out, in the place of its own.

    Args:
        backward_op: `DotProductAttentionVjp`.
        forward_op: `DotProductAttention`.
    """

    @functools.wraps(backward_op._fwd)  # its signature says what a row may leave out
    def run(self, residuals, out, dout, q, k, v, *, bias, config, return_residuals, **arguments):
        del self, config
        if return_residuals or arguments["paging_info"] is not None:
            raise TomatError("a backward pass of attention has no residuals and no pages")

        def attend(q, k, v, bias):
            made, sums = forward_op()._fwd(q, k, v, bias=bias, return_residuals=True, config=None, **arguments)
            return made, (q, k, v, bias, made, sums)

        d_q, d_k, d_v, d_bias = kept_backward(attend, q, k, v, bias)((q, k, v, bias, out, residuals), dout)
        return {"q": d_q, "k": d_k, "v": d_v, "bias": d_bias}, None

    return run
