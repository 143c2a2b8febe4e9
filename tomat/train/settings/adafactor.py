"""Adafactor (Shazeer & Stern 2018, arXiv:1804.04235) as `optimizer.type: adafactor`.

The second moments of a matrix are kept as the means of its rows and of its columns, whose product stands for them.
Formula and matrices (the two longest axes of an array) are those of `optax.adafactor`, as a test checks. It is written
anew for named arrays: means of rows have fewer axes than the parameter and must say which, or they could not be split
over devices. Scanned and unrolled layers are updated alike, so that either continues as the other.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from haliax.nn.scan import Stacked
from levanter.optim.config import OptimizerConfig

from tomat.base.config_keys import check_range
from tomat.base.errors import TomatError

SMALLEST_SCALE = 1e-3
"""Least root mean square of a parameter with `parameter_scale`: epsilon_2 of the paper, and what optax has."""


@OptimizerConfig.register_subclass("adafactor")
@dataclass(frozen=True)
class AdafactorConfig(OptimizerConfig):
    """Adafactor with Levanter's schedules and weight decay. Fields not described here are Levanter's."""

    learning_rate: float = 1e-2
    """The paper's largest step, relative to the parameter (`parameter_scale`)."""
    parameter_scale: bool = True
    """Multiply the learning rate by the root mean square of the parameter (of each layer), at least 0.001. False: take
    the learning rate as it is, as Adam does."""
    decay_rate: float = 0.8
    """At step t = 1, 2, ... the second moments are multiplied by 1 - t^-decay_rate; the rest is this step's share."""
    clipping_threshold: float | None = 1.0
    """Largest root mean square of the update of a parameter (of each layer), before the learning rate; None: none."""
    momentum: float | None = None
    """Decay of a moving mean of the updates, which takes as much memory as the parameters; None: none is kept."""
    min_dim_size_to_factor: int = 128
    """A matrix with fewer rows or columns than this has its second moments kept whole."""
    epsilon: float = 1e-30
    """Added to the square of a gradient."""

    def __post_init__(self) -> None:
        check_range("optimizer.", self, decay_rate=0, clipping_threshold=0, momentum=0, min_dim_size_to_factor=1)
        if self.momentum is not None and self.momentum >= 1:
            raise TomatError(f"optimizer.momentum is {self.momentum}; expected at least 0 and below 1.")
        if self.clipping_threshold == 0:
            raise TomatError("optimizer.clipping_threshold is 0, which allows no update; expected more, or null.")

    def build(self, num_train_steps: int) -> optax.GradientTransformation:
        # As in Levanter's own: what `inject_hyperparams` is given is logged.
        def optimizer(learning_rate: Any) -> optax.GradientTransformation:
            parts = [scale_by_adafactor(self)]
            if self.momentum is not None:
                parts.append(optax.ema(self.momentum, debias=False))
            if self.weight_decay > 0:
                parts.append(optax.add_decayed_weights(self.weight_decay, self.build_weight_decay_mask()))
            parts.append(optax.scale(-learning_rate))
            return optax.chain(*parts)

        return optax.inject_hyperparams(optimizer)(learning_rate=self.lr_scheduler(num_train_steps))


class Moments(NamedTuple):
    """Second moments of one parameter: their means over its longest and its second longest axis, or all of them."""

    rows: NamedArray | None
    columns: NamedArray | None
    whole: NamedArray | None


class AdafactorState(NamedTuple):
    count: jax.Array
    moments: Any
    """A tree like the parameters', `Moments` for each array."""


class _Updated(NamedTuple):
    update: NamedArray | jax.Array
    moments: Moments


def scale_by_adafactor(config: AdafactorConfig) -> optax.GradientTransformation:
    """Gradients divided by the root of their second moments, clipped and scaled as `config` says."""

    def begin(layers: tuple[str, ...], parameter: NamedArray | jax.Array) -> Moments:
        named = _named(parameter, layers)
        matrix = _matrix_of(named, layers, config.min_dim_size_to_factor)
        if matrix is None:
            return Moments(None, None, hax.zeros_like(named))
        columns, rows = (hax.zeros(tuple(axis for axis in named.axes if axis != one), named.dtype) for one in matrix)
        return Moments(rows, columns, None)

    def init(params: optax.Params) -> AdafactorState:
        return AdafactorState(jnp.zeros((), jnp.int32), _map(begin, params))

    def update(updates: optax.Updates, state: AdafactorState, params: optax.Params | None = None):
        if params is None:
            raise ValueError("Adafactor reads the parameters; give them to `update`.")
        kept = 1 - (state.count + 1).astype(jnp.float32) ** -config.decay_rate

        def one(
            layers: tuple[str, ...], gradient: NamedArray | jax.Array, old: Moments, parameter: NamedArray | jax.Array
        ) -> _Updated:
            named, weights = _named(gradient, layers), _named(parameter, layers)
            matrix = _matrix_of(weights, layers, config.min_dim_size_to_factor)
            scaled, moments = _divided(named, old, matrix, kept, config.epsilon)
            axes = tuple(axis.name for axis in weights.axes if axis.name not in layers)
            if config.clipping_threshold is not None:
                scaled = scaled / hax.maximum(_root_mean_square(scaled, axes) / config.clipping_threshold, 1.0)
            if config.parameter_scale:
                scaled = scaled * hax.maximum(_root_mean_square(weights, axes), SMALLEST_SCALE)
            scaled = scaled.rearrange(named.axes).astype(named.dtype)
            return _Updated(scaled if isinstance(gradient, NamedArray) else scaled.array, moments)

        both = _map(one, updates, state.moments, params)
        scaled, moments = (
            jax.tree.map(lambda pair, name=name: getattr(pair, name), both, is_leaf=lambda x: isinstance(x, _Updated))
            for name in _Updated._fields
        )
        return scaled, AdafactorState(cast(jax.Array, optax.safe_increment(state.count)), moments)

    return optax.GradientTransformation(init, cast(Any, update))


def _map(function: Callable[..., Any], tree: Any, *rest: Any, layers: tuple[str, ...] = ()) -> Any:
    """`function(layers, array, *others)` for each array of `tree`; `layers` are the axes that count its layers."""

    def one(node: Any, *others: Any) -> Any:
        if not isinstance(node, Stacked):
            return function(layers, node, *others)
        within = (*layers, node.Block.name)
        return replace(node, stacked=_map(function, node.stacked, *(each.stacked for each in others), layers=within))

    return jax.tree.map(one, tree, *rest, is_leaf=lambda node: isinstance(node, NamedArray | Stacked))


def _named(array: NamedArray | jax.Array, layers: tuple[str, ...]) -> NamedArray:
    """`array`; if it has no names, with names that map to no device. The layers of its stacks are its first axes."""
    if isinstance(array, NamedArray):
        return array
    names = (*layers, *(f"axis_{index}" for index in range(array.ndim - len(layers))))
    return NamedArray(array, tuple(Axis(name, size) for name, size in zip(names, array.shape, strict=True)))


def _matrix_of(parameter: NamedArray, layers: tuple[str, ...], least: int) -> tuple[Axis, Axis] | None:
    """The second longest and the longest axis (the later of equal ones); None if one is missing or too short."""
    axes = sorted((axis for axis in parameter.axes if axis.name not in layers), key=lambda axis: axis.size)
    return (axes[-2], axes[-1]) if len(axes) > 1 and axes[-2].size >= least else None


def _divided(
    gradient: NamedArray, old: Moments, matrix: tuple[Axis, Axis] | None, kept: jax.Array, epsilon: float
) -> tuple[NamedArray, Moments]:
    """The gradient over the root of its second moments, and the new moments; `kept` is the share of the old ones."""
    square = gradient * gradient + epsilon

    def moved(before: NamedArray | None, now: NamedArray) -> NamedArray:
        assert before is not None  # the same `matrix` as where they began
        return (before * kept + now.rearrange(before.axes) * (1 - kept)).astype(before.dtype)

    if matrix is None:
        whole = moved(old.whole, square)
        return gradient * hax.rsqrt(whole), Moments(None, None, whole)
    shorter, longer = matrix
    rows, columns = moved(old.rows, hax.mean(square, longer)), moved(old.columns, hax.mean(square, shorter))
    divided = gradient * hax.rsqrt(rows / hax.mean(rows, shorter)) * hax.rsqrt(columns)
    return divided, Moments(rows, columns, None)


def _root_mean_square(x: NamedArray, axes: tuple[str, ...]) -> NamedArray:
    return cast(NamedArray, hax.sqrt(hax.mean(x * x, axes)) if axes else hax.abs(x))
