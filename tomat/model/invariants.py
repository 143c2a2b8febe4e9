"""What a network is told of the atoms around a place: radial sums, the power spectrum of angular ones, and the
promolecule. Rotations, shifts, supercells and other orders of atoms leave these numbers as they are.

Shapes: B row, G group of its places, P place, N atom near the group, E element, K radial function, C channel, M
harmonic, Q product.
"""

from typing import NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jaxtyping import PRNGKeyArray

from tomat.data.density.elements import SYMBOLS
from tomat.data.density.promolecule import RadialBasis
from tomat.model.angular import angular_functions, degree_slices, sums_by_kind
from tomat.model.nearby_atoms import GROUP_POSITIONS, AtomsRead

ATOM_DENSITY_PER_A3 = 0.08
"""Of a common solid; scales the radial sums to about one."""
LOG_FLOOR_E_PER_A3 = 0.01
"""Densities are compared as log(rho + this): below it differences cost NMAE nothing."""
LEAST_DEVIATION = 1e-4
MOST_DEVIATIONS = 8.0
"""Standard deviations of an invariant over the training that the network is told of, at most."""
DESCRIPTORS = 3
"""Electronegativity, covalent radius, valence electrons. Networks for single voxels, trained without some compounds,
had an NMAE on these of 4.8 % with what is learnt of an element alone, 3.2 % with it beside these three (median of 4
choices): nitrogen, strontium or aluminium is in few compounds, electronegativity in all."""
MOST_DESCRIPTORS = 6
"""Those, then period, atomic radius and first ionisation energy: a field model of 2,000 steps without 26 of the
embedded compounds had 1.41 % on these (geometric mean of compounds) with all six, 1.62 % with three."""


def feature_scale(basis: RadialBasis) -> np.ndarray:
    """float64 [K]: one over one and the sum that a common solid would have."""
    r = np.linspace(0.0, basis.cutoff_a, 501)
    sums = ATOM_DENSITY_PER_A3 * np.trapezoid(basis(r) * (4 * np.pi * r**2)[:, None], r, axis=0)
    return np.reciprocal(1.0 + sums)


def first_elements(config: AtomsRead, elements: PRNGKeyArray, descriptors: PRNGKeyArray) -> tuple[NamedArray, ...]:
    """[element, channel] and [descriptor, channel], drawn with two keys: what begins to be learnt of Z = 0..118, and
    what each descriptor adds to it, as large a sum of however many."""
    Channel = Axis("channel", config.channels)
    return (
        0.1 * hax.random.normal(elements, (Axis("element", len(SYMBOLS) + 1), Channel)),
        0.7
        * float(np.sqrt(DESCRIPTORS / config.descriptors))
        * hax.random.normal(descriptors, (Axis("descriptor", config.descriptors), Channel)),
    )


def learnt_of_elements(weight: NamedArray, descriptors: NamedArray, known: np.ndarray) -> jax.Array:
    """[119, C] of `first_elements` and the descriptors of the run's tables, float32 [119, `MOST_DESCRIPTORS`]."""
    told = descriptors.rearrange(("descriptor", "channel")).array
    mixed = jnp.asarray(known[:, : len(told)], weight.dtype) @ told
    return weight.rearrange(("element", "channel")).array + mixed


def first_projections(config: AtomsRead, key: PRNGKeyArray) -> NamedArray:
    """[degree, radial, channel, product]: of each degree above 0, what of its sums is multiplied."""
    Degree, Radial = Axis("degree", config.max_l), Axis("radial", angular_functions(config.basis))
    axes = (Degree, Radial, Axis("channel", config.channels), Axis("product", config.products))
    return (1 / np.sqrt(Radial.size * config.channels)) * hax.random.normal(key, axes)


class AtomSums(NamedTuple):
    """What is computed of the atoms around each place, in which nothing learnt is."""

    kinds: jax.Array
    """int [B, E]: Z of the elements; 0: none."""
    spherical: jax.Array
    """float32 [B, P, K, E]"""
    angular: jax.Array
    """float32 [B, P, M, K, E]"""
    promolecule: jax.Array
    """float32 [B, P], e/Å³."""


def atom_sums(
    config: AtomsRead,
    promolecule: np.ndarray,
    numbers: jax.Array,
    kinds: jax.Array,
    positions: jax.Array,
    places: jax.Array,
) -> AtomSums:
    """Of `places`, float32 [B, P, 3] in A, of which each `GROUP_POSITIONS` in a row have the atoms near them: `numbers`
    int [B, G, N], of `kinds` [B, E], at `positions` [B, G, N, 3]. `promolecule` is that of the run's tables."""
    of_kind = (numbers[..., None] == kinds[:, None, None]) & (kinds > 0)[:, None, None]
    rows, n_places = places.shape[:2]
    n_groups = numbers.shape[1]
    size = min(GROUP_POSITIONS, n_places)
    # The last group of a row may be short.
    padded = jnp.pad(places, ((0, 0), (0, n_groups * size - n_places), (0, 0)))
    grouped = padded.reshape(rows, n_groups, size, 3)
    spherical, angular = (
        each.reshape(rows, n_groups * size, *each.shape[3:])[:, :n_places]
        for each in sums_by_kind(config.basis, config.max_l, positions, of_kind.astype(jnp.float32), grouped)
    )
    neutral = jnp.asarray(promolecule)[kinds]
    return AtomSums(kinds, spherical, angular, jnp.einsum("bpke,bek->bp", spherical, neutral, precision="highest"))


def n_invariants(config: AtomsRead) -> int:
    """Numbers that a network is told of a place: sums of l = 0, products of each l above, the promolecule."""
    return config.basis.n * config.channels + config.max_l * config.products * (config.products + 1) // 2 + 1


def invariants(config: AtomsRead, sums: AtomSums, elements: jax.Array, projections: NamedArray) -> jax.Array:
    """What a network is told, before the norm, [B, P, invariant]; `elements` [B, E, C] are those of `sums.kinds`."""
    dtype = projections.dtype
    scale = jnp.asarray(feature_scale(config.basis), dtype)
    told = jnp.einsum("bpke,bec,k->bpkc", sums.spherical.astype(dtype), elements, scale)
    parts = [told.reshape(*told.shape[:2], -1)]
    by_degree = projections.rearrange(("degree", "radial", "channel", "product")).array
    one, other = np.triu_indices(config.products)
    for harmonics, projection in zip(degree_slices(config.max_l), by_degree, strict=True):
        # Elements and functions at once: what would be between, 16 x 15 x 8 numbers a voxel, took twice as long.
        mixed = jnp.einsum("bec,kcq,k->bkeq", elements, projection, scale[::2])
        projected = jnp.einsum("bpmke,bkeq->bpmq", sums.angular[:, :, harmonics].astype(dtype), mixed)
        spectrum = jnp.einsum("bpmq,bpmr->bpqr", projected, projected) / projected.shape[2]
        parts.append(spectrum[:, :, one, other])
    parts.append(jnp.log(sums.promolecule + LOG_FLOOR_E_PER_A3)[..., None].astype(dtype))
    return jnp.concatenate(parts, axis=-1)


class Moments(NamedTuple):
    """Of what networks are told of some places."""

    count: jax.Array
    """float32 []: places."""
    total: jax.Array
    """float32 [member, invariant]: a sum over them."""
    squares: jax.Array

    @staticmethod
    def of(told: jax.Array, count: jax.Array | int) -> "Moments":
        """Of invariants [member, B, P, invariant], 0 where a place does not count."""
        told = told.astype(jnp.float32).reshape(len(told), -1, told.shape[-1])
        return Moments(jnp.asarray(count, jnp.float32), told.sum(axis=1), (told**2).sum(axis=1))


class StatisticsLayerNorm(eqx.Module):
    """Centres and scales each invariant by what it has over the training set; no gradient reaches them, and no decay
    (which Levanter's optimizers leave out for classes named LayerNorm)."""

    mean: NamedArray
    deviation: NamedArray
    """[invariant]: of some rows of the training set, when a run begins (`train/loop.py`)."""

    def __call__(self, invariants: jax.Array) -> jax.Array:
        mean, deviation = (jax.lax.stop_gradient(each.array) for each in (self.mean, self.deviation))
        return jnp.clip((invariants - mean) / deviation, -MOST_DEVIATIONS, MOST_DEVIATIONS)

    @staticmethod
    def init(config: AtomsRead) -> "StatisticsLayerNorm":
        Invariant = Axis("invariant", n_invariants(config))
        return StatisticsLayerNorm(hax.zeros(Invariant), hax.ones(Invariant))

    def with_moments(self, moments: Moments, member: int = 0) -> "StatisticsLayerNorm":
        """With the statistics of those places."""
        count, total, squares = (np.asarray(each, np.float64) for each in moments)
        mean = total[member] / count
        # An invariant that is the same everywhere tells nothing, and is not blown up.
        deviation = np.sqrt(np.maximum(squares[member] / count - mean**2, 0.0)) + LEAST_DEVIATION
        now = self.mean
        placed = (jax.device_put(jnp.asarray(each, now.dtype), now.array.sharding) for each in (mean, deviation))
        return StatisticsLayerNorm(*(NamedArray(each, now.axes) for each in placed))
