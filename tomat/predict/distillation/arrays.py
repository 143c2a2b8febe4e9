"""Quantised arrays that can be trained: each code has a trained float number, from which the code follows.

The model computes with the table value nearest to the number, times the scale of the number's group. The number gets
the gradient as if it had not been rounded (straight-through: Bengio et al., arXiv 1308.3432). The scale gets the
gradient of LSQ (Esser et al., arXiv 1902.08153, eq. 3). Each table value gets the sum of the gradients of all codes
that stand for it.

Numbers are stored divided by the first scale of their group, and scales as the logarithm of their growth. One learning
rate then changes all of them by the same relative amount. The demo's scales are 0.011 (embedding) to 0.12. When numbers
were stored undivided, those of the embedding changed by a fifth of their size a step with Adam at 2e-3, and in 2 bits
the divergence from the teacher stayed at 0.5 nats.
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
    """The arrays of a model by name. Some of them are quantised."""

    whole: dict[str, jax.Array]
    numbers: dict[str, jax.Array]
    """float [out, in]: the number of each code, divided by the first scale of its group."""
    growth: dict[str, jax.Array]
    """float [out, in / group]: logarithm of each group's scale divided by its first scale."""
    scales: dict[str, jax.Array]
    """float [out, in / group]: the first scales, which do not change."""
    tables: dict[str, jax.Array]
    """float [2^bits], in any order."""

    @classmethod
    def of(
        cls,
        stored: Mapping[str, np.ndarray | Quantised],
        numbers: Mapping[str, np.ndarray],
        trained: Callable[[str], bool],
    ) -> "TrainedArrays":
        """The arrays at the start. `numbers` holds matrices as they were before quantisation; a missing one starts at
        the values of its codes. Quantised matrices that are not `trained` go unpacked into `whole`."""
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
        """The arrays as a folder stores them. Matrices that were not trained are taken from `begun_with`."""
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
        """Flags for Levanter's trainer: True for the parts that are trained. `everything` trains the whole arrays too.
        `quantised` holds the matrices as they were at the start."""
        # The table of an affine scheme holds whole numbers and is not trained.
        tables = {name: quantised[name].scheme == "lut" for name in self.tables}
        flags = {"whole": everything, "numbers": True, "growth": True, "scales": False, "tables": tables}
        return replace(self, **flags)


def straight_through(numbers: jax.Array, growth: jax.Array, scales: jax.Array, table: jax.Array) -> jax.Array:
    """The values of the nearest codes, [out, in], with gradients by numbers, growth and table.

    `numbers`, [out, in], are divided by the first scales, `scales`, [out, in / group]. `growth` is the logarithm of the
    present scales divided by the first ones. `table`, [2^bits], may be in any order.
    """
    table = jnp.sort(table)
    now = scales * jnp.exp(growth)
    # The forward pass rounds the scales to float16, as they are stored.
    now = now + lax.stop_gradient(now.astype(jnp.float16).astype(now.dtype) - now)
    relative = _over_scales(numbers, jnp.exp(growth))
    value = table[nearest(lax.stop_gradient(relative), table)]
    rounded = value + (relative - lax.stop_gradient(relative))
    return (rounded * now[..., None]).reshape(numbers.shape)


def nearest(relative: jax.Array, table: jax.Array) -> jax.Array:
    """Index of the nearest value of a sorted `table`, int32."""
    return jnp.searchsorted(
        (table[1:] + table[:-1]) / 2, relative, method="compare_all" if table.size <= 16 else "sort"
    )


def _over_scales(numbers: jax.Array, scales: jax.Array) -> jax.Array:
    """Numbers divided by the scale of their group, [out, in / group, group]; 0 where the scale is 0."""
    grouped = numbers.reshape(*scales.shape, -1)
    some = scales[..., None] != 0
    return jnp.where(some, grouped / jnp.where(some, scales[..., None], 1.0), 0.0)
