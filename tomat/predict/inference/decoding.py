"""Decoding the patches of a cell, in batches that fit into memory. The parallel decoder predicts all voxels of a patch
in one forward pass, of a model that reads the atoms and no density. The speculative decoder repeats such passes until
each voxel agrees with those before it. The choice of a bin from a distribution is here too."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import psutil
from haliax import Axis, NamedArray
from haliax.partitioning import ResourceMapping
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.data.codec.relative import CellCodec, cell_codec
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import PatchShape
from tomat.data.tokens.patch import encode_rows, tiling_anchors
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START, PAD
from tomat.model.any_decoder import environment_of, hidden_and_head, is_field
from tomat.model.environment import EnvironmentTables
from tomat.model.nearby_atoms import AtomsRead, Room, atoms_of_patch, filled, named_atoms, stacked_atoms
from tomat.predict.inference.interface import ChoiceKind, DecoderName
from tomat.predict.inference.trained import LoadedRun
from tomat.train.settings.config import TrainConfig

MOST_SEQUENCES: Mapping[DecoderName, int] = {"parallel": 16, "autoregressive": 256, "speculative": 16}
"""Most sequences on a device at a time, if memory allows. One pass over 16 patches keeps any chip busy; a step of one
token per sequence needs hundreds of sequences."""
SHARE = 0.9
"""Share of the free memory that a program may take. The rest is for fragmentation, and on CPUs for other processes."""
FILLED_SHARE = 0.8
"""A batch is halved if that leaves at most this share of the sequences to decode, copies that fill up included."""
BLOCK_VOXELS = 128
"""Voxels of each patch whose logits exist at once."""
BINS_PER_GROUP = 128
"""A quantile is searched in two steps, group then bin, so that no running sum over all K bins is formed. 128 is a TPU's
number of vector lanes, and the square root of 16,384, for which both steps cost the same."""


@dataclass(frozen=True, eq=False)
class CellPatches:
    """Patches that tile a cell, as a model reads them without any density."""

    anchors: np.ndarray
    """int [patch, 3]: the first voxel of each patch."""
    patch_shape: PatchShape
    grid_shape: tuple[int, int, int]
    codec: CellCodec
    """The codec at the voxels of the cell."""
    arrays: dict[str, np.ndarray]
    """`tokens` int32 [patch, position], and the arrays of `stacked_atoms` for a model with `environment`."""

    def assembled(self, values: np.ndarray) -> np.ndarray:
        """The cell from the values of its patches, float [patch, voxel]. Voxels beyond its sides are left out."""
        cell = np.zeros(self.grid_shape, values.dtype)
        boxes = values.reshape(len(self.anchors), *self.patch_shape)
        for anchor, box in zip(self.anchors, boxes, strict=True):
            sides = [min(p, n - a) for p, n, a in zip(self.patch_shape, self.grid_shape, anchor, strict=True)]
            place = tuple(slice(a, a + side) for a, side in zip(anchor, sides, strict=True))
            cell[place] = box[tuple(slice(side) for side in sides)]
        return cell


def cell_patches(run: LoadedRun, crystal: Crystal, grid_shape: tuple[int, int, int]) -> CellPatches:
    layout, environment = run.config.data.sequence_layout, environment_of(run.config.model)
    patch_shape = layout.patch_shape(len(crystal.atomic_numbers))
    anchors = tiling_anchors(grid_shape, patch_shape)
    # The rows are encoded from an empty cell, so they can hold nothing but the structure.
    atoms = crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name
    empty = DensityGrid(np.zeros(grid_shape, np.float32), *atoms)
    codec = cell_codec(run.codec, empty)
    tokens = encode_rows(empty, anchors, layout, run.codec)[:, : run.config.seq_len].astype(np.int32)
    tokens[tokens >= DENSITY_START] = PAD
    arrays = {"tokens": tokens}
    if environment is not None:
        near, room = atoms_near(environment, crystal, anchors, grid_shape, patch_shape)
        arrays |= stacked_atoms([filled(*found, patch_shape, room, crystal.name) for found in near])
    return CellPatches(anchors, patch_shape, grid_shape, codec, arrays)


def atoms_near(
    environment: AtomsRead,
    crystal: Crystal,
    anchors: np.ndarray,
    grid_shape: tuple[int, int, int],
    patch_shape: PatchShape,
) -> tuple[list[tuple[np.ndarray, np.ndarray, np.ndarray]], Room]:
    """`atoms_of_patch` for each patch, and the room (array sizes) that holds the atoms of any of them."""
    reach_a = environment.basis.cutoff_a
    near = [atoms_of_patch(crystal, anchor, grid_shape, patch_shape, reach_a) for anchor in anchors]
    # A structure that is denser than the training structures, or has more elements, gets larger arrays.
    return near, Room.of(environment).enlarged(numbers for numbers, *_ in near)


def batches(arrays: dict[str, np.ndarray], size: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Batches of one size, each with its number of real rows. The last one is filled up with copies of its last row."""
    for start in range(0, len(arrays["tokens"]), size):
        rest = {name: array[start:] for name, array in arrays.items()}
        yield min(size, len(rest["tokens"])), first_rows(rest, size)


def first_rows(arrays: dict[str, np.ndarray], size: int) -> dict[str, np.ndarray]:
    """The first `size` rows; if there are fewer, copies of the last row fill them up."""
    rows = np.minimum(np.arange(size), len(arrays["tokens"]) - 1)
    return {name: array[rows] for name, array in arrays.items()}


@eqx.filter_jit
def decode_parallel(
    model: LmHeadModel,
    batch: dict[str, np.ndarray],
    tables: EnvironmentTables | None,
    values: np.ndarray,
    n_voxels: int,
    rounds: int,
    axis_mapping: ResourceMapping | None,
    policy: jmp.Policy,
) -> jax.Array:
    """Expected value of every voxel of a batch of `CellPatches.arrays`, float32 [batch, voxel]. `values` holds the
    codec's means: densities in e/Å³, or ratios for a relative codec. Each round after the first reads the most probable
    densities of the round before."""
    model = policy.cast_to_compute(model)
    with hax.axis_mapping(axis_mapping or {}):
        ids, places, read = whole_passes(model, batch, tables, len(values), n_voxels, BLOCK_VOXELS)
        rho, means = jnp.zeros(places.shape), jnp.asarray(values)
        rows, after = jnp.arange(len(ids))[:, None], jnp.minimum(places + 1, ids.shape[1] - 1)
        for _ in range(rounds):
            rho, best = read(
                ids, lambda logits: (jax.nn.softmax(logits) @ means, jnp.argmax(logits, axis=-1).astype(jnp.int32))
            )
            ids = ids.at[rows, after].set(best + DENSITY_START)
    return rho


@eqx.filter_jit
def decode_speculative(
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
) -> tuple[jax.Array, jax.Array]:
    """The bins and values of `decode_autoregressive`, by passes over whole patches instead of single voxels. The first
    pass reads no bins, and each later pass reads the bins of the pass before. When a pass changes no bin, every voxel
    has the bin that is chosen after the voxels before it. Each pass makes at least one more voxel final (Song et al.
    2021, arXiv:2002.03629); with a decoder that reads the atoms it is 40 to 90
    (`docs/tracking/archive/prediction-demo-before.md`)."""
    model = policy.cast_to_compute(model)
    with hax.axis_mapping(axis_mapping or {}):
        empty, places, read = whole_passes(model, batch, tables, len(values), n_voxels, BLOCK_VOXELS)
        rows = jnp.arange(len(empty))[:, None]
        keys = sequence_keys(jnp.asarray(seed), jnp.asarray(batch["patch"]), jnp.asarray(batch["sample"]))
        numbers = jnp.tile(jnp.arange(n_voxels, dtype=jnp.int32), (len(empty), 1))

        def choose(logits: jax.Array, voxels: jax.Array) -> jax.Array:
            of_voxel = jax.vmap(chosen_bins, in_axes=(1, None, None, None, 0), out_axes=1)
            return of_voxel(logits, kind, jnp.asarray(temperature), keys, voxels[0])

        def again(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            bins, _, passes = state
            found = read(empty.at[rows, places[:, 1:]].set(bins[:, :-1] + DENSITY_START), choose, numbers)
            return found, jnp.any(found != bins), passes + 1

        first = read(empty, choose, numbers), jnp.ones((), bool), jnp.zeros((), jnp.int32)
        # As many passes as voxels make every voxel final, even where another order of summation changes a tie.
        bins, *_ = jax.lax.while_loop(lambda state: state[1] & (state[2] < n_voxels), again, first)
        return bins, jnp.asarray(values)[bins]


def whole_passes(
    model: LmHeadModel,
    batch: Mapping[str, jax.Array | np.ndarray],
    tables: EnvironmentTables | None,
    n_bins: int,
    n_voxels: int,
    block_voxels: int,
) -> tuple[jax.Array, jax.Array, Callable[..., Any]]:
    """Ids of a batch of patches, int [batch, position]; the positions whose logits predict its voxels, int
    [batch, voxel], the last position for voxels beyond the sequence; and a function `read(ids, function, *more)` that
    runs a forward pass over ids and applies `function` to the logits and to `more` arrays, as `of_voxels` does."""
    n_sequences, length = batch["tokens"].shape
    axes = Axis("batch", n_sequences), Axis("position", length)
    empty = jnp.asarray(batch["tokens"])
    start = jnp.argmax(empty == DENSITY_BLOCK_START, axis=1)[:, None]
    places = jnp.minimum(start + jnp.arange(n_voxels), length - 1)
    atoms = named_atoms(batch)

    def read(ids: jax.Array, function: Callable[..., Any], *more: jax.Array) -> Any:
        hidden, head, _ = hidden_and_head(model, hax.shard(NamedArray(ids, axes)), atoms, tables)
        head = head[model.Vocab.name, slice(DENSITY_START, DENSITY_START + n_bins)]
        states = hidden.rearrange(("batch", "position", "embed")).array
        known = head.rearrange((model.Vocab.name, "embed")).array.astype(hidden.dtype)
        return of_voxels(states, known, places, function, *more, block_voxels=block_voxels)

    return empty, places, read


def of_voxels[T](
    hidden: jax.Array,
    head: jax.Array,
    places: jax.Array,
    function: Callable[..., T],
    *more: jax.Array,
    block_voxels: int,
) -> T:
    """Apply `function` to the logits of voxels, float32 [B, V, K], and to `more` arrays [B, V]; it gives arrays [B, V].
    It is called with `block_voxels` voxels of each patch at a time. The last voxel is repeated to fill the last block.
    `hidden` is [B, T, E], `head` the rows of the head [K, E]; `places`, int [B, V], are the positions to read."""
    n_voxels = places.shape[1]
    block = min(block_voxels, n_voxels)
    n_blocks = -(-n_voxels // block)

    def in_blocks(array: jax.Array) -> jax.Array:
        padded = jnp.pad(array, ((0, 0), (0, n_blocks * block - n_voxels)), mode="edge")
        return padded.reshape(len(array), n_blocks, block).swapaxes(0, 1)

    def one(parts: tuple[jax.Array, ...]) -> T:
        at, *rest = parts
        states = jnp.take_along_axis(hidden, at[..., None], axis=1)
        logits = jnp.einsum("bve,ke->bvk", states, head, preferred_element_type=jnp.float32)
        return function(logits, *rest)

    found = jax.lax.map(one, tuple(in_blocks(array) for array in (places, *more)))
    return jax.tree.map(lambda part: part.swapaxes(0, 1).reshape(len(hidden), -1)[:, :n_voxels], found)


def can_predict(run: LoadedRun) -> bool:
    """Whether a run's model was trained to predict from a structure alone."""
    config = run.config
    return is_field(config.model) or (environment_of(config.model) is not None and config.density_dropout > 0)


def check_decoder(config: TrainConfig, decoder: DecoderName, rounds: int = 1) -> None:
    """Refuse a decoder that a run of this configuration is not trained for, and `rounds` that make no sense for it."""
    run, dropout = f"run '{config.run_name}'", config.density_dropout
    if is_field(config.model):
        if decoder != "parallel":
            raise TomatError(f"{run} is a field model, which reads no density; leave out decoder {decoder}.")
        if rounds != 1:
            raise TomatError(
                f"{run} is a field model, which reads no density: more rounds find the same; leave them out."
            )
        return
    if environment_of(config.model) is None:
        said = f"{run} has no model.environment, and knows atoms from the preamble alone, rounded to 0.05 A"
        raise TomatError(f"{said}. Train one with model.environment and density_dropout.")
    if dropout == (0 if decoder == "parallel" else 1):
        said = "it has never read a density" if dropout else "it predicts no voxel without the density before it"
        other = "parallel decoder, or train with less" if dropout else "autoregressive decoder, or train with more"
        raise TomatError(f"{run} was trained with density_dropout {dropout:g}: {said}. Use the {other}.")


def sequences_to_try(decoder: DecoderName, n_rows: int, devices: int) -> int:
    """Sequences at a time, over all devices, with which the search for what fits into memory begins. The number on a
    device is a power of two, so that structures share programs. The last batch is filled up with copies; if halving
    saves a fifth of the work or more, it is halved (343 patches on 16 devices: 3 batches of 8 on each, not 2 of 16)."""
    fewest, most = min(MOST_SEQUENCES.values()), MOST_SEQUENCES[decoder]
    each = fewest
    while each < most and each * devices < n_rows:
        each *= 2

    def done(each: int) -> int:
        return -(-n_rows // (each * devices)) * each

    if each * devices < n_rows and each % 2 == 0 and done(each // 2) <= FILLED_SHARE * done(each):
        each //= 2
    return each * devices


def free_bytes() -> int:
    """Bytes free on the fullest local device. For CPU devices, an equal part of the machine's available memory."""
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    if devices[0].platform == "cpu" or not all(stats):
        return psutil.virtual_memory().available // len(devices)
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats if each)


def largest_batch(lower: Callable[[int], Any], most: int, least: int, free: int) -> tuple[int, Callable, int]:
    """Halve a batch of `most` sequences (`least` times a power of two) until its program fits into `free` bytes on a
    device. Returns the sequences, the compiled program, and the bytes that it takes beside those already in use."""
    size = most
    while True:
        compiled = lower(size).compile()
        memory = compiled.compiled.memory_analysis()
        if memory is None:
            raise TomatError(f"JAX's {jax.default_backend()} backend does not say what memory a program takes.")
        needed = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        if needed <= SHARE * free:
            return size, compiled, needed
        if size <= least:
            raise TomatError(
                f"decoding {size} patches at a time takes {needed / 2**30:.2f} GiB a device, more than {SHARE:.0%} of "
                f"the {free / 2**30:.2f} GiB that are free. Free memory, or use more devices."
            )
        size //= 2


def quantile_bin(weights: jax.Array, share: float | jax.Array) -> jax.Array:
    """Smallest bin, int32 [...], whose cumulative weight reaches `share`, above 0 and up to 1, of the total. `weights`
    is float32 [..., K], not negative and not all zero. Float32 rounding may return a neighbouring bin."""
    n_bins = weights.shape[-1]
    padding = -n_bins % BINS_PER_GROUP
    padded = jnp.pad(weights, [(0, 0)] * (weights.ndim - 1) + [(0, padding)])
    groups = padded.reshape(*weights.shape[:-1], -1, BINS_PER_GROUP)
    group_ends = jnp.cumsum(groups.sum(axis=-1), axis=-1)
    wanted = group_ends[..., -1:] * jnp.asarray(share, weights.dtype)[..., None]
    group = jnp.sum(group_ends < wanted, axis=-1, keepdims=True)
    before = jnp.where(group > 0, jnp.take_along_axis(group_ends, jnp.maximum(group - 1, 0), axis=-1), 0.0)
    inner = jnp.take_along_axis(groups, group[..., None], axis=-2)[..., 0, :]
    # Rounding may leave the group's last running sum below the group's end. The true answer is then its last bin.
    inside = jnp.minimum(jnp.sum(before + jnp.cumsum(inner, axis=-1) < wanted, axis=-1), BINS_PER_GROUP - 1)
    return jnp.minimum(group[..., 0] * BINS_PER_GROUP + inside, n_bins - 1).astype(jnp.int32)


def sequence_keys(seed: jax.Array, patches: jax.Array, samples: jax.Array) -> jax.Array:
    """A random key for each sequence, from its patch and sample numbers, int [batch], whatever batch it is in."""
    # The implementation is named because another default of JAX (rbg) draws other numbers in other batches.
    key = jax.random.key(seed, impl="threefry2x32")
    return jax.vmap(lambda patch, sample: jax.random.fold_in(jax.random.fold_in(key, patch), sample))(patches, samples)


def chosen_bins(
    logits: jax.Array, kind: ChoiceKind, temperature: jax.Array, keys: jax.Array, voxel: jax.Array
) -> jax.Array:
    """The bin, int32 [batch], of voxel number `voxel` of each sequence, from its logits, float32 [batch, K]. Only
    `sampled` uses the temperature and the keys (`sequence_keys`)."""
    if kind == "greedy":
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if kind == "median":
        return quantile_bin(jax.nn.softmax(logits), 0.5)
    drawn = jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, voxel)))(keys)
    return quantile_bin(jax.nn.softmax(logits / temperature), 1.0 - drawn)  # above 0: uniform is below 1
