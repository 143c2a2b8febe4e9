"""A trained run as a predictor: from a structure to its density."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import haliax as hax
import jax
import numpy as np
import psutil
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.base.reporting import console, counted
from tomat.data.codec.base import UNIT_E_PER_A3, require_unit
from tomat.data.density.crystal import Crystal
from tomat.model.any_decoder import environment_of
from tomat.model.kv_cache import KvCacheDtype, check_kv_cache_dtype
from tomat.predict.inference.autoregressive import decode_autoregressive, require_cache
from tomat.predict.inference.checks import MODEL_DEVIATION, say_if_voids_unknown
from tomat.predict.inference.choice import Choice, ChoiceKind, choice_of
from tomat.predict.inference.found import DecoderName, find_weights, identity_of
from tomat.predict.inference.interface import OnPatches, Predictor
from tomat.predict.inference.parallel import batches, cell_patches, decode_parallel, first_rows
from tomat.predict.inference.trained import LoadedRun, load_weights_found
from tomat.train.settings.config import TrainConfig

MOST_SEQUENCES: Mapping[DecoderName, int] = MappingProxyType({"parallel": 16, "autoregressive": 256})
"""Sequences of one device at a time, if there is memory for them: one pass over 16 patches keeps any chip busy, a step
of one token each does not with fewer than hundreds."""
SHARE = 0.9
"""Of what is free that a program may take: fragmentation, and on CPUs other processes."""
FILLED_SHARE = 0.8
"""Of the sequences that a batch has decoded at the end, those that half of it has: above that it is not halved."""


def can_predict(run: LoadedRun) -> bool:
    """Whether the model of a run was trained to predict from a structure alone."""
    return environment_of(run.config.model) is not None and run.config.density_dropout > 0


def check_decoder(config: TrainConfig, decoder: DecoderName, rounds: int = 1) -> None:
    """Refuse a decoder that a run of this configuration is not trained for."""
    name = config.run_name
    if environment_of(config.model) is None:
        raise TomatError(
            f"run '{name}' has no model.environment: its model knows atoms from the preamble alone, rounded to "
            "0.05 A, and predicts nothing without true densities. Train one with model.environment and "
            "density_dropout."
        )
    if decoder not in MOST_SEQUENCES:
        raise TomatError(f"decoder is {decoder!r}; expected one of {', '.join(MOST_SEQUENCES)}.")
    if decoder == "autoregressive" and config.density_dropout == 1:
        raise TomatError(
            f"run '{name}' was trained with density_dropout 1: it has never read a density. Use the parallel "
            "decoder, or train with density_dropout below 1."
        )
    if decoder == "parallel" and config.density_dropout == 0:
        raise TomatError(
            f"run '{name}' was trained with density_dropout 0: it has never predicted a voxel without the density "
            "before it. Train with density_dropout above 0, or use the autoregressive decoder."
        )
    if rounds < 1 or (rounds > 1 and decoder == "autoregressive"):
        raise TomatError(f"rounds is {rounds}; expected at least 1, and 1 for the autoregressive decoder.")


def sequences_to_try(decoder: DecoderName, n_rows: int, devices: int) -> int:
    """Sequences at a time, of all devices, that a search for what fits begins with.

    Powers of two of at least the fewest, so that structures share programs. The last batch is filled up with copies:
    where that is a fifth of the work or more, half as many (343 patches on 16 devices: 3 batches of 8 on each, not 2
    of 16).
    """
    fewest, most = min(MOST_SEQUENCES.values()), MOST_SEQUENCES[decoder]
    each = fewest
    while each < most and each * devices < n_rows:
        each *= 2

    def done(each: int) -> int:
        return -(-n_rows // (each * devices)) * each

    if each * devices < n_rows and each % 2 == 0 and done(each // 2) <= FILLED_SHARE * done(each):
        each //= 2
    return each * devices


class RunPredictor(Predictor):
    """The model of a run.

    Args:
        rounds: Forward passes a patch; of the parallel decoder.
        decoder: All voxels of a patch at a time, or one after another.
        choice: Which bins the autoregressive decoder takes. Of several samples the prediction is the mean, with their
            standard deviation as `Prediction.spread`.
        kv_cache_dtype: Of the keys and values that the autoregressive decoder keeps.
    """

    usual_deviation = MODEL_DEVIATION

    def __init__(
        self,
        run: LoadedRun,
        rounds: int = 1,
        decoder: DecoderName = "parallel",
        choice: Choice = Choice(),  # noqa: B008  (immutable)
        kv_cache_dtype: KvCacheDtype = "compute",
    ) -> None:
        check_decoder(run.config, decoder, rounds)
        check_kv_cache_dtype(kv_cache_dtype, decoder)
        tables = run.tables  # raises where there is no promolecule
        assert tables is not None and run.promolecule is not None
        if decoder == "autoregressive":
            require_cache(run.model)
        require_unit(run.codec, UNIT_E_PER_A3, "a prediction")
        self.run, self.rounds, self.promolecule = run, rounds, run.promolecule
        self.decoder: DecoderName = decoder
        self.choice = choice
        self.kv_cache_dtype: KvCacheDtype = kv_cache_dtype
        self._programs: dict[tuple[Any, ...], tuple[int, Callable]] = {}
        self._means = run.codec.decode(np.arange(run.codec.n_density_tokens), decoder="mean")

    @property
    def identity(self) -> str:
        """The run, its step and decoder."""
        run = self.run
        weights = run.config.run_name, run.step, run.weights
        how = self.rounds, self.decoder, self.choice, self.kv_cache_dtype
        return identity_of(weights, run.codec.sha256, self.promolecule, *how)

    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """As `Predictor.density`."""
        patches = cell_patches(self.run, crystal, grid_shape)
        trainer = self.run.config.trainer_config()
        samples, n_patches, n_voxels = self.choice.samples, len(patches.anchors), prod(patches.patch_shape)
        rows = np.arange(samples * n_patches, dtype=np.int32)
        arrays = {name: array[rows % n_patches] for name, array in patches.arrays.items()}
        if self.decoder == "autoregressive":
            arrays |= {"patch": rows % n_patches, "sample": rows // n_patches}
        parts: list[np.ndarray] = []
        with trainer.use_device_mesh():
            model = hax.shard(self.run.model, trainer.parameter_axis_mapping)
            size, program = self._program(model, arrays, n_voxels)
            for real, batch in batches(arrays, size):
                found = program(*self._arguments(model, batch, n_voxels))
                found = found[1] if self.decoder == "autoregressive" else found  # values, of bins and values
                parts.append(np.asarray(found)[:real])
                if on_patches is not None:
                    on_patches(min(len(parts) * size, len(rows)), len(rows))
        values = np.concatenate(parts).reshape(samples, n_patches, n_voxels)
        cells = np.stack([patches.assembled(each) for each in values])
        return cells.mean(axis=0), cells.std(axis=0, ddof=1) if samples > 1 else None

    def _arguments(self, model: LmHeadModel, batch: dict[str, np.ndarray], n_voxels: int) -> tuple[Any, ...]:
        """What the decoder is called with."""
        trainer, choice = self.run.config.trainer_config(), self.choice
        first = model, batch, self.run.tables, self._means, n_voxels
        mapped = trainer.compute_axis_mapping, trainer.mp
        if self.decoder == "parallel":
            return *first, self.rounds, *mapped
        drawn = np.asarray(choice.temperature, np.float32), np.asarray(choice.seed, np.uint32)
        return *first, choice.kind, *drawn, *mapped, self.kv_cache_dtype

    def _program(self, model: LmHeadModel, arrays: dict[str, np.ndarray], n_voxels: int) -> tuple[int, Callable]:
        """Sequences at a time, and the decoder compiled for them."""
        devices = self.run.config.trainer_config().data_axis_size
        most = sequences_to_try(self.decoder, len(arrays["tokens"]), devices)
        key = most, n_voxels, *((name, array.shape[1:]) for name, array in arrays.items())
        if key not in self._programs:
            decode = decode_parallel if self.decoder == "parallel" else decode_autoregressive

            def lower(size: int):
                return decode.lower(*self._arguments(model, first_rows(arrays, size), n_voxels))

            free = free_bytes()
            size, program, needed = largest_batch(lower, most, devices, free)
            if not self._programs:
                console.print(
                    f"{self.decoder} decoder: {counted(size, 'patch', 'patches')} of {n_voxels:,} voxels at a time on "
                    f"{counted(devices, 'device')}, {needed / 2**30:.2f} GiB of {free / 2**30:.2f} GiB free on each.",
                    soft_wrap=True,
                )
            self._programs[key] = size, program
        return self._programs[key]


def load(
    run_dir: str | Path,
    *,
    step: int | None = None,
    rounds: int = 1,
    decoder: DecoderName = "parallel",
    choice: ChoiceKind | None = None,
    samples: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    kv_cache_dtype: KvCacheDtype | None = None,
) -> RunPredictor:
    """The predictor of a run, or of a folder of weights.

    Args:
        step: Of its checkpoint; None: the newest.
        rounds: Forward passes a patch, of the parallel decoder.
        choice: `Choice.kind`, of the autoregressive decoder; None: sampled if one of the next three is given, else
            median.
        samples, temperature, seed: As of `Choice`, of what is drawn; None: its defaults.
        kv_cache_dtype: `int8` keeps the autoregressive decoder's keys and values in 8 bits; None: in the type that the
            model computes in.
    """
    chosen = choice_of(decoder, choice, samples, temperature, seed)
    kept = kv_cache_dtype or "compute"
    check_kv_cache_dtype(kept, decoder)
    loaded = RunPredictor(load_weights_found(find_weights(run_dir, step), packed=True), rounds, decoder, chosen, kept)
    say_if_voids_unknown(loaded.promolecule, str(run_dir))
    return loaded


class Program(Protocol):
    """What `equinox.filter_jit(...).lower(...)` gives."""

    def compile(self) -> Any: ...


def free_bytes() -> int:
    """Memory that is free on the fullest device here; of CPU devices, each its part of the machine's."""
    devices = jax.local_devices()
    stats = [device.memory_stats() for device in devices]
    if devices[0].platform == "cpu" or not all(stats):
        return psutil.virtual_memory().available // len(devices)
    return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats if each)


def largest_batch(lower: Callable[[int], Program], most: int, least: int, free: int) -> tuple[int, Callable, int]:
    """Halve a batch until its program fits.

    Args:
        lower: Makes the program of a batch of so many sequences.
        most: Sequences to begin with, `least` times a power of two.
        least: Sequences that cannot be fewer, such as one a device.

    Returns:
        Sequences, the compiled program, and the bytes that it takes on a device beside what is there already.
    """
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
                f"decoding {size} patches at a time takes {needed / 2**30:.2f} GiB a device, and of the "
                f"{free / 2**30:.2f} GiB that are free tomat takes {SHARE:.0%}. Free memory, or use more devices."
            )
        size //= 2
