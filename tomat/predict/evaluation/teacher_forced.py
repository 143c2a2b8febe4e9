"""Teacher-forced evaluation: the model reads the true tokens of a held-out patch and predicts each next one.

It measures what next-token training optimises, and nothing more: the same weights had 0.91 % teacher-forced and 386 %
free-running. So every result carries its label and the baselines that read the same true neighbours.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jmp
import numpy as np
from haliax.partitioning import ResourceMapping
from jax import Array
from levanter.models.lm_model import LmHeadModel

from tomat.base.errors import TomatError
from tomat.data.codec.base import DensityCodec
from tomat.data.density.elements import reduced_formula
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.patch import check_encodable, tiling_anchors
from tomat.data.tokens.vocabulary import DENSITY_START
from tomat.model.any_decoder import environment_of
from tomat.model.environment import EnvironmentTables
from tomat.model.nearby_atoms import AtomsRead, stacked_atoms
from tomat.predict.evaluation.metrics import nemd, nmae
from tomat.predict.evaluation.patches import (
    EvaluationPatches,
    check_codec,
    make_patches,
    predict_baselines,
    random_anchors,
)
from tomat.predict.evaluation.result import MaterialResult, TeacherForcedResult
from tomat.predict.inference.decoding import batches, quantile_bin, whole_passes
from tomat.predict.inference.trained import LoadedRun


@dataclass(frozen=True)
class TeacherForcedConfig:
    patches_per_material: int = 8
    whole_cell: bool = False
    """Tile each cell instead, counting every voxel once."""
    seed: int = 0
    """Seeds the anchors, together with the material's id."""
    batch_size: int = 8
    """Sequences per forward pass; a multiple of the number of devices on the data axis."""
    block_voxels: int = 64
    """Voxels of each patch whose logits exist at once: 8 x 64 x 16,384 bins in float32 are 34 MB."""


class DecodedVoxels[A](NamedTuple):
    """What is decoded from the predicted distribution over bins of each voxel: JAX or NumPy arrays of one shape."""

    median_bin: A
    """int32: the smallest bin with a cumulative probability of at least 1/2, which minimises the expected error."""
    mode_bin: A
    """int32: the most probable bin."""
    mean_e_per_a3: A
    """float32: expectation over the codec's means."""
    emd_e_per_a3: A
    """float32: `E_{v~p} |v - rho_ref|` over the codec's medians, against the unquantised reference. On the device, mean
    and EMD are in the quantity that the codec has bins of (`CellCodec.values`): a density, or a ratio."""
    cross_entropy_nats: A
    """float32: -log p of the true bin."""


def decode_logits(
    logits: Array, reference: Array, true_bins: Array, medians: Array, means: Array
) -> DecodedVoxels[Array]:
    """Decode logits over the density bins, float32 [..., K], beside the unquantised reference, float32 [...], and the
    true bins, int32 [...]; the codec's medians, [K] in the unit of the reference, increase with the bin."""
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1)
    distance = jnp.abs(medians - reference[..., None])
    true_logit = jnp.take_along_axis(logits, true_bins[..., None], axis=-1)[..., 0]
    return DecodedVoxels(
        median_bin=quantile_bin(weights, 0.5),
        mode_bin=jnp.argmax(logits, axis=-1).astype(jnp.int32),
        mean_e_per_a3=jnp.sum(weights * means, axis=-1) / total,
        emd_e_per_a3=jnp.sum(weights * distance, axis=-1) / total,
        cross_entropy_nats=jnp.log(total) + logits.max(axis=-1) - true_logit,
    )


@contextlib.contextmanager
def evaluator_of(run: LoadedRun, config: TeacherForcedConfig) -> Iterator[tuple["TeacherForcedEvaluator", LmHeadModel]]:
    """An evaluator for a run, with a batch that is a multiple of the devices, and its model, on the trainer's mesh."""
    trainer = run.config.trainer_config()
    sequences = -(-config.batch_size // trainer.data_axis_size) * trainer.data_axis_size
    of_run = run.codec, run.config.data.sequence_layout, replace(config, batch_size=sequences)
    how = {"axis_mapping": trainer.compute_axis_mapping, "policy": trainer.mp, "tables": run.tables}
    with trainer.use_device_mesh():
        evaluator = TeacherForcedEvaluator(*of_run, **how)
        yield evaluator, hax.shard(run.model, trainer.parameter_axis_mapping)


class TeacherForcedEvaluator:
    """Evaluates models with the layout and the codec of a run. The codec has one token a voxel, in e/Å³. Use an axis
    mapping within the model's mesh. A policy, if given, casts the model to its compute type."""

    def __init__(
        self,
        codec: DensityCodec,
        layout: SequenceLayout,
        config: TeacherForcedConfig = TeacherForcedConfig(),  # noqa: B008  (immutable)
        *,
        axis_mapping: ResourceMapping | None = None,
        policy: jmp.Policy | None = None,
        tables: EnvironmentTables | None = None,
    ) -> None:
        check_codec(codec)
        self.codec, self.layout, self.config = codec, layout, config
        bins = np.arange(codec.n_density_tokens, dtype=np.uint16)
        self.medians = codec.decode(bins, decoder="median")
        self.means = codec.decode(bins, decoder="mean")
        self._placement = (axis_mapping, policy)
        self._tables = tables

    def sampling(self, model: LmHeadModel) -> dict[str, Any]:
        """The settings that decide which voxels are evaluated, and in which bins. A result records them."""
        return {
            "layout": self.layout.name,
            "codec_sha256": self.codec.sha256,
            "patches_per_material": None if self.config.whole_cell else self.config.patches_per_material,
            "whole_cell": self.config.whole_cell,
            "seed": self.config.seed,
            "seq_len": min(self.layout.context, model.Pos.size),
        }

    def patches(self, model: LmHeadModel, grid: DensityGrid) -> EvaluationPatches:
        """The patches of `grid` that the configuration asks for, cut to what `model` reads."""
        if self.config.whole_cell:
            anchors = tiling_anchors(grid.grid_shape, check_encodable(grid, self.layout, self.codec))
        else:
            count = self.config.patches_per_material
            anchors = random_anchors(grid.material_id, grid.grid_shape, count, self.config.seed)
        return self.patches_at(model, grid, anchors, tiling=self.config.whole_cell)

    def patches_at(
        self, model: LmHeadModel, grid: DensityGrid, anchors: np.ndarray, *, tiling: bool = False
    ) -> EvaluationPatches:
        """The patches of `grid` at `anchors`, int [patch, 3], cut to what `model` reads."""
        seq_len = min(self.layout.context, model.Pos.size)
        return make_patches(grid, anchors, self.layout, self.codec, seq_len=seq_len, tiling=tiling)

    def predict(
        self,
        model: LmHeadModel,
        materials: Sequence[EvaluationPatches],
        on_sequences: Callable[[int, int], None] | None = None,
    ) -> list[DecodedVoxels[np.ndarray]]:
        """The model's predictions for patches of several materials, batched together; arrays [patch, px, py, pz]."""
        expected = DENSITY_START + self.codec.n_density_tokens
        if model.Vocab.size < expected:
            said = f"the model has {model.Vocab.size:,} ids and the codec needs {expected:,}"
            raise TomatError(f"{said}; evaluate the model with the codec it was trained with (the run's codec.json).")
        total = sum(patches.n_patches for patches in materials)
        parts: list[DecodedVoxels[np.ndarray]] = []
        for start, batch in self._batches(materials, environment_of(model.config)):
            blocks = self.config.block_voxels
            decoded = _decode_batch(model, batch, self._tables, self.medians, self.means, blocks, *self._placement)
            parts.append(jax.tree.map(_on_host, decoded))
            if on_sequences is not None:
                on_sequences(min(start + self.config.batch_size, total), total)
        whole: DecodedVoxels[np.ndarray] = jax.tree.map(lambda *leaves: np.concatenate(leaves)[:total], *parts)
        predictions, row = [], 0
        for patches in materials:
            rows, shape = slice(row, row + patches.n_patches), patches.reference.shape
            own = DecodedVoxels(*(leaf[rows, : patches.true_bins.shape[1]].reshape(shape) for leaf in whole))
            if (scale := patches.codec.scale) is not None:  # with a relative codec, both are ratios
                mean, emd = patches.codec.density(own.mean_e_per_a3), scale * own.emd_e_per_a3
                own = own._replace(mean_e_per_a3=mean, emd_e_per_a3=emd)
            predictions.append(own)
            row += patches.n_patches
        return predictions

    def _batches(
        self, materials: Sequence[EvaluationPatches], environment: AtomsRead | None
    ) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Batches of one shape, each with the number of sequences before it. Smaller patches are padded with zeros."""

        def filled(rows: np.ndarray) -> np.ndarray:
            flat = rows.reshape(len(rows), -1)
            return np.pad(flat, ((0, 0), (0, self.layout.n_voxels - flat.shape[1])))

        everything = {
            "tokens": np.concatenate([patches.tokens for patches in materials]).astype(np.int32),
            "reference": np.concatenate([filled(patches.codec.values(patches.reference)) for patches in materials]),
            "true_bins": np.concatenate([filled(patches.true_bins) for patches in materials]).astype(np.int32),
        }
        if environment is not None:
            everything |= stacked_atoms([atoms for patches in materials for atoms in patches.atoms(environment)])
        # Repeating a real sequence, rather than zeros, keeps every attention row well defined.
        for number, (_, batch) in enumerate(batches(everything, self.config.batch_size)):
            yield number * self.config.batch_size, batch

    def evaluate(
        self,
        model: LmHeadModel,
        material_ids: Sequence[str],
        load: Callable[[str], DensityGrid],
        *,
        settings: Mapping[str, Any] | None = None,
        done: Mapping[str, MaterialResult] | None = None,
        on_material: Callable[[MaterialResult], None] | None = None,
        on_sequences: Callable[[int, int], None] | None = None,
    ) -> TeacherForcedResult:
        """Evaluate `model` on materials, a few at a time. Those in `done`, with the same settings, are not loaded."""
        if not material_ids:
            raise TomatError("no material to evaluate; choose a split or input that has at least one.")
        done = done or {}
        results = {name: done[name] for name in material_ids if name in done}
        group: list[tuple[str, EvaluationPatches]] = []

        def finish_group() -> None:
            if not group:
                return
            all_predictions = self.predict(model, [patches for _, patches in group], on_sequences)
            for (name, patches), predictions in zip(group, all_predictions, strict=True):
                results[name] = measure(name, patches, predictions)
                if on_material is not None:
                    on_material(results[name])
            group.clear()

        for name in material_ids:
            if name in results:
                continue
            group.append((name, self.patches(model, load(name))))
            # Enough to fill two batches; a whole cell is a group by itself.
            if sum(patches.n_patches for _, patches in group) >= 2 * self.config.batch_size:
                finish_group()
        finish_group()
        said = {**(settings or {}), **self.sampling(model)}
        return TeacherForcedResult(said, tuple(results[name] for name in material_ids))


def measure(material_id: str, patches: EvaluationPatches, predictions: DecodedVoxels[np.ndarray]) -> MaterialResult:
    """Figures of model and baselines for a material, over its counted voxels. Their median is the constant baseline."""
    counted = patches.counted.reshape(patches.reference.shape)
    reference, codec = patches.reference[counted], patches.codec.at(counted)
    median, mode = (codec.decode(bins[counted]) for bins in (predictions.median_bin, predictions.mode_bin))
    constant = float(np.median(reference))
    baselines = predict_baselines(patches.visible, patches.codec, constant)
    try:
        sums = (each.sum(dtype=np.float64) * patches.voxel_volume_a3 for each in (median, reference))
        predicted_e, reference_e = map(float, sums)
        return MaterialResult(
            material_id=material_id,
            patches=patches.n_patches,
            voxels=patches.n_voxels,
            teacher_forced_nmae_median=nmae(median, reference),
            teacher_forced_nmae_mean=nmae(predictions.mean_e_per_a3[counted], reference),
            teacher_forced_nmae_mode=nmae(mode, reference),
            teacher_forced_nemd=nemd(predictions.emd_e_per_a3[counted], reference),
            teacher_forced_cross_entropy_nats=float(predictions.cross_entropy_nats[counted].mean(dtype=np.float64)),
            teacher_forced_charge_relative_error=(predicted_e - reference_e) / reference_e,
            teacher_forced_charge_e=predicted_e,
            reference_charge_e=reference_e,
            codec_floor_nmae=nmae(codec.rounded(reference), reference),
            lorenzo_nmae=nmae(baselines["lorenzo"][counted], reference),
            copy_previous_nmae=nmae(baselines["copy_previous"][counted], reference),
            constant_median_nmae=nmae(baselines["constant_median"][counted], reference),
            compound=reduced_formula(patches.crystal.atomic_numbers.tolist()),
        )
    except TomatError as error:
        raise TomatError(f"material {material_id}: {error}") from error


# All evaluators share one compiled function, so a hook, or a second evaluation of the same shapes, compiles nothing.
@eqx.filter_jit
def _decode_batch(
    model: LmHeadModel,
    batch: dict[str, np.ndarray],
    tables: EnvironmentTables | None,
    medians: np.ndarray,
    means: np.ndarray,
    block_voxels: int,
    axis_mapping: ResourceMapping | None,
    policy: jmp.Policy | None,
) -> DecodedVoxels[Array]:
    """Forward pass and decoding of one batch. The batch holds NumPy arrays, which JAX takes as equal on every host."""
    if policy is not None:
        model = policy.cast_to_compute(model)
    with hax.axis_mapping(axis_mapping or {}):
        ids, _, read = whole_passes(model, batch, tables, len(medians), batch["reference"].shape[1], block_voxels)
        decode = partial(decode_logits, medians=jnp.asarray(medians), means=jnp.asarray(means))
        return read(ids, decode, jnp.asarray(batch["reference"]), jnp.asarray(batch["true_bins"]))


def _on_host(array: Array) -> np.ndarray:
    """The whole array on every host, even if its shards lie on several hosts."""
    if array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(array, tiled=True))
