"""Which bin of a predicted distribution a decoder takes: the most probable one, the median, or a drawn one.

JAX is imported by what computes with it: a choice is checked, and known outputs are recognised by it, without.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from tomat.base.errors import TomatError

if TYPE_CHECKING:
    from jax import Array

DecoderName = Literal["parallel", "autoregressive"]
ChoiceKind = Literal["greedy", "median", "sampled"]
KvCacheDtype = Literal["compute", "int8"]
"""Of keys and values that are kept (`model/kv_cache.py`): the type that the model computes in, or 8 bits."""

BINS_PER_GROUP = 128
"""A quantile is sought in two steps, group then bin, so that no running sum over all K bins is formed; 128 is a TPU
vector lane count, and close to the square root of 16,384, where both steps cost the same."""


@dataclass(frozen=True)
class Choice:
    kind: ChoiceKind = "median"
    """greedy: the most probable bin. median: the smallest with half of the probability up to it, which has the least
    expected error. sampled: drawn."""
    samples: int = 1
    """Of each structure, drawn independently."""
    temperature: float = 1.0
    """Logits are divided by it before one is drawn."""
    seed: int = 0
    """Of what is drawn; with it go the patch's number, the sample's and the voxel's."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ChoiceKind):
            raise TomatError(f"choice is {self.kind!r}; expected one of {', '.join(get_args(ChoiceKind))}.")
        said = f"choice is {self.kind}, samples {self.samples}, temperature {self.temperature} and seed {self.seed}"
        if self.samples < 1 or not self.temperature > 0 or self.seed < 0:
            raise TomatError(f"{said}; expected at least one sample, a temperature above 0 and a seed from 0 on.")
        if self.kind != "sampled" and (self.samples, self.temperature) != (1, 1.0):
            raise TomatError(f"{said}: only choice 'sampled' has several answers. Set it, or leave the others out.")

    def __str__(self) -> str:
        if self.kind != "sampled":
            return self.kind
        return f"sampled, {self.samples} samples, temperature {self.temperature:g}, seed {self.seed}"


def choice_of(
    decoder: str,
    choice: ChoiceKind | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
) -> Choice:
    """The choice that a caller's words mean; what is None was not said."""
    drawn = {"samples": samples, "temperature": temperature, "seed": seed}
    given = {name: value for name, value in drawn.items() if value is not None}
    if decoder == "parallel" and (given or choice is not None):
        said = f"{next(iter(given), 'choice')} is for the autoregressive decoder"
        raise TomatError(f"{said}; the parallel one has one answer. Choose decoder autoregressive, or leave it out.")
    return Choice(choice or ("sampled" if given else "median"), **given)


def check_kv_cache_dtype(kv_cache_dtype: str, decoder: str) -> None:
    """Refuse a type that there is not, or of a cache that there is not."""
    if kv_cache_dtype not in get_args(KvCacheDtype):
        raise TomatError(f"kv_cache_dtype is {kv_cache_dtype!r}; expected one of {', '.join(get_args(KvCacheDtype))}.")
    if kv_cache_dtype != "compute" and decoder != "autoregressive":
        said = f"kv_cache_dtype is {kv_cache_dtype}, but the {decoder} decoder keeps no keys and values"
        raise TomatError(f"{said}; choose decoder autoregressive, or leave it out.")


def quantile_bin(weights: "Array", share: "float | Array") -> "Array":
    """Smallest bin, int32 [...], whose cumulative weight reaches a share, above 0 and up to 1, of the total of weights,
    float32 [..., K], not negative and not all zero. Within float32's rounding a bin beside it may be returned."""
    import jax.numpy as jnp

    n_bins = weights.shape[-1]
    padding = -n_bins % BINS_PER_GROUP
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    groups = padded.reshape(*weights.shape[:-1], -1, BINS_PER_GROUP)
    group_ends = jnp.cumsum(groups.sum(axis=-1), axis=-1)
    wanted = group_ends[..., -1:] * jnp.asarray(share, weights.dtype)[..., None]
    group = jnp.sum(group_ends < wanted, axis=-1, keepdims=True)
    before = jnp.where(group > 0, jnp.take_along_axis(group_ends, jnp.maximum(group - 1, 0), axis=-1), 0.0)
    inner = jnp.take_along_axis(groups, group[..., None], axis=-2)[..., 0, :]
    # Rounding may leave the last sum of the group short of the group's own end; the true answer is then its last bin.
    inside = jnp.minimum(jnp.sum(before + jnp.cumsum(inner, axis=-1) < wanted, axis=-1), BINS_PER_GROUP - 1)
    return jnp.minimum(group[..., 0] * BINS_PER_GROUP + inside, n_bins - 1).astype(jnp.int32)


def sequence_keys(seed: "Array", patches: "Array", samples: "Array") -> "Array":
    """A random key for each sequence, by its own numbers, int [batch], whatever batch it is in."""
    import jax

    # By name: another default of JAX (rbg) draws other numbers in other batches.
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda patch, sample: jax.random.fold_in(jax.random.fold_in(key, patch), sample))(patches, samples)


def chosen_bins(logits: "Array", kind: ChoiceKind, temperature: "Array", keys: "Array", voxel: "Array") -> "Array":
    """The bin, int32 [batch], of voxel number `voxel` of each sequence, whose logits are float32 [batch, K]; the
    temperature, and keys of `sequence_keys`, are of `sampled` alone."""
    import jax
    import jax.numpy as jnp

    if kind == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind == "median":
        return quantile_bin(jax.nn.softmax(logits), 0.5)
    drawn = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, voxel)))(keys)
    return quantile_bin(jax.nn.softmax(logits / temperature), 1.0 - drawn)  # above 0: uniform is below 1
