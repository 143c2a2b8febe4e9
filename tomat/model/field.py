"""The field model: a density at any point is the promolecule's, times what a small network makes of the atoms around
it. It has no transformer layers and reads no density; its rows are scattered voxels, with the structure beside them.

Shapes: B row, P position, N atom near the row's voxels, E element among them, K radial function, C channel, Q product.
"""

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmConfig, LmHeadModel

from tomat.base.config_keys import check_range
from tomat.base.errors import TomatError
from tomat.data.density.elements import SYMBOLS
from tomat.model.angular import angular_functions, degree_slices, sums_by_kind
from tomat.model.environment import (
    DESCRIPTORS,
    LOG_FLOOR_E_PER_A3,
    EnvironmentTables,
    FieldShape,
    feature_scale,
    in_blocks,
)
from tomat.model.nearby_atoms import GROUP_POSITIONS, PatchAtoms, ScatteredAtoms

MOST_LOG_RATIO = 6.0
"""A density is between exp(-this) and exp(this) times the promolecule's."""
LEAST_DEVIATION = 1e-4
MOST_DEVIATIONS = 8.0
"""Limit of the network's inputs, in standard deviations of an invariant over the training set."""


@LmConfig.register_subclass("field")
@dataclass(frozen=True)
class FieldConfig(FieldShape, LmConfig):
    max_seq_len: int = 0
    """Voxels of a row, filled in from the data; 0: not known yet."""
    max_atoms: int = 160
    """Most atoms, periodic images too, near 32 voxels of a row that lie together; the loader says how many a row
    needs."""
    max_elements: int = 3
    """Most different elements among them that a row has room for."""

    def __post_init__(self) -> None:
        self.check("model.")
        check_range("model.", self, max_atoms=1, max_elements=1)

    @property
    def model_type(self) -> type["FieldModel"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return FieldModel

    @property
    def Embed(self) -> Axis:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Axis("embed", self.hidden_dim)

    @property
    def environment(self) -> "FieldConfig":
        """What the model reads of the atoms, under the name that decoders have (`any_decoder.environment_of`)."""
        return self

    @property
    def invariants(self) -> int:
        """Number of the network's inputs for a voxel: sums of l = 0, products of each l above, the promolecule."""
        return self.basis.n * self.channels + self.max_l * self.products * (self.products + 1) // 2 + 1


class ElementEmbedding(eqx.Module):
    """Learnt numbers of each element. Levanter's optimizers decay no weight of a class named Embedding."""

    weight: NamedArray
    """[element, channel], Z = 0..118."""
    descriptors: NamedArray
    """[descriptor, channel]: what each descriptor adds to these numbers."""

    def of(self, kinds: jax.Array, tables: EnvironmentTables) -> jax.Array:
        """Numbers [..., C] of the elements of these Z, int [...]; zeros for 0, which is no atom."""
        weight = self.weight.rearrange(("element", "channel")).array
        descriptors = self.descriptors.rearrange(("descriptor", "channel")).array
        known = jnp.asarray(tables.descriptors[:, : len(descriptors)], weight.dtype) @ descriptors
        return (weight + known)[kinds] * (kinds > 0)[..., None]


class StatisticsLayerNorm(eqx.Module):
    """Centres and scales each invariant by its mean and deviation over the training set. These get no gradient, and no
    decay (Levanter's optimizers leave it out for classes named LayerNorm)."""

    mean: NamedArray
    deviation: NamedArray
    """[invariant]: both are those of some rows of the training set, set when a run begins (`train/loop.py`)."""

    def __call__(self, invariants: jax.Array) -> jax.Array:
        mean, deviation = (jax.lax.stop_gradient(each.array) for each in (self.mean, self.deviation))
        return jnp.clip((invariants - mean) / deviation, -MOST_DEVIATIONS, MOST_DEVIATIONS)


class AtomSums(NamedTuple):
    """Sums over the atoms around each place. They do not depend on the weights."""

    kinds: jax.Array
    """int [B, E]: Z of the elements; 0: none."""
    spherical: jax.Array
    """float32 [B, P, K, E]"""
    angular: jax.Array
    """float32 [B, P, M, K, E]"""
    promolecule: jax.Array
    """float32 [B, P], e/Å³."""


class FieldMember(eqx.Module):
    """Computes the logarithm of the density over the promolecule's from the sums over atoms."""

    elements: ElementEmbedding
    projections: NamedArray
    """[degree, radial, channel, product]: for each degree above 0, the combinations of its sums that are multiplied."""
    norm: StatisticsLayerNorm
    network: hnn.MLP
    config: FieldConfig = eqx.field(static=True)

    @staticmethod
    def init(config: FieldConfig, *, key) -> "FieldMember":
        k_elements, k_descriptors, k_projections, k_network = jrandom.split(key, 4)
        Channel, Product = Axis("channel", config.channels), Axis("product", config.products)
        Degree, Radial = Axis("degree", config.max_l), Axis("radial", angular_functions(config.basis))
        elements = ElementEmbedding(
            0.1 * hax.random.normal(k_elements, (Axis("element", len(SYMBOLS) + 1), Channel)),
            # Keeps the size of the sum the same for any number of descriptors.
            0.7
            * float(np.sqrt(DESCRIPTORS / config.descriptors))
            * hax.random.normal(k_descriptors, (Axis("descriptor", config.descriptors), Channel)),
        )
        scale = 1 / np.sqrt(Radial.size * config.channels)
        projections = scale * hax.random.normal(k_projections, (Degree, Radial, Channel, Product))
        Invariant = Axis("invariant", config.invariants)
        norm = StatisticsLayerNorm(hax.zeros(Invariant), hax.ones(Invariant))
        network = hnn.MLP.init(
            Invariant, (), config.hidden_dim, config.hidden_layers + 1, activation=hnn.silu, key=k_network
        )
        # The model begins as the promolecule.
        *layers, last = network.layers
        last = dataclasses.replace(last, weight=hax.zeros_like(last.weight))
        network = dataclasses.replace(network, layers=[*layers, last])
        return FieldMember(elements, projections, norm, network, config)

    def invariants(self, sums: AtomSums, tables: EnvironmentTables) -> jax.Array:
        """The network's inputs before the norm, [B, P, invariant]. Rotations, shifts, supercells and other orders of
        the atoms do not change them."""
        config, dtype = self.config, self.projections.dtype
        elements = self.elements.of(sums.kinds, tables)
        scale = jnp.asarray(feature_scale(config.basis), dtype)
        told = jnp.einsum("bpke,bec,k->bpkc", sums.spherical.astype(dtype), elements, scale)
        parts = [told.reshape(*told.shape[:2], -1)]
        projections = self.projections.rearrange(("degree", "radial", "channel", "product")).array
        one, other = np.triu_indices(config.products)
        for harmonics, projection in zip(degree_slices(config.max_l), projections, strict=True):
            # Elements and functions at once: with a result in between, of 16 x 15 x 8 a voxel, it took twice as long.
            mixed = jnp.einsum("bec,kcq,k->bkeq", elements, projection, scale[::2])
            projected = jnp.einsum("bpmke,bkeq->bpmq", sums.angular[:, :, harmonics].astype(dtype), mixed)
            spectrum = jnp.einsum("bpmq,bpmr->bpqr", projected, projected) / projected.shape[2]
            parts.append(spectrum[:, :, one, other])
        parts.append(jnp.log(sums.promolecule + LOG_FLOOR_E_PER_A3)[..., None].astype(dtype))
        return jnp.concatenate(parts, axis=-1)

    def log_ratio(self, sums: AtomSums, tables: EnvironmentTables, axes: tuple[Axis, Axis]) -> jax.Array:
        """Logarithm of the density over the promolecule's, float32 [B, P], within `MOST_LOG_RATIO`."""
        told = self.norm(self.invariants(sums, tables))
        named = hax.auto_sharded(NamedArray(told, (*axes, Axis("invariant", self.config.invariants))))
        found = self.network(named).rearrange(axes).array.astype(jnp.float32)
        return jnp.clip(found, -MOST_LOG_RATIO, MOST_LOG_RATIO)


Moments = tuple[jax.Array, jax.Array, jax.Array]
"""The number of some voxels, and the sums over them of each member's invariants and of their squares, [member,
invariant]."""


class FieldModel(LmHeadModel[FieldConfig]):
    members: list[FieldMember]
    field_config: FieldConfig = eqx.field(static=True)
    vocab: Axis = eqx.field(static=True)

    @classmethod
    def init(cls, Vocab: Axis, config: FieldConfig, *, key) -> "FieldModel":
        keys = jrandom.split(key, config.members)
        return cls([FieldMember.init(config, key=each) for each in keys], config, Vocab)

    @property
    def config(self) -> FieldConfig:
        return self.field_config

    @property
    def Vocab(self) -> Axis:
        return self.vocab

    def sums(self, atoms: ScatteredAtoms, tables: EnvironmentTables) -> AtomSums:
        numbers = atoms.numbers.rearrange(("batch", "group", "atom")).array
        positions = atoms.positions.rearrange(("batch", "group", "atom", "xyz")).array
        places = atoms.places.rearrange(("batch", "position", "xyz")).array
        kinds = atoms.kinds.rearrange(("batch", "kind")).array
        return self._sums(numbers, positions, kinds, places, min(GROUP_POSITIONS, places.shape[1]), tables)

    def _sums(
        self,
        numbers: jax.Array,
        positions: jax.Array,
        kinds: jax.Array,
        places: jax.Array,
        size: int,
        tables: EnvironmentTables,
    ) -> AtomSums:
        """Sums over the atoms, int [B, group, N] and float32 [B, group, N, 3], near each `size` places of [B, P, 3];
        `kinds`, int [B, E], are the elements among the atoms."""
        config = self.config
        of_kind = (numbers[..., None] == kinds[:, None, None]) & (kinds > 0)[:, None, None]
        rows, n_places = places.shape[:2]
        n_groups = numbers.shape[1]
        # The last group of a row may be short.
        padded = jnp.pad(places, ((0, 0), (0, n_groups * size - n_places), (0, 0)))
        grouped = padded.reshape(rows, n_groups, size, 3)
        spherical, angular = (
            each.reshape(rows, n_groups * size, *each.shape[3:])[:, :n_places]
            for each in sums_by_kind(config.basis, config.max_l, positions, of_kind.astype(jnp.float32), grouped)
        )
        neutral = jnp.asarray(tables.promolecule)[kinds]
        promolecule = jnp.einsum("bpke,bek->bp", spherical, neutral, precision="highest")
        return AtomSums(kinds, spherical, angular, promolecule)

    @named_call
    def densities(self, atoms: ScatteredAtoms, tables: EnvironmentTables) -> tuple[list[NamedArray], NamedArray]:
        """The density of each member at each place, and the promolecule's, all float32 [batch, position], e/Å³. Where
        the promolecule fades, the members do too."""
        sums = self.sums(atoms, tables)
        axes = atoms.places.resolve_axis("batch"), atoms.places.resolve_axis("position")
        return self._densities(sums, tables, axes), hax.auto_sharded(NamedArray(sums.promolecule, axes))

    def _densities(self, sums: AtomSums, tables: EnvironmentTables, axes: tuple[Axis, Axis]) -> list[NamedArray]:
        ratios = [jnp.exp(member.log_ratio(sums, tables, axes)) for member in self.members]
        return [hax.auto_sharded(NamedArray(sums.promolecule * ratio, axes)) for ratio in ratios]

    @named_call
    def of_patches(self, atoms: PatchAtoms, places: jax.Array, tables: EnvironmentTables) -> jax.Array:
        """The density at places of patches, [B, P, 3] in A from their first voxel: float32 [B, P], e/Å³, the mean of
        the members. The weights of the field model get no gradient from it."""
        known = jax.lax.stop_gradient(self)
        numbers = atoms.numbers.rearrange(("batch", "atom")).array[:, None]
        positions = atoms.positions.rearrange(("batch", "atom", "xyz")).array[:, None]
        kinds = atoms.kinds.rearrange(("batch", "kind")).array

        def block(places: jax.Array) -> jax.Array:
            axes = atoms.numbers.resolve_axis("batch"), Axis("position", places.shape[1])
            sums = known._sums(numbers, positions, kinds, places, places.shape[1], tables)
            found = known._densities(sums, tables, axes)
            return jnp.stack([each.rearrange(axes).array for each in found]).mean(axis=0)

        return in_blocks(block, places)

    def moments(self, atoms: ScatteredAtoms, tables: EnvironmentTables, is_voxel: jax.Array) -> Moments:
        """The moments of these voxels; `is_voxel`, bool [B, P], is False for padding, whose places are no voxels."""
        sums = self.sums(atoms, tables)
        told = jnp.stack([member.invariants(sums, tables).astype(jnp.float32) for member in self.members])
        told = jnp.where(is_voxel[..., None], told, 0.0).reshape(len(self.members), -1, told.shape[-1])
        return is_voxel.sum().astype(jnp.float32), told.sum(axis=1), (told**2).sum(axis=1)

    def with_moments(self, moments: Moments) -> "FieldModel":
        """The model with the statistics of those voxels."""
        count, total, squares = (np.asarray(each, np.float64) for each in moments)
        mean = total / count
        # An invariant that is the same everywhere tells nothing; the least deviation keeps it from being blown up.
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0.0)) + LEAST_DEVIATION
        members = []
        for member, *arrays in zip(self.members, mean, deviation, strict=True):
            now = member.norm.mean
            placed = (jax.device_put(jnp.asarray(each, now.dtype), now.array.sharding) for each in arrays)
            norm = StatisticsLayerNorm(*(NamedArray(each, now.axes) for each in placed))
            members.append(dataclasses.replace(member, norm=norm))
        return dataclasses.replace(self, members=members)

    def activations(
        self, input_ids: NamedArray, attn_mask: AttentionMask | NamedArray | None = None, *, key=None, pos_ids=None
    ) -> NamedArray:
        raise TomatError("a field model reads no tokens; choose model.type density_decoder for a layout of patches.")

    def get_lm_head(self) -> NamedArray:
        raise TomatError("a field model has no logits; choose model.type density_decoder for a distribution over bins.")

    def resize_vocab(self, new_size: int, key=None) -> "FieldModel":
        return dataclasses.replace(self, vocab=self.vocab.resize(new_size))


def field_model(Vocab: Axis, shape: FieldShape, *, key) -> FieldModel:
    """A field model with fresh weights, for a decoder that begins from one."""
    return FieldModel.init(Vocab, FieldConfig(**vars(shape)), key=key)
