"""A trained run, or a folder of weights, as a predictor: from a structure to its density.

JAX is imported only when the model is loaded. Structures are thus checked, and finished outputs recognised, before the
seconds that JAX and a model take.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.layout import CODEC_FILE, PACKAGED_MODEL, PROMOLECULE_FILE
from tomat.base.reporting import counted, tell
from tomat.data.codec.base import UNIT_E_PER_A3, require_unit
from tomat.data.codec.files import load_codec
from tomat.data.codec.relative import check_promolecule
from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference.interface import (
    MODEL_DEVIATION,
    Choice,
    ChoiceKind,
    DecoderName,
    KvCacheDtype,
    OnPatches,
    Predictor,
    check_decoding,
    say_if_voids_unknown,
)
from tomat.predict.weights.record import FoundWeights, find_weights

if TYPE_CHECKING:
    from levanter.models.lm_model import LmHeadModel

    from tomat.predict.inference.trained import LoadedRun


class RunPredictor(Predictor):
    """Predicts with the model of a run that has `environment`. `FoundWeights` are loaded for the first structure to be
    predicted, and this time is not part of its seconds. If `choice` asks for several samples, the prediction is their
    mean, and `Prediction.spread` their standard deviation."""

    usual_deviation = MODEL_DEVIATION

    def __init__(
        self,
        source: "FoundWeights | LoadedRun",
        rounds: int = 1,
        decoder: DecoderName = "parallel",
        choice: Choice = Choice(),  # noqa: B008  (immutable)
        kv_cache_dtype: KvCacheDtype = "compute",
    ) -> None:
        check_decoding(decoder, rounds, kv_cache_dtype)
        self.rounds, self.choice = rounds, choice
        self.decoder: DecoderName = decoder
        self.kv_cache_dtype: KvCacheDtype = kv_cache_dtype
        self._programs: dict[tuple[Any, ...], tuple[int, Callable]] = {}
        self._run: LoadedRun | None = None
        self.found: FoundWeights | None = None
        if not isinstance(source, FoundWeights):
            self._take(source)
            self._codec_sha256 = source.codec.sha256
            self._name = f"run {source.config.run_name} step {source.step}, weights {source.weights}"
            return
        self.found = source
        path = source.folder / PROMOLECULE_FILE
        if not path.exists():
            said = f"{source.folder} has no {PROMOLECULE_FILE} (its data had no structures), and predicts nothing"
            raise TomatError(f"{said}. Train one whose data have atoms.")
        self.promolecule = Promolecule.load(path)
        say_if_voids_unknown(self.promolecule, str(source.folder))
        self._name = str(source)
        codec = load_codec(source.folder / CODEC_FILE)
        check_promolecule(codec, self.promolecule, str(source.folder))
        self._codec_sha256 = codec.sha256

    @property
    def identity(self) -> str:
        return f"{self._name}, codec {self._codec_sha256}, promolecule {self.promolecule.sha256}, {self._decoded}"

    @property
    def _decoded(self) -> str:
        how = f"parallel, rounds {self.rounds}" if self.decoder == "parallel" else f"{self.decoder}, {self.choice}"
        return how if self.kv_cache_dtype == "compute" else f"{how}, kv_cache_dtype {self.kv_cache_dtype}"

    @property
    def _is_field(self) -> bool:
        if self.found is not None:
            return self.found.model_type == "field"
        from tomat.model.any_decoder import is_field

        return is_field(self.run.config.model)

    @property
    def made_by(self) -> dict[str, str]:
        found = self.found
        sha256, error = (None, None) if found is None else (found.sha256, found.error)
        return {
            "model": self._name,
            "weights_sha256": "not kept" if sha256 is None else sha256[:12],
            "decoder": "none, a field model" if self._is_field else self._decoded,
            "held_out": error or "not known",
        }

    @property
    def spacing_a(self) -> float | None:
        if self._is_field:
            return None  # it predicts points, and its rows are of grids of any spacing
        return super().spacing_a

    @property
    def run(self) -> "LoadedRun":
        self.load()
        assert self._run is not None
        return self._run

    def load(self) -> None:
        if self._run is None:
            from tomat.predict.inference.trained import load_weights_found

            assert self.found is not None
            tell(f"loading the model of {self.found.folder}")
            self._take(load_weights_found(self.found, packed=True))

    def _take(self, run: "LoadedRun") -> None:
        from tomat.predict.inference.decoding import check_decoder

        check_decoder(run.config, self.decoder, self.rounds)
        assert run.tables is not None and run.promolecule is not None  # `tables` raises where there is no promolecule
        if self.decoder == "autoregressive":
            from tomat.predict.inference.autoregressive import require_cache

            require_cache(run.model)
        require_unit(run.codec, UNIT_E_PER_A3, "a prediction")
        self._run = run
        self.promolecule = run.promolecule
        self._means = run.codec.decode(np.arange(run.codec.n_density_tokens), decoder="mean")

    def density(
        self, crystal: Crystal, grid_shape: tuple[int, int, int], on_patches: OnPatches | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        import haliax as hax

        from tomat.model.any_decoder import is_field
        from tomat.predict.inference.decoding import batches, cell_patches

        if is_field(self.run.config.model):
            from tomat.predict.inference.field import cell_density

            return cell_density(self.run, crystal, grid_shape, on_patches)
        patches = cell_patches(self.run, crystal, grid_shape)
        trainer = self.run.config.trainer_config()
        samples, n_patches, n_voxels = self.choice.samples, len(patches.anchors), prod(patches.patch_shape)
        rows = np.arange(samples * n_patches, dtype=np.int32)
        arrays = {name: array[rows % n_patches] for name, array in patches.arrays.items()}
        if self.decoder != "parallel":
            arrays |= {"patch": rows % n_patches, "sample": rows // n_patches}
        parts: list[np.ndarray] = []
        with trainer.use_device_mesh():
            model = hax.shard(self.run.model, trainer.parameter_axis_mapping)
            size, program = self._program(model, arrays, n_voxels)
            for real, batch in batches(arrays, size):
                found = program(*self._arguments(model, batch, n_voxels))
                found = found if self.decoder == "parallel" else found[1]  # the values of (bins, values)
                parts.append(np.asarray(found)[:real])
                if on_patches is not None:
                    on_patches(min(len(parts) * size, len(rows)), len(rows))
        values = np.concatenate(parts).reshape(samples, n_patches, n_voxels)
        # The decoder gives ratios for a relative codec. Each voxel has its own scale to a density.
        cells = np.stack([patches.codec.density(patches.assembled(each)) for each in values])
        return cells.mean(axis=0), cells.std(axis=0, ddof=1) if samples > 1 else None

    def _arguments(self, model: "LmHeadModel", batch: dict[str, np.ndarray], n_voxels: int) -> tuple[Any, ...]:
        trainer, choice = self.run.config.trainer_config(), self.choice
        first = model, batch, self.run.tables, self._means, n_voxels
        mapped = trainer.compute_axis_mapping, trainer.mp
        if self.decoder == "parallel":
            return *first, self.rounds, *mapped
        drawn = np.asarray(choice.temperature, np.float32), np.asarray(choice.seed, np.uint32)
        kept = (self.kv_cache_dtype,) if self.decoder == "autoregressive" else ()
        return *first, choice.kind, *drawn, *mapped, *kept

    def _program(self, model: "LmHeadModel", arrays: dict[str, np.ndarray], n_voxels: int) -> tuple[int, Callable]:
        """The number of sequences decoded at a time, and the decoder compiled for it."""
        from tomat.predict.inference import decoding

        devices = self.run.config.trainer_config().data_axis_size
        most = decoding.sequences_to_try(self.decoder, len(arrays["tokens"]), devices)
        key = most, n_voxels, *((name, array.shape[1:]) for name, array in arrays.items())
        if key not in self._programs:
            decode: Any = decoding.decode_parallel if self.decoder == "parallel" else decoding.decode_speculative
            if self.decoder == "autoregressive":
                from tomat.predict.inference.autoregressive import decode_autoregressive as decode

            def lower(size: int):
                return decode.lower(*self._arguments(model, decoding.first_rows(arrays, size), n_voxels))

            free = decoding.free_bytes()
            size, program, needed = decoding.largest_batch(lower, most, devices, free)
            if not self._programs:
                tell(
                    f"{self.decoder} decoder: {counted(size, 'patch', 'patches')} of {n_voxels:,} voxels at a time on "
                    f"{counted(devices, 'device')}, {needed / 2**30:.2f} GiB of {free / 2**30:.2f} GiB free on each.",
                    soft_wrap=True,
                )
            self._programs[key] = size, program
        return self._programs[key]


def load(
    run_dir: str | Path = PACKAGED_MODEL,
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
    """The predictor of a run, of a folder of weights, or of one on the Hugging Face hub (`hf://ORG/NAME`); by default
    of the packaged model.

    `step` is the step of a checkpoint (None: the newest). `rounds` is the number of forward passes per patch of the
    parallel decoder. The autoregressive decoder, and the speculative one, which finds the same bins in fewer passes,
    take `choice`, a `Choice.kind` (None: sampled if one of the next three is given, else median), and `samples`,
    `temperature` and `seed` as in `Choice`. With the autoregressive decoder, `kv_cache_dtype` int8 caches keys and
    values in 8 bits (None: in the type that the model computes in).
    """
    drawn = {"choice": choice, "samples": samples, "temperature": temperature, "seed": seed}
    predictor = described(run_dir, step, rounds=rounds, decoder=decoder, kv_cache_dtype=kv_cache_dtype, **drawn)
    predictor.load()
    return predictor


def described(
    run_dir: str | Path,
    step: int | None = None,
    *,
    rounds: int = 1,
    decoder: DecoderName = "parallel",
    kv_cache_dtype: KvCacheDtype | None = None,
    **drawn: Any,
) -> RunPredictor:
    """As `load`, but the model is only loaded for the first structure that is predicted."""
    given = {name: value for name, value in drawn.items() if value is not None}
    if decoder == "parallel" and given:
        said = f"{next(iter(given))} is for the autoregressive and speculative decoders"
        raise TomatError(f"{said}; the parallel one has one answer. Choose decoder speculative, or leave it out.")
    kind = given.pop("choice", None) or ("sampled" if given else "median")
    choice = Choice(kind, **given)
    if str(run_dir).startswith("hf://"):
        from tomat.predict.weights.hub import hub_folder

        run_dir = hub_folder(str(run_dir))
    return RunPredictor(find_weights(run_dir, step), rounds, decoder, choice, kv_cache_dtype or "compute")
