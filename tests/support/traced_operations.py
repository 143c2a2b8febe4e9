"""What a model's traced gradient consists of."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from levanter.models.lm_model import LmConfig

from tomat.model.any_decoder import build_mask, causal_activations


def shapes_of(config: LmConfig, Vocab: hax.Axis) -> Any:
    """The model of `config` with shapes for arrays."""
    return eqx.filter_eval_shape(lambda: config.build(Vocab, key=jax.random.PRNGKey(0)))


def random_model(config: LmConfig, Vocab: hax.Axis) -> Any:
    """The model of `config` with random weights, norms included; drawn by NumPy, which compiles nothing."""
    arrays, rest = eqx.partition(shapes_of(config, Vocab), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    rng = np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(scale=0.3, size=leaf.shape), leaf.dtype), arrays)
    return eqx.combine(drawn, rest)


def xla_flops(config: LmConfig, Vocab: hax.Axis, batch: int, seq_len: int, gradient: bool) -> float:
    """What XLA counts in a forward pass, or value and gradient, with logits of all ids, before (after) it optimises.

    Besides matrix multiplications that is one FLOP for each element of each arithmetic operation (not for exp and its
    like).
    """
    parameters, static = eqx.partition(shapes_of(config, Vocab), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def loss(parameters: Any, tokens: hax.NamedArray) -> jax.Array:
        model = eqx.combine(parameters, static)
        hidden = model.activations(tokens, attn_mask=build_mask(config))
        return hax.mean(hax.square(hax.dot(hidden, model.get_lm_head(), axis="embed"))).scalar()

    axes = hax.Axis("batch", batch), hax.Axis("position", seq_len)
    tokens = hax.NamedArray(jax.ShapeDtypeStruct((batch, seq_len), jnp.int32), axes)
    if gradient:
        return jax.jit(jax.value_and_grad(loss)).lower(parameters, tokens).compile().cost_analysis()["flops"]
    return jax.jit(loss).lower(parameters, tokens).cost_analysis()["flops"]


def gradient_function(config: LmConfig, Vocab: hax.Axis, tokens: hax.NamedArray) -> tuple[Callable[[Any], Any], Any]:
    """(function of the model's arrays that gives the gradient of a scalar of the activations, shapes of the arrays)."""
    arrays, rest = eqx.partition(shapes_of(config, Vocab), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def scalar(arrays: Any) -> jax.Array:
        return (causal_activations(eqx.combine(arrays, rest), tokens).array ** 2).sum()

    return jax.grad(scalar), arrays


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every operation, bodies of loops and kernels included, each once."""
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def operations(config: LmConfig, Vocab: hax.Axis, tokens: hax.NamedArray) -> Counter:
    """How often each operation stands in the traced gradient, products by the type of their operands too."""
    gradient, arrays = gradient_function(config, Vocab, tokens)
    counts: Counter = Counter()
    for equation in equations(jax.make_jaxpr(gradient)(arrays).jaxpr):
        counts[equation.primitive.name] += 1
        if equation.primitive.name == "dot_general":
            counts[f"dot_general {equation.invars[0].aval.dtype}"] += 1
    return counts
