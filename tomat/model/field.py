"""The field model: a density at any point as the promolecule's there, times what a small network makes of the atoms
around it. It has no layers and reads no density; its rows are scattered voxels, with the structure beside them.

Shapes: B row, P position, N atom near the row's voxels, E element among them, K radial function, C channel, Q product.
"""

import dataclasses
from dataclasses import dataclass, field

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
from tomat.data.density.promolecule import RadialBasis
from tomat.model.angular import MOST_L, angular_functions, degree_slices, sums_by_kind
from tomat.model.environment import (
    DESCRIPTORS,
    GROUP_POSITIONS,
    LOG_FLOOR_E_PER_A3,
    EnvironmentTables,
    ScatteredAtoms,
    feature_scale,
)

MOST_LOG_RATIO = 6.0
"""A density is between exp(-this) and exp(this) times the promolecule's."""
LEAST_DEVIATION = 1e-4
MOST_DEVIATIONS = 8.0
"""Standard deviations of an invariant over the training that the network is told of, at most."""


@LmConfig.register_subclass("field")
@dataclass(frozen=True)
class FieldConfig(LmConfig):
    """Knobs of the field model (`model.type: field`)."""

    max_seq_len: int = 0
    """Voxels of a row, filled in from the data; 0: not known yet."""
    basis: RadialBasis = field(default_factory=RadialBasis)
    """Radial functions; those of the promolecule, whose values are sums of the same functions."""
    max_l: int = MOST_L
    """Largest degree of the spherical harmonics; 0: what the model knows of the atoms has no angles."""
    channels: int = 8
    """Learnt numbers of an element, each with sums of its own."""
    products: int = 8
    """Combinations of the sums of each degree above 0 of which all pairs are multiplied: the power spectrum."""
    hidden_dim: int = 128
    """Width of the network between the invariants and the density."""
    hidden_layers: int = 3
    """Of the network."""
    max_atoms: int = 160
    """Atoms near 32 voxels of a row that lie together, periodic images too, that there is room for; the loader says how
    many it would need."""
    max_elements: int = 3
    """Different elements among them that a row has room for."""

    def __post_init__(self) -> None:
        check_range("model.", self, channels=1, products=1, hidden_dim=1, hidden_layers=1, max_l=(0, MOST_L))
        check_range("model.", self, max_atoms=1, max_elements=1)

    @property
    def model_type(self) -> type["FieldModel"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return FieldModel

    @property
    def Embed(self) -> Axis:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Axis("embed", self.hidden_dim)

    @property
    def environment(self) -> "FieldConfig":
        """What the model reads of the atoms, by the name that a decoder has for it (`any_decoder.environment_of`)."""
        return self

    @property
    def invariants(self) -> int:
        """Numbers that the network is told of a voxel: sums of l = 0, products of each l above, the promolecule."""
        return self.basis.n * self.channels + self.max_l * self.products * (self.products + 1) // 2 + 1


class ElementEmbedding(eqx.Module):
    """What is learnt of each element. Levanter's optimizers decay no weight of a class named Embedding."""

    weight: NamedArray
    """[element, channel], Z = 0..118."""
    descriptors: NamedArray
    """[descriptor, channel]: what each descriptor adds to it."""

    def of(self, kinds: jax.Array, tables: EnvironmentTables) -> jax.Array:
        """[..., C] of elements by Z, int [...]; 0, no atom, is nothing."""
        weight = self.weight.rearrange(("element", "channel")).array
        descriptors = self.descriptors.rearrange(("descriptor", "channel")).array
        known = jnp.asarray(tables.descriptors, weight.dtype) @ descriptors
        return (weight + known)[kinds] * (kinds > 0)[..., None]


class StatisticsLayerNorm(eqx.Module):
    """Centres and scales each invariant by what it has over the training set; no gradient reaches them, and no decay
    (which Levanter's optimizers leave out for classes named LayerNorm)."""

    mean: NamedArray
    deviation: NamedArray
    """[invariant]: of some rows of the training set, when a run begins (`train/loop.py`)."""

    def __call__(self, invariants: jax.Array) -> jax.Array:
        mean, deviation = (jax.lax.stop_gradient(each.array) for each in (self.mean, self.deviation))
        return jnp.clip((invariants - mean) / deviation, -MOST_DEVIATIONS, MOST_DEVIATIONS)


class FieldModel(LmHeadModel[FieldConfig]):
    """From atoms and places to densities."""

    elements: ElementEmbedding
    projections: NamedArray
    """[degree, radial, channel, product]: of each degree above 0, what of its sums is multiplied."""
    norm: StatisticsLayerNorm
    network: hnn.MLP
    field_config: FieldConfig = eqx.field(static=True)
    vocab: Axis = eqx.field(static=True)

    @classmethod
    def init(cls, Vocab: Axis, config: FieldConfig, *, key) -> "FieldModel":
        k_elements, k_descriptors, k_projections, k_network = jrandom.split(key, 4)
        Channel, Product = Axis("channel", config.channels), Axis("product", config.products)
        Degree, Radial = Axis("degree", config.max_l), Axis("radial", angular_functions(config.basis))
        elements = ElementEmbedding(
            0.1 * hax.random.normal(k_elements, (Axis("element", len(SYMBOLS) + 1), Channel)),
            0.7 * hax.random.normal(k_descriptors, (Axis("descriptor", DESCRIPTORS), Channel)),
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
        return cls(elements, projections, norm, network, config, Vocab)

    @property
    def config(self) -> FieldConfig:
        return self.field_config

    @property
    def Vocab(self) -> Axis:
        return self.vocab

    def invariants(self, atoms: ScatteredAtoms, tables: EnvironmentTables) -> tuple[jax.Array, jax.Array]:
        """What the network is told, before the norm, [B, P, invariant], and the promolecule, float32 [B, P], e/Å³:
        rotations, shifts, supercells and other orders of atoms leave both as they are."""
        config, dtype = self.config, self.projections.dtype
        numbers = atoms.numbers.rearrange(("batch", "group", "atom")).array
        kinds = atoms.kinds.rearrange(("batch", "kind")).array
        of_kind = (numbers[..., None] == kinds[:, None, None]) & (kinds > 0)[:, None, None]
        positions = atoms.positions.rearrange(("batch", "group", "atom", "xyz")).array
        places = atoms.places.rearrange(("batch", "position", "xyz")).array
        rows, n_places = places.shape[:2]
        n_groups = numbers.shape[1]
        size = min(GROUP_POSITIONS, n_places)
        # The last group of a row may be short.
        padded = jnp.pad(places, ((0, 0), (0, n_groups * size - n_places), (0, 0)))
        grouped = padded.reshape(rows * n_groups, size, 3)
        near, kind_of_each = (
            each.reshape(rows * n_groups, *each.shape[2:]) for each in (positions, of_kind.astype(jnp.float32))
        )
        spherical, angular = (
            each.reshape(rows, n_groups * size, *each.shape[2:])[:, :n_places]
            for each in sums_by_kind(config.basis, config.max_l, near, kind_of_each, grouped)
        )
        neutral = jnp.asarray(tables.promolecule)[kinds]
        promolecule = jnp.einsum("bpke,bek->bp", spherical, neutral, precision="highest")
        elements = self.elements.of(kinds, tables)
        scale = jnp.asarray(feature_scale(config.basis), dtype)
        told = jnp.einsum("bpke,bec,k->bpkc", spherical.astype(dtype), elements, scale)
        parts = [told.reshape(*told.shape[:2], -1)]
        projections = self.projections.rearrange(("degree", "radial", "channel", "product")).array
        one, other = np.triu_indices(config.products)
        for harmonics, projection in zip(degree_slices(config.max_l), projections, strict=True):
            # Elements and functions at once: what would be between, 16 x 15 x 8 numbers a voxel, took twice as long.
            mixed = jnp.einsum("bec,kcq,k->bkeq", elements, projection, scale[::2])
            projected = jnp.einsum("bpmke,bkeq->bpmq", angular[:, :, harmonics].astype(dtype), mixed)
            spectrum = jnp.einsum("bpmq,bpmr->bpqr", projected, projected) / projected.shape[2]
            parts.append(spectrum[:, :, one, other])
        parts.append(jnp.log(promolecule + LOG_FLOOR_E_PER_A3)[..., None].astype(dtype))
        return jnp.concatenate(parts, axis=-1), promolecule

    @named_call
    def density(self, atoms: ScatteredAtoms, tables: EnvironmentTables) -> tuple[NamedArray, NamedArray]:
        """The density at each place, and that of the promolecule, both float32 [batch, position], e/Å³. Where the one
        fades, so does the other."""
        invariants, promolecule = self.invariants(atoms, tables)
        Batch, Position = (atoms.places.resolve_axis(name) for name in ("batch", "position"))
        Invariant = Axis("invariant", self.config.invariants)
        told = hax.auto_sharded(NamedArray(self.norm(invariants), (Batch, Position, Invariant)))
        log_ratio = self.network(told).rearrange((Batch, Position)).array.astype(jnp.float32)
        ratio = jnp.exp(jnp.clip(log_ratio, -MOST_LOG_RATIO, MOST_LOG_RATIO))
        both = (NamedArray(each, (Batch, Position)) for each in (promolecule * ratio, promolecule))
        density, promolecules = (hax.auto_sharded(each) for each in both)
        return density, promolecules

    def moments(self, atoms: ScatteredAtoms, tables: EnvironmentTables) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Of the voxels of some rows: how many, and the sums of their invariants and of the squares, [invariant]."""
        told = self.invariants(atoms, tables)[0].astype(jnp.float32)
        told = told.reshape(-1, told.shape[-1])
        return jnp.asarray(float(len(told))), told.sum(axis=0), (told**2).sum(axis=0)

    def with_moments(self, moments: tuple[jax.Array, jax.Array, jax.Array]) -> "FieldModel":
        """The model with the statistics of those voxels."""
        count, total, squares = (np.asarray(each, np.float64) for each in moments)
        mean = total / count
        # An invariant that is the same everywhere tells nothing, and is not blown up.
        deviation = np.sqrt(np.maximum(squares / count - mean**2, 0.0)) + LEAST_DEVIATION
        place = self.norm.mean.array.sharding
        arrays = (jax.device_put(jnp.asarray(each, self.norm.mean.dtype), place) for each in (mean, deviation))
        norm = StatisticsLayerNorm(*(NamedArray(each, self.norm.mean.axes) for each in arrays))
        return dataclasses.replace(self, norm=norm)

    def activations(
        self, input_ids: NamedArray, attn_mask: AttentionMask | NamedArray | None = None, *, key=None, pos_ids=None
    ) -> NamedArray:
        raise TomatError("a field model reads no tokens; choose model.type density_decoder for a layout of patches.")

    def get_lm_head(self) -> NamedArray:
        raise TomatError("a field model has no logits; choose model.type density_decoder for a distribution over bins.")

    def resize_vocab(self, new_size: int, key=None) -> "FieldModel":
        return dataclasses.replace(self, vocab=self.vocab.resize(new_size))
