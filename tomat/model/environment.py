"""What a position of a sequence knows of the atoms around the voxel that it predicts, and a prior for its logits.

Every position gets sums, over the atoms near its voxel (`model/nearby_atoms.py`), of radial functions weighted by
learnt numbers of each element. The logits start as a distribution around the promolecule
(`data/density/promolecule.py`); a shift and a sharpness from the last hidden state move and sharpen it.

Shapes: B sequence, T position, N atom near the patch, E element among them, K radial function, C channel, M anchor of
the prior.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jax.random as jrandom
import numpy as np
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

from tomat.base.config_keys import check_range, key
from tomat.base.errors import TomatError
from tomat.data.density.elements import (
    SYMBOLS,
    atomic_radius_a,
    covalent_radius_a,
    ionization_energy_ev,
    pauling_electronegativity,
    period_of,
)
from tomat.data.density.promolecule import RadialBasis
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START
from tomat.model.nearby_atoms import PatchAtoms

if TYPE_CHECKING:
    from tomat.data.density.promolecule import Promolecule

ATOM_DENSITY_PER_A3 = 0.08
"""Atoms per Å³ in a common solid; scales the radial sums to about one."""
LOG_FLOOR_E_PER_A3 = 0.01
"""Densities are compared as log(rho + this): below it differences cost NMAE nothing."""
BLOCK_POSITIONS = 1024
"""Positions whose radial functions exist at a time: with 8 sequences, 16 functions and 128 atoms 67 MB in float32."""


@dataclass(frozen=True)
class EnvironmentConfig:
    channels: int = 8
    """Learnt numbers of an element, each with radial sums of its own."""
    hidden_dim: int = 128
    """Width of the three hidden layers of the network between the sums and the residual stream."""
    basis: RadialBasis = field(default_factory=RadialBasis)
    """Radial functions; those of the promolecule, whose values are sums of the same functions."""
    max_atoms: int = 128
    """Most atoms near a patch, periodic images too, that a row has room for; the loader says how many it needs."""
    max_elements: int = 8
    """Most different elements among them that a row has room for."""
    prior_anchors: int = 64
    """Number of densities between which the prior is interpolated; 0: no prior."""
    prior_width: float = 0.15
    """Width of the prior of a fresh model, in log density."""

    def __post_init__(self) -> None:
        check_range("model.environment.", self, channels=1, hidden_dim=1, max_atoms=1, max_elements=1)
        if self.prior_anchors != 0 and self.prior_anchors < 8:
            raise TomatError(f"model.environment.prior_anchors is {self.prior_anchors}; expected 0 or at least 8.")
        if not self.prior_width > 0:
            raise TomatError(f"model.environment.prior_width is {self.prior_width}; expected a positive number.")


MOST_L = 3
"""Largest degree of the harmonics of a field model."""
DESCRIPTORS = 3
"""Electronegativity, covalent radius, valence electrons. Networks for single voxels, trained without some compounds,
had an NMAE on these compounds of 4.8 % with learnt numbers of an element alone, 3.2 % with these three too (median of 4
choices): nitrogen, strontium or aluminium is in few compounds, electronegativity in all."""
MOST_DESCRIPTORS = 6
"""The three, then period, atomic radius and first ionisation energy. A field model of 2,000 steps without 26 of the
embedded compounds had 1.41 % on these (geometric mean of compounds) with all six, 1.62 % with three."""


@dataclass(frozen=True)
class FieldShape:
    """Settings that the weights of a field model (`model/field.py`) depend on, alone or inside a decoder."""

    basis: RadialBasis = field(default_factory=RadialBasis)
    """Radial functions; those of the promolecule, whose values are sums of the same functions."""
    max_l: int = MOST_L
    """Largest degree of the spherical harmonics; 0: the model knows no angles."""
    channels: int = 8
    """Learnt numbers of an element, each with sums of its own."""
    descriptors: int = key(DESCRIPTORS, added=True)
    """Number of known properties of an element, beside the learnt numbers: the first 3 are electronegativity, covalent
    radius and valence electrons, then come period, atomic radius and first ionisation energy."""
    products: int = 8
    """Combinations of the sums of each degree above 0; all pairs of them are multiplied: the power spectrum."""
    hidden_dim: int = 128
    """Width of the network between the invariants and the density."""
    hidden_layers: int = 3
    """Hidden layers of the network beyond the first, which takes in the invariants: 3 make four hidden layers."""
    members: int = 1
    """Number of models that differ only in their first weights and learn beside one another from the same sums, which
    are most of the work. The density is their mean; their spread says how far to trust it."""

    def check(self, section: str) -> None:
        """Refuse numbers that cannot be; `section`, such as `model.`, stands before a key in the refusal."""
        check_range(section, self, channels=1, products=1, hidden_dim=1, hidden_layers=1, members=1, max_l=(0, MOST_L))
        check_range(section, self, descriptors=(1, MOST_DESCRIPTORS))


@dataclass(frozen=True, eq=False)
class EnvironmentTables:
    promolecule: np.ndarray
    """float32 [119, K]: `Promolecule.table()`."""
    descriptors: np.ndarray
    """float32 [119, `MOST_DESCRIPTORS`]: what is known of each element before anything is learnt."""
    bin_values: np.ndarray
    """float32 [bin]: density of each density id, e/Å³; or with `offset_e_per_a3` its ratio to the promolecule."""
    offset_e_per_a3: float | None = None
    """Offset of a relative codec (`data/codec/relative.py`), whose bins are of (rho + this) / (promolecule + this)."""

    def bin_logs(self) -> np.ndarray:
        """float64 [bin]: the logarithm of each bin's density, with `LOG_FLOOR_E_PER_A3`, or of its ratio."""
        if self.offset_e_per_a3 is not None:
            return np.log(np.asarray(self.bin_values, np.float64))
        return log_densities(self.bin_values)


def environment_tables(
    promolecule: "Promolecule", bin_values: np.ndarray, offset_e_per_a3: float | None = None
) -> EnvironmentTables:
    """The constants of a run; the last two as in `EnvironmentTables`. The promolecule also has valence electrons."""
    descriptors = np.zeros((len(SYMBOLS) + 1, MOST_DESCRIPTORS), np.float32)
    for number, electrons in promolecule.electrons().items():
        # Centred and scaled to the 30 elements of the embedded densities. Without a value: the middle.
        electronegativity, radius_a = pauling_electronegativity(number), atomic_radius_a(number)
        ionization_ev = ionization_energy_ev(number)
        descriptors[number] = (
            0.0 if electronegativity is None else electronegativity - 2.0,
            (covalent_radius_a(number) - 1.2) / 0.5,
            (electrons - 5.0) / 3.0,
            (period_of(number) - 3.5) / 1.5,
            0.0 if radius_a is None else (radius_a - 1.4) / 0.5,
            0.0 if ionization_ev is None else (ionization_ev - 9.0) / 4.0,
        )
    return EnvironmentTables(promolecule.table(), descriptors, np.asarray(bin_values, np.float32), offset_e_per_a3)


class Sums(eqx.Module):
    features: NamedArray
    """[batch, position, sum], the compute type."""
    expected: NamedArray | None
    """float32 [batch, position]: what is expected of the voxel from the atoms alone, in the terms of `bin_logs`: the
    promolecule, or the density of a field model. None: the promolecule with a relative codec, which is 0 there."""
    expected_read: NamedArray | None
    """The same for the voxel that the position reads, which the position before predicts."""
    scale: NamedArray | None = None
    """float32 [batch, position], e/Å³: with a relative codec, promolecule + offset (`EnvironmentTables`)."""


class Embedding(eqx.Module):
    """What the environment adds at each position, and what the prior takes from the voxel that is read."""

    vector: NamedArray
    """[batch, position, embed], the compute type."""
    log_ratio_read: NamedArray | None = None
    """float32 [batch, position]: with a relative codec, the logarithm of the ratio that is read over the one expected;
    0 where none is read."""


def radial_functions(basis: RadialBasis, distance_a: jax.Array) -> jax.Array:
    """`RadialBasis.__call__` in JAX, functions before atoms: `[..., N]` in A to `[..., K, N]`."""
    s = basis.scale * jnp.log1p(distance_a / basis.stretch_a)[..., None, :]
    k = jnp.arange(basis.n, dtype=s.dtype)[:, None]

    def cubic(x: jax.Array) -> jax.Array:
        x = jnp.abs(x)
        return (jnp.maximum(0.0, 2.0 - x) ** 3 - 4.0 * jnp.maximum(0.0, 1.0 - x) ** 3) / 6.0

    # Only function 1 has a mirrored half within reach of s >= 0.
    return cubic(s - k) + jnp.where(k == 1, cubic(s + 1.0), 0.0)


PatchField = Callable[[PatchAtoms, jax.Array, EnvironmentTables], jax.Array]
"""Densities, float32 [B, T] in e/Å³, at places [B, T, 3] of patches, A from their first voxel."""


class Environment(eqx.Module):
    """Embedding of the atoms around each voxel, and the prior's two numbers."""

    elements: NamedArray
    """[element, channel]: learnt numbers of Z = 0..118; row 0 is no atom and has no effect."""
    descriptors: NamedArray
    """[descriptor, channel]: what each descriptor adds to these numbers."""
    network: hnn.MLP
    """From the sums to the residual stream."""
    prior: hnn.Linear | None
    """From the last hidden state to the prior's shift and the logarithm of its sharpness; zero at first."""
    prior_of_sums: hnn.Linear | None
    """From the embedding of the sums to the same two: 4.7 % error after 600 steps of a small decoder, 5.5 without."""
    config: EnvironmentConfig = eqx.field(static=True)

    @staticmethod
    def init(config: EnvironmentConfig, Embed: Axis, *, key) -> "Environment":
        k_elements, k_descriptors, k_network = jrandom.split(key, 3)
        Channel = Axis("channel", config.channels)
        elements = 0.1 * hax.random.normal(k_elements, (Axis("element", len(SYMBOLS) + 1), Channel))
        descriptors = 0.7 * hax.random.normal(k_descriptors, (Axis("descriptor", DESCRIPTORS), Channel))
        # The sums, the promolecule, the residual of the voxel that is read, and whether one is.
        Feature = Axis("feature", config.basis.n * config.channels + 3)
        network = hnn.MLP.init(Feature, Embed, config.hidden_dim, 3, activation=hnn.silu, key=k_network)
        priors: list[hnn.Linear | None] = [None, None]
        if config.prior_anchors:
            priors = [hnn.Linear.init(Embed, Axis("prior_number", 2), key=k_network, init_scale=0.0) for _ in priors]
        return Environment(elements, descriptors, network, priors[0], priors[1], config)

    @named_call
    def sums(
        self, tokens: NamedArray, atoms: PatchAtoms, tables: EnvironmentTables, field: PatchField | None = None
    ) -> Sums:
        """Radial sums at the voxel of token p + 1 for each position p; the tokens tell where the density begins.
        `field` gives what is expected there, instead of the promolecule."""
        dtype = self.elements.dtype
        Position = tokens.resolve_axis("position")
        ids = tokens.rearrange(("batch", "position")).array
        # The token DENS itself predicts the first voxel.
        start = jnp.argmax(ids == DENSITY_BLOCK_START, axis=1)
        voxel = jnp.arange(Position.size)[None, :] - start[:, None]
        shape = atoms.shape.rearrange(("batch", "side")).array
        inside = (voxel >= 0) & (voxel < jnp.prod(shape, axis=1)[:, None])
        voxel = jnp.where(inside, voxel, 0)
        ny, nz = jnp.maximum(shape[:, 1:2], 1), jnp.maximum(shape[:, 2:3], 1)
        index = jnp.stack([voxel // (ny * nz), voxel // nz % ny, voxel % nz], axis=-1).astype(jnp.float32)
        steps = atoms.steps.rearrange(("batch", "side", "xyz")).array
        places = jnp.einsum("bps,bsx->bpx", index, steps, precision="highest")
        numbers = atoms.numbers.rearrange(("batch", "atom")).array
        kinds = atoms.kinds.rearrange(("batch", "kind")).array
        of_kind = (numbers[..., None] == kinds[:, None]) & (kinds > 0)[:, None]
        positions = atoms.positions.rearrange(("batch", "atom", "xyz")).array

        def block(places: jax.Array) -> jax.Array:
            apart = positions[:, None] - places[:, :, None]
            functions = radial_functions(self.config.basis, jnp.sqrt(jnp.sum(apart * apart, axis=-1)))
            # bfloat16 would round the promolecule, which is a sum of these, by 0.4 %.
            return jnp.einsum("bpkn,bne->bpke", functions, of_kind.astype(functions.dtype), precision="high")

        # Summed by element before any weight enters: the backward pass needs these sums alone, 128 numbers a position,
        # and no function of a distance again.
        by_kind = jax.lax.stop_gradient(in_blocks(block, places))
        neutral = jnp.asarray(tables.promolecule)[kinds]
        promolecule = jnp.einsum("bpke,bek->bp", by_kind, neutral, precision="highest")
        mixed = (
            jnp.asarray(tables.descriptors[:, :DESCRIPTORS], dtype)
            @ self.descriptors.rearrange(("descriptor", "channel")).array
        )
        learnt = (self.elements.rearrange(("element", "channel")).array + mixed)[kinds]
        scaled = (by_kind * jnp.asarray(feature_scale(self.config.basis), by_kind.dtype)[:, None]).astype(dtype)
        sums = jnp.einsum("bpke,bec->bpkc", scaled, learnt)
        sums = sums.reshape(*sums.shape[:2], -1)
        expected = promolecule if field is None else field(atoms, places, tables)
        log_expected = jnp.log(expected + LOG_FLOOR_E_PER_A3)
        features = jnp.concatenate([sums, log_expected[..., None].astype(dtype)], axis=-1) * inside[..., None]
        axes = tokens.resolve_axis("batch"), Position
        named = hax.auto_sharded(NamedArray(features, (*axes, Axis("sum", features.shape[-1]))))
        scale = None
        if (offset := tables.offset_e_per_a3) is not None:
            scale = hax.auto_sharded(NamedArray(promolecule + offset, axes))
            if field is None:
                return Sums(named, None, None, scale)
            log_expected = jnp.log((expected + offset) / (promolecule + offset))
        read = jnp.concatenate([log_expected[:, :1], log_expected[:, :-1]], axis=1)
        log_expected, read = (hax.auto_sharded(NamedArray(each, axes)) for each in (log_expected, read))
        return Sums(named, log_expected, read, scale)

    @named_call
    def embedding(self, tokens: NamedArray, sums: Sums, tables: EnvironmentTables) -> Embedding:
        """What the network makes of the sums, and of the residual of the voxel that is read: how far its density lies
        from the one expected there, in log density. The residual of the next voxel is nearly the same. Where no density
        is read the residual is 0, and marked as missing."""
        ids = tokens.rearrange(("batch", "position")).array - DENSITY_START
        logs = jnp.asarray(tables.bin_logs(), jnp.float32)
        read = (ids >= 0) & (ids < len(logs))
        residual = logs[jnp.clip(ids, 0, len(logs) - 1)]
        if sums.expected_read is not None:
            residual = residual - sums.expected_read.array
        residual = jnp.where(read, residual, 0.0)
        more = jnp.stack([residual, read.astype(jnp.float32)], axis=-1).astype(sums.features.dtype)
        features = jnp.concatenate([sums.features.array, more], axis=-1)
        axes = sums.features.axes[:2]
        vector = self.network(hax.auto_sharded(NamedArray(features, (*axes, Axis("feature", features.shape[-1])))))
        if tables.offset_e_per_a3 is None:
            return Embedding(vector)
        return Embedding(vector, hax.auto_sharded(NamedArray(residual, axes)))

    @named_call
    def with_prior(
        self, hidden: NamedArray, head: NamedArray, embedding: Embedding, sums: Sums, tables: EnvironmentTables
    ) -> tuple[NamedArray, NamedArray]:
        """Hidden states and head whose product is the logits with the prior added. A distribution around any density is
        the mean of those around the two anchors next to it (exactly, for quadratic log-densities). So the prior is M
        more components of both, and logits have it however they are computed, in whatever precision and layout."""
        return self.wide_hidden(hidden, embedding, sums, tables), self.wide_head(head, tables, DENSITY_START)

    def wide_hidden(
        self, hidden: NamedArray, embedding: Embedding, sums: Sums, tables: EnvironmentTables
    ) -> NamedArray:
        """`with_prior`'s hidden states, with the weights of the anchors appended."""
        if self.prior is None or self.prior_of_sums is None:
            return hidden
        Batch, Position, Embed = (hidden.resolve_axis(name) for name in ("batch", "position", "embed"))
        anchors, _ = prior_columns(tables.bin_logs(), self.config)
        both = self.prior(hidden) + self.prior_of_sums(embedding.vector)
        numbers = both.rearrange(("batch", "position", "prior_number")).array.astype(jnp.float32)
        # The density lies around the expected one. With a relative codec, its ratio to that lies around the ratio of
        # the voxel before, if one is read.
        known = [each.array for each in (sums.expected, embedding.log_ratio_read) if each is not None]
        centre = sum(known[1:], known[0]) + numbers[..., 0]
        place = jnp.clip((centre - anchors[0]) / (anchors[1] - anchors[0]), 0.0, len(anchors) - 1.0)
        near = jnp.maximum(0.0, 1.0 - jnp.abs(place[..., None] - jnp.arange(len(anchors))))
        weights = (near * jnp.exp(numbers[..., 1:])).astype(hidden.dtype)
        wide = jnp.concatenate([hidden.rearrange(("batch", "position", "embed")).array, weights], axis=-1)
        return hax.auto_sharded(NamedArray(wide, (Batch, Position, Axis("embed", Embed.size + len(anchors)))))

    def wide_head(self, head: NamedArray, tables: EnvironmentTables, first_bin: int) -> NamedArray:
        """`with_prior`'s head, with each anchor's log-density appended; row `first_bin` is that of density id 0."""
        if self.prior is None:
            return head
        _, columns = prior_columns(tables.bin_logs(), self.config)
        plain = head.rearrange((..., "embed"))
        rows = jnp.zeros((plain.axes[0].size, columns.shape[1]), head.dtype)
        rows = rows.at[first_bin : first_bin + columns.shape[0]].set(columns.astype(head.dtype))
        Wide = Axis("embed", plain.axes[1].size + columns.shape[1])
        return NamedArray(jnp.concatenate([plain.array, rows], axis=-1), (plain.axes[0], Wide))


def log_densities(bin_values: np.ndarray) -> np.ndarray:
    """float64 [bin]: log(rho + `LOG_FLOOR_E_PER_A3`) of each bin."""
    return np.log(np.maximum(np.asarray(bin_values, np.float64), 0.0) + LOG_FLOOR_E_PER_A3)


def prior_columns(logs: np.ndarray, config: EnvironmentConfig) -> tuple[np.ndarray, np.ndarray]:
    """The anchors, float32 [M], in log density or log ratio like the bins, float64 [bin]; and the log-density of each
    bin around each anchor, [bin, M]. Near an anchor it is a Gaussian of `prior_width`; beyond some widths it falls
    linearly, as errors of promolecules do."""
    anchors = np.linspace(logs.min(), logs.max(), config.prior_anchors)
    z = (logs[:, None] - anchors) / config.prior_width
    return anchors.astype(np.float32), (1.0 - np.sqrt(1.0 + z**2)).astype(np.float32)


def feature_scale(basis: RadialBasis) -> np.ndarray:
    """float64 [K]: 1 / (1 + s), where s is the sum that a common solid would have."""
    r = np.linspace(0.0, basis.cutoff_a, 501)
    sums = ATOM_DENSITY_PER_A3 * np.trapezoid(basis(r) * (4 * np.pi * r**2)[:, None], r, axis=0)
    return np.reciprocal(1.0 + sums)


def in_blocks(block: Callable[[jax.Array], jax.Array], places: jax.Array) -> jax.Array:
    """`block` of `BLOCK_POSITIONS` positions at a time, one after another."""
    n_sequences, positions = places.shape[:2]
    n_blocks = -(-positions // BLOCK_POSITIONS)
    if n_blocks == 1:
        return block(places)
    size = -(-positions // n_blocks)
    padded = jnp.pad(places, ((0, 0), (0, n_blocks * size - positions), (0, 0)))
    parts = jax.lax.map(block, padded.reshape(n_sequences, n_blocks, size, 3).swapaxes(0, 1))
    return parts.swapaxes(0, 1).reshape(n_sequences, n_blocks * size, *parts.shape[3:])[:, :positions]
