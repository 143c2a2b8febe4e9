"""Autoregressive decoding, one voxel of a patch after another, with a dense cache of keys and values in one scan.

First the whole sequence, without its density, passes through the model once, which fills the cache for the preamble.
Each step then embeds the previous id and the sums over atoms at its position, and writes one position of the cache.
The sums over atoms and the head with its prior are computed before the first step.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START
from tomat.model.decoder import DensityDecoder, DensityDecoderConfig
from tomat.model.environment import Embedding, Environment, EnvironmentTables, Sums
from tomat.model.kv_cache import KvCache, empty_cache, kv_cache_bytes
from tomat.model.nearby_atoms import named_atoms
from tomat.predict.inference.decoding import chosen_bins, sequence_keys
from tomat.predict.inference.interface import ChoiceKind, KvCacheDtype
from tomat.train.settings.config import TrainConfig


def require_cache(model: LmHeadModel) -> DensityDecoder:
    """The model, if it can be decoded from a cache."""
    if not isinstance(model, DensityDecoder):
        said = f"model.type is {model.config.get_choice_name(type(model.config))}; only density_decoder keeps keys"
        raise TomatError(f"{said} and values for the autoregressive decoder: choose the parallel one.")
    return model


def kept_bytes(config: TrainConfig, patches: int, kv_cache_dtype: KvCacheDtype) -> int:
    """Bytes of the cached keys and values of all layers for `patches` patches, from their shapes."""
    model = cast(DensityDecoderConfig, config.model_config())
    compute = config.trainer_config().mp.compute_dtype
    each = kv_cache_bytes(model.attention_config(), patches, config.seq_len, compute, kv_cache_dtype)
    return model.num_layers * each


class CachedModel(eqx.Module):
    """A model, with the arrays that stay the same from voxel to voxel, for one batch of patches."""

    model: DensityDecoder
    head: NamedArray
    """[bin, embed]: rows of the density ids, with the prior's columns where there is a prior."""
    sums: Sums | None
    """The sums over atoms at all positions; None without environment."""
    tables: EnvironmentTables | None = eqx.field(static=True)
    kv_cache_dtype: KvCacheDtype = eqx.field(static=True)

    @staticmethod
    def of(
        model: LmHeadModel,
        batch: dict[str, jax.Array],
        tables: EnvironmentTables | None,
        n_bins: int,
        kv_cache_dtype: KvCacheDtype = "compute",
    ) -> "CachedModel":
        plain = require_cache(model)
        # Parameters that training shards over devices are gathered once here, not at each step.
        whole = hax.shard(eqx.tree_at(lambda m: m.transformer, plain, plain.transformer.unrolled()))
        head = plain.get_lm_head()[plain.Vocab.name, slice(DENSITY_START, DENSITY_START + n_bins)]
        sums = None
        if whole.environment is not None:
            atoms = named_atoms(batch)
            assert atoms is not None and tables is not None  # the predictor gives them
            sums = whole.atom_sums(_named(batch["tokens"]), atoms, tables)
            head = whole.environment.wide_head(head, tables, 0)
        return CachedModel(whole, hax.shard(head), sums, tables, kv_cache_dtype)

    def filled(self, tokens: jax.Array) -> list[KvCache]:
        """The cache after one pass over whole sequences, int [batch, position]. It is right wherever ids are known."""
        return self._whole(tokens)[2]

    def logits(self, ids: jax.Array, position: jax.Array, caches: Sequence[KvCache]) -> tuple[jax.Array, list[KvCache]]:
        """Logits of the density bins after `ids`, int [batch], at `position`: float32 [batch, bin]; and the cache."""
        sums = _at(self.sums, position)
        x, added = self._embedded(_named(ids[:, None]), sums)
        x, caches = self.model.transformer.decode_kept(x, caches, position)
        return self._read(x, added, sums), caches

    def logits_without_cache(self, tokens: jax.Array, position: jax.Array) -> jax.Array:
        """As `logits`, but by a pass over whole sequences, int [batch, position], which the cache saves."""
        x, added, _ = self._whole(tokens)
        return self._read(_at(x, position), _at(added, position), _at(self.sums, position))

    def _whole(self, tokens: jax.Array) -> tuple[NamedArray, Embedding | None, list[KvCache]]:
        """For whole sequences: last hidden states, the environment's part of the embedding, and the cache."""
        named = _named(tokens)
        x, added = self._embedded(named, self.sums)
        config, Batch = self.model.config, named.resolve_axis("batch")
        empty = empty_cache(config.attention_config(), Batch, tokens.shape[1], x.dtype, self.kv_cache_dtype)
        x, caches = self.model.transformer.decode_kept(x, [empty] * config.num_layers, jnp.zeros((), jnp.int32))
        return x, added, caches

    def _read(self, x: NamedArray, added: Embedding | None, sums: Sums | None) -> jax.Array:
        if added is not None and sums is not None and self.tables is not None:
            x = cast(Environment, self.model.environment).wide_hidden(x, added, sums, self.tables)
        hidden = x.rearrange(("batch", "position", "embed")).array[:, 0]
        head = self.head.rearrange((self.model.Vocab.name, "embed")).array.astype(hidden.dtype)
        return jnp.einsum("be,ke->bk", hidden, head, preferred_element_type=jnp.float32)

    def _embedded(self, ids: NamedArray, sums: Sums | None) -> tuple[NamedArray, Embedding | None]:
        """The embedding that the layers read, and the environment's part of it."""
        x, environment = self.model.embeddings.embed(ids), self.model.environment
        if environment is None or sums is None or self.tables is None:
            return hax.auto_sharded(x), None
        added = environment.embedding(ids, sums, self.tables)
        return hax.auto_sharded(x + added.vector.rearrange(x.axes)), added


def _named(ids: jax.Array) -> NamedArray:
    axes = Axis("batch", ids.shape[0]), Axis("position", ids.shape[1])
    return hax.auto_sharded(NamedArray(ids, axes))


def _at[T](tree: T, position: jax.Array) -> T:
    """Every array of a tree at one position."""
    start = cast(int, position)  # haliax declares int, but takes a traced value
    return jax.tree.map(
        lambda x: x["position", hax.ds(start, 1)], tree, is_leaf=lambda leaf: isinstance(leaf, NamedArray)
    )


@eqx.filter_jit
def decode_autoregressive(
    model: LmHeadModel,
    batch: Mapping[str, jax.Array | np.ndarray],
    tables: EnvironmentTables | None,
    values: np.ndarray,
    n_voxels: int,
    kind: ChoiceKind,
    temperature: np.ndarray | np.float32,
    seed: np.ndarray | np.uint32,
    axis_mapping: ResourceMapping | None,
    policy: jmp.Policy,
    kv_cache_dtype: KvCacheDtype = "compute",
) -> tuple[jax.Array, jax.Array]:
    """Choose the bins of a batch of patches, one voxel after another: bins, int32 [batch, voxel], and their `values`,
    the codec's means in e/Å³ (ratios for a relative codec). `batch` holds `CellPatches.arrays`, and int32 [batch]
    `patch` and `sample`, which together with the seed decide the draws. The density must begin at the same position in
    all sequences, as it does for one structure."""
    model = policy.cast_to_compute(model)
    with hax.axis_mapping(axis_mapping or {}):
        arrays = {name: jnp.asarray(array) for name, array in batch.items()}
        tokens = _named(arrays["tokens"]).array
        cached = CachedModel.of(model, arrays, tables, len(values), kv_cache_dtype)
        keys = sequence_keys(jnp.asarray(seed), arrays["patch"], arrays["sample"])
        # The start is computed, not a constant, so structures with another preamble run the same program.
        start = jnp.argmax(tokens[0] == DENSITY_BLOCK_START).astype(jnp.int32)

        def step(carry: tuple[jax.Array, list[KvCache]], voxel: jax.Array):
            ids, caches = carry
            logits, caches = cached.logits(ids, start + voxel, caches)
            bins = chosen_bins(logits, kind, jnp.asarray(temperature), keys, voxel)
            return (bins + DENSITY_START, caches), bins

        first = jnp.full(tokens.shape[:1], DENSITY_BLOCK_START, jnp.int32)
        _, bins = jax.lax.scan(step, (first, cached.filled(tokens)), jnp.arange(n_voxels, dtype=jnp.int32))
        return bins.T, jnp.asarray(values)[bins.T]
