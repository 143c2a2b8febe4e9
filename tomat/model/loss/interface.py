"""What the programs that compute the loss (`xla.py`, `pallas.py`) take and return.

Shapes: B batch, P positions, E embedding, R rows of the head in use, K density bins (a contiguous part of the R rows).
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tomat.data.tokens.vocabulary import DENSITY_START, PAD
from tomat.model.loss.config import LossConfig


@dataclass(frozen=True, eq=False)
class DensityTarget:
    """The density ids that a model predicts, and the densities they stand for."""

    n_density_tokens: int
    """K, one for each bin of the codec."""
    value_table: np.ndarray | None
    """Density of each density id, `[n_density_tokens]`, e/Å³, increasing: the codec's medians; or with an offset its
    ratio to the promolecule. None: ids have no density."""
    density_start: int = DENSITY_START
    pad_id: int = PAD
    tokens_per_voxel: int = 1
    """Tokens per voxel of the layout. Above 1 the table is not used."""
    offset_e_per_a3: float | None = None
    """Offset of a relative codec (`data/codec/relative.py`): bin k stands for scale v_k - this at a position, e/Å³."""

    @property
    def density_end(self) -> int:
        return self.density_start + self.n_density_tokens

    @property
    def has_values(self) -> bool:
        return self.value_table is not None and self.tokens_per_voxel == 1

    @property
    def values(self) -> np.ndarray:
        """The table as float64; only with `has_values`."""
        return np.asarray(self.value_table, np.float64)


@dataclass(frozen=True)
class BlockSpec:
    """What the compiled loss depends on besides its arrays."""

    config: LossConfig
    first_bin: int
    """Row of the head, among those in use, of density bin 0."""
    n_bins: int
    has_values: bool
    offset_e_per_a3: float = 0.0
    """Offset of a relative codec, whose inputs have a scale."""


class BinTables(NamedTuple):
    values: jax.Array
    """Density of each bin `[K]`, e/Å³, increasing; for a relative codec its ratio to the promolecule."""
    widths: jax.Array
    """Width of each bin `[K]`, in the same unit."""


class PositionWeights(NamedTuple):
    """Weights of each position, `[B, P]`, for sums over the batch. `density` and `other` make the loss; `density_mean`
    and `other_mean` make plain means over the positions of either sort; `unread_mean` is `density_mean` in rows whose
    density the model does not read, else 0."""

    density: jax.Array
    other: jax.Array
    density_mean: jax.Array
    other_mean: jax.Array
    unread_mean: jax.Array


class LossInputs(NamedTuple):
    """What the loss is computed from; only `hidden` and `head` have gradients."""

    hidden: jax.Array
    """`[B, P, E]`, any float type."""
    head: jax.Array
    """`[R, E]`, the rows of the ids in use."""
    rows: jax.Array
    """Row of `head` of each position's target, int32 `[B, P]`; anything where the weights are 0."""
    weights: PositionWeights
    tables: BinTables
    scale: jax.Array | None = None
    """With a relative codec, what a ratio of 1 more adds to the density at each position, float32 `[B, P]`, e/Å³."""


class PositionTerms(NamedTuple):
    """Loss and metrics of each position, float32 and all of one shape."""

    loss: jax.Array
    """Loss of a density position, by the configured formula."""
    cross_entropy: jax.Array
    emd: jax.Array
    top1: jax.Array
    rho: jax.Array
    other_cross_entropy: jax.Array


class LossSums(NamedTuple):
    """Weighted sums over all positions, float32 scalars."""

    loss: jax.Array
    density_loss: jax.Array
    unread_loss: jax.Array
    cross_entropy: jax.Array
    emd: jax.Array
    top1: jax.Array
    rho: jax.Array
    other_cross_entropy: jax.Array


def weighted_sums(weights: PositionWeights, terms: PositionTerms) -> LossSums:
    """The sums over some positions; all weights and terms are of one shape."""
    return LossSums(
        loss=jnp.sum(weights.density * terms.loss + weights.other * terms.other_cross_entropy),
        density_loss=jnp.sum(weights.density_mean * terms.loss),
        unread_loss=jnp.sum(weights.unread_mean * terms.loss),
        cross_entropy=jnp.sum(weights.density_mean * terms.cross_entropy),
        emd=jnp.sum(weights.density_mean * terms.emd),
        top1=jnp.sum(weights.density_mean * terms.top1),
        rho=jnp.sum(weights.density_mean * terms.rho),
        other_cross_entropy=jnp.sum(weights.other_mean * terms.other_cross_entropy),
    )
