"""Muon by way of Gram matrices as `optimizer.type: gram_muon`: Levanter's Muon, in fewer and larger products.

Muon makes each update X [rows, columns] orthogonal by steps X <- a X + (b A + c A A) X with A = X X^T
(Newton-Schulz). Each is a polynomial of A times X, so that their product can be found in matrices [rows, rows] alone and
be applied once (Gram Newton-Schulz, dao-lab.ai/blog/2026/gram-newton-schulz). With four times as many columns as rows
that is two thirds of the FLOPs. Matrices of one shape, those of all layers, are one stack, whose products are one
operation.

A checkpoint of `muon` continues as `gram_muon`, and the other way: what is kept between steps is the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from haliax import NamedArray
from haliax.nn import Linear
from jax.sharding import PartitionSpec
from levanter.optim.config import OptimizerConfig
from levanter.optim.muon import MuonConfig, scale_with_muon
from levanter.optim.util import NEWTON_SCHULZ_COEFFICIENTS, flatten_linear_layers, unflatten_linear_layers

GRAM_STEPS = 3
"""Steps from one Gram matrix; then a new one is taken, of the matrix as it is by then. All five from one lose small
singular values: of 128 x 512 matrices with singular values over four decades, in float32, the error was 150e-6 by one
Gram matrix, 5.7e-6 with a new one after three steps and 4.8e-6 by Newton-Schulz itself (relative, against float64)."""

_PRECISION = jax.lax.Precision.HIGHEST
"""With products of bfloat16 numbers, a TPU's own for float32, the same error was 7e-2, and Newton-Schulz's 0.7e-2."""


@OptimizerConfig.register_subclass("gram_muon")
@dataclass(frozen=True)
class GramMuonConfig(MuonConfig):
    """Levanter's Muon and its fields. The same updates to the rounding of float32."""

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        """The optimizer of so many steps."""

        # As Levanter's `MuonConfig.build`, which has no place for another orthogonalisation (marin-levanter 0.2.227).
        def optimizer(learning_rate: Any, adam_lr: Any) -> optax.GradientTransformation:
            decay_mask = self.build_weight_decay_mask()
            # No step of Newton-Schulz: the momentum, each matrix divided by its norm, times the scale of its shape.
            momentum = scale_with_muon(
                self.momentum, self.nesterov, 0, self.muon_epsilon, self.use_kimi_scaling, self.coefficient_type
            )
            of_matrices = [momentum, optax.stateless(self._orthogonal)]
            if self.weight_decay > 0:
                of_matrices.append(optax.add_decayed_weights(self.weight_decay, decay_mask))
            of_matrices.append(optax.scale(-learning_rate))
            of_others = [optax.clip_by_global_norm(self.max_grad_norm)] if self.max_grad_norm else []
            of_others.append(optax.scale_by_adam(self.beta1, self.beta2, self.epsilon))
            decay = self.weight_decay if self.adam_weight_decay is None else self.adam_weight_decay
            if decay > 0:
                of_others.append(optax.add_decayed_weights(decay, decay_mask))
            of_others.append(optax.scale(-adam_lr))
            return optax.multi_transform(
                {"muon": optax.chain(*of_matrices), "adamw": optax.chain(*of_others)},
                partial(self.create_mask, use_kimi_scaling=self.use_kimi_scaling),
            )

        rates = {
            "learning_rate": self.lr_scheduler(num_train_steps),
            "adam_lr": self.lr_scheduler(num_train_steps, override_lr=self.adam_lr),
        }
        return optax.inject_hyperparams(optimizer)(**rates)

    def _orthogonal(self, updates: optax.Updates, params: optax.Params | None) -> optax.Updates:
        """Orthogonal matrices in the place of those of `scale_with_muon`, with the same scale."""
        table = NEWTON_SCHULZ_COEFFICIENTS[self.coefficient_type]
        coefficients = [table[step % len(table)] for step in range(int(self.backend_steps))]
        flat = flatten_linear_layers(updates)
        leaves, tree = jax.tree.flatten(flat, is_leaf=_is_linear)
        places: dict[tuple[Any, ...], list[int]] = {}
        for place, leaf in enumerate(leaves):
            if _is_linear(leaf) and isinstance(leaf.weight, NamedArray):
                rows, columns = sorted(leaf.weight.array.shape[-2:])
                places.setdefault((rows, columns, leaf.weight.dtype), []).append(place)
        for alike in places.values():
            arrays = [leaves[place].weight.array for place in alike]
            scales = [self._scale(*array.shape[-2:]) for array in arrays]
            pairs = zip(arrays, scales, strict=True)
            stacked = newton_schulz(jnp.concatenate([_lying(array) / scale for array, scale in pairs]), coefficients)
            begin = 0
            for place, array, scale in zip(alike, arrays, scales, strict=True):
                end = begin + array.size // (array.shape[-1] * array.shape[-2])
                matrices = stacked[begin:end]
                if array.shape[-2] > array.shape[-1]:
                    matrices = matrices.mT
                weight = replace(leaves[place].weight, array=(matrices * scale).reshape(array.shape))
                leaves[place] = replace(leaves[place], weight=weight)
                begin = end
        return unflatten_linear_layers(updates, jax.tree.unflatten(tree, leaves))

    def _scale(self, rows: int, columns: int) -> float:
        """What `scale_with_muon` multiplies a matrix by."""
        if self.use_kimi_scaling:
            return 0.2 * max(rows, columns) ** 0.5
        return max(1.0, rows / columns) ** 0.5


def newton_schulz(matrices: jax.Array, coefficients: Sequence[tuple[float, float, float]]) -> jax.Array:
    """Steps of Newton-Schulz of each of a stack of matrices.

    Args:
        matrices: [matrix, row, column], no more rows than columns, norms of at most 1.
        coefficients: a, b and c of each step.

    Returns:
        [matrix, row, column], with singular values near 1.
    """
    _, rows, columns = matrices.shape
    # Products of a step, in rows^3: 4 columns / rows + 2; of n steps from one Gram matrix: 4 columns / rows + 8 n - 6,
    # which is less from 3/2 on, whatever n from 2.
    span = GRAM_STEPS if 2 * columns > 3 * rows else 1
    for begin in range(0, len(coefficients), span):
        matrices = _steps(matrices, coefficients[begin : begin + span])
    return matrices


def _steps(matrices: jax.Array, coefficients: Sequence[tuple[float, float, float]]) -> jax.Array:
    """Steps from one Gram matrix."""
    gram = _product(matrices, matrices.mT)
    unit = jnp.eye(gram.shape[-1], dtype=gram.dtype)
    a, b, c = coefficients[0]
    if len(coefficients) == 1:
        return a * matrices + _product(b * gram + c * _product(gram, gram), matrices)
    whole = step = a * unit + b * gram + c * _product(gram, gram)
    for a, b, c in coefficients[1:]:
        gram = _product(step, _product(step, gram))  # of the matrix after the step before; all of these commute
        step = a * unit + b * gram + c * _product(gram, gram)
        whole = _product(step, whole)
    return _product(whole, matrices)


def _product(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.matmul(one, other, precision=_PRECISION)


def _lying(array: jax.Array) -> jax.Array:
    """[..., row, column] as a stack of matrices with no more rows than columns."""
    matrices = array.reshape(-1, *array.shape[-2:])
    if matrices.shape[1] > matrices.shape[2]:
        matrices = matrices.mT
    if not jax.sharding.get_abstract_mesh().empty:
        # As Levanter's Newton-Schulz splits them.
        matrices = jax.lax.with_sharding_constraint(matrices, PartitionSpec(None, None, ("data", "model")))
    return matrices


def _is_linear(node: Any) -> bool:
    return isinstance(node, Linear)
