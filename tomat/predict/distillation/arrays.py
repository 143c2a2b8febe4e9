"""Arrays in few bits that can be trained: a code follows a number, and the number what the code would need.

Each matrix in few bits has a number for each of its codes, which becomes the nearest value of the table, times the
scale of its group. The gradient goes to the number as if it had not been rounded (straight-through: Bengio et al.,
arXiv 1308.3432), to the scale as in LSQ (Esser et al., arXiv 1902.08153, eq. 3), and to the table as what it is: a sum
over the codes that stand for each of its values.

Numbers are kept over the scale that their group began with, and scales as the logarithm of how much they grew: one
learning rate then moves all of them by the same part of what they are. The demo's scales are 0.011 (embedding) to
0.12: kept as they are, the embedding's numbers moved by a fifth of theirs a step with Adam at 2e-3, and in 2 bits the
divergence from the teacher stayed at 0.5 nats.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tomat.predict.weights.quantise import Quantised


class TrainedArrays(eqx.Module):
    """The arrays of a model by name, some of them in few bits."""

    whole: dict[str, jax.Array]
    numbers: dict[str, jax.Array]
    """float [out, in]: of each code, over the first scale of its group."""
    growth: dict[str, jax.Array]
    """float [out, in / group]: logarithm of the scale of each group over its first one."""
    scales: dict[str, jax.Array]
    """float [out, in / group]: the first scales, which stay."""
    tables: dict[str, jax.Array]
    """float [2^bits], in any order."""

    @classmethod
    def of(
        cls,
        stored: Mapping[str, np.ndarray | Quantised],
        numbers: Mapping[str, np.ndarray],
        trained: Callable[[str], bool],
    ) -> "TrainedArrays":
        """To begin with: `numbers` are matrices before they were quantised, where one is missing the values of its
        codes; matrices in few bits that are not `trained` are whole here, and stay."""
        few = {name: its for name, its in stored.items() if isinstance(its, Quantised) and trained(name)}
        scales = {name: jnp.asarray(its.scales, jnp.float32) for name, its in few.items()}
        return cls(
            whole={
                name: jnp.asarray(its.values() if isinstance(its, Quantised) else its)
                for name, its in stored.items()
                if name not in few
            },
            numbers={
                name: _over_scales(jnp.asarray(numbers.get(name, its.values()), jnp.float32), scales[name]).reshape(
                    its.shape
                )
                for name, its in few.items()
            },
            growth={name: jnp.zeros_like(each) for name, each in scales.items()},
            scales=scales,
            tables={name: jnp.asarray(its.table, jnp.float32) for name, its in few.items()},
        )

    def values(self) -> dict[str, jax.Array]:
        """All arrays as the model computes with them."""
        few = {
            name: straight_through(numbers, self.growth[name], self.scales[name], self.tables[name])
            for name, numbers in self.numbers.items()
        }
        return {**self.whole, **few}

    def stored(self, begun_with: Mapping[str, np.ndarray | Quantised]) -> dict[str, np.ndarray | Quantised]:
        """What a folder holds of them; matrices that were not trained as they were before, `begun_with`."""
        result: dict[str, np.ndarray | Quantised] = dict(begun_with)
        for name, its in begun_with.items():
            if not isinstance(its, Quantised):
                result[name] = np.asarray(self.whole[name], its.dtype)
            elif name in self.numbers:
                grown, table = jnp.exp(self.growth[name]), jnp.sort(self.tables[name])
                codes = np.asarray(nearest(_over_scales(self.numbers[name], grown), table), np.uint8).reshape(its.shape)
                scales = np.asarray((self.scales[name] * grown).astype(jnp.float16))
                result[name] = replace(its, codes=codes, scales=scales, table=np.asarray(table, np.float32))
        return result

    def trainable(self, everything: bool, quantised: Mapping[str, Quantised]) -> "TrainedArrays":
        """True for the parts that are trained, as Levanter's trainer takes them; `everything`: also whole arrays.
        `quantised` are the matrices to begin with."""
        # The values of an affine scheme are whole numbers, and stay.
        tables = {name: quantised[name].scheme == "lut" for name in self.tables}
        flags = {"whole": everything, "numbers": True, "growth": True, "scales": False, "tables": tables}
        return replace(self, **flags)


def straight_through(numbers: jax.Array, growth: jax.Array, scales: jax.Array, table: jax.Array) -> jax.Array:
    """The values of the nearest codes, [out, in], with gradients by numbers, growth and table.

    Numbers, [out, in], are over `scales`, the first ones, [out, in / group]; growth is the logarithm of what the scales
    are now over those; the table, [2^bits], may be in any order.
    """
    table = jnp.sort(table)
    now = scales * jnp.exp(growth)
    # What is stored, as float16, is what is trained.
    now = now + lax.stop_gradient(now.astype(jnp.float16).astype(now.dtype) - now)
    relative = _over_scales(numbers, jnp.exp(growth))
    value = table[nearest(lax.stop_gradient(relative), table)]
    rounded = value + (relative - lax.stop_gradient(relative))
    return (rounded * now[..., None]).reshape(numbers.shape)


def nearest(relative: jax.Array, table: jax.Array) -> jax.Array:
    """Index of the value that is nearest, int32."""
    return jnp.searchsorted(
        (table[1:] + table[:-1]) / 2, relative, method="compare_all" if table.size <= 16 else "sort"
    )


def _over_scales(numbers: jax.Array, scales: jax.Array) -> jax.Array:
    """[out, in / group, group]: numbers over their scale; 0 where that is 0."""
    grouped = numbers.reshape(*scales.shape, -1)
    some = scales[..., None] != 0
    return jnp.where(some, grouped / jnp.where(some, scales[..., None], 1.0), 0.0)
