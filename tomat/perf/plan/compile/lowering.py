"""Lowers the trainer's step, and the programs of a prediction, to StableHLO for a mesh of devices that are not present.

The step is `Trainer._train_step` as `named_jit` wraps it in Levanter 0.2.227. This module does the same for shapes,
because `named_jit(...).lower` needs arrays on a mesh of real devices: with a mesh of described devices, any operation
outside the trace ends in "'Executable' object has no attribute 'local_devices'". So the state is made of
`ShapeDtypeStruct`s, and the trace sees only the mesh's abstract form. A test compares the result with what the trainer
lowers on a mesh of CPU devices."""

from dataclasses import dataclass, replace
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax.partitioning import ResourceMapping, infer_resource_partitions
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionBackend
from levanter.models.lm_model import LmConfig
from levanter.tracker import NoopConfig
from levanter.trainer_state import TrainerState
from levanter.utils.tree_utils import inference_mode

from tomat.base.errors import TomatError
from tomat.base.ports.levanter import settle, step_without_hooks
from tomat.data.codec.relative import OFFSET_E_PER_A3
from tomat.data.density.elements import SYMBOLS
from tomat.model.any_decoder import environment_of, is_field
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.environment import MOST_DESCRIPTORS, EnvironmentTables
from tomat.model.nearby_atoms import AtomsRead, NearbyAtoms, PatchAtoms, Room, ScatteredAtoms
from tomat.predict.inference.autoregressive import decode_autoregressive
from tomat.predict.inference.decoding import decode_parallel
from tomat.predict.inference.field import BOXES, densities_of_boxes
from tomat.predict.inference.interface import KvCacheDtype
from tomat.train.loader import TokenExample
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import TrainConfig
from tomat.train.step import build_trainer


def stand_in_table(config: TrainConfig) -> np.ndarray | None:
    """Stand-in values of the codec's bins when no codec is at hand, float32 `[n_density_tokens]`: densities in e/Å³, or
    ratios for a relative codec. They are constants of the program, and change no operation, no shape and no layout."""
    if config.data.sequence_layout.tokens_per_voxel != 1:
        return None
    if config.data.codec_relative:  # no ratio is 0
        return np.geomspace(0.1, 10, config.data.n_density_tokens, dtype=np.float32)
    return np.linspace(0, 36, config.data.n_density_tokens, dtype=np.float32)


def lower_step(config: TrainConfig, mesh: Mesh, value_table: np.ndarray | None) -> jax.stages.Lowered:
    """Lower one training step for `mesh`. Levanter reads the number of devices from JAX (batch per device,
    microbatches), so this process must show as many devices as the mesh has (`jax_num_cpu_devices`). `value_table` is
    as for `build_trainer`; its values are constants of the program."""
    trainer_config = config.trainer_config()
    trainer_config.tracker = NoopConfig()
    settle(trainer_config)
    if mesh.devices.flat[0].platform == "tpu":
        config = replace(config, model=_on_a_tpu(config.model))
    environment = environment_of(config.model)
    tables = None
    if environment is not None and value_table is not None:
        tables = stand_in_tables(environment, value_table, config.data.codec_relative)
    trainer = build_trainer(config, trainer_config, value_table, tables)
    mapping = trainer.parameter_axis_mapping
    key = jax.random.PRNGKey(0)

    def initialise() -> TrainerState:
        return TrainerState.init(
            trainer.optimizer,
            model_initialiser(config, key)(),
            key=key,
            is_trainable=True,
            mp=trainer_config.mp,
            quantization=trainer_config.quantization,
            model_averaging=trainer_config.model_averaging,
        )

    batch, position = hax.Axis("batch", config.batch_size), hax.Axis("position", config.seq_len)
    shape: Any = jax.ShapeDtypeStruct((batch.size, position.size), jnp.int32)
    tokens = hax.NamedArray(shape, (batch, position))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(mapping):
        state = placed(eqx.filter_eval_shape(initialise), mapping, mesh)
        example = placed(TokenExample(tokens, _stand_in_atoms(config, batch)), trainer.compute_axis_mapping, mesh)
        arguments = (state, (example,), {})

        def is_shape(leaf: Any) -> bool:
            return isinstance(leaf, jax.ShapeDtypeStruct)

        dynamic, static = eqx.partition(arguments, is_shape)

        def run(arguments: Any) -> Any:
            return step_without_hooks(trainer, *eqx.combine(arguments, static))

        out_shapes = eqx.filter(eqx.filter_eval_shape(run, dynamic), is_shape)
        out_shardings = infer_resource_partitions(out_shapes, mapping, mesh)

        def _train_step(donated: Any, reserved: Any) -> Any:
            # `named_jit` also returns the static parts beside the arrays, so results are named `result[0]...`.
            return eqx.filter(run(eqx.combine(donated, reserved)), eqx.is_array), ()

        donated, reserved = eqx.partition(dynamic, (True, False, False))
        jitted = jax.jit(_train_step, donate_argnums=0, out_shardings=(out_shardings, None))
        return jitted.lower(donated, reserved)


def _on_a_tpu(model: LmConfig) -> LmConfig:
    """A decoder of Levanter's with its default attention on a TPU. It would choose by the devices of this process
    (`levanter.layers.attention.default_attention_type`), which are CPUs. tomat's decoder uses the trace's platform."""
    left_open = getattr(model, "attn_backend", AttentionBackend.SPLASH) in (None, AttentionBackend.DEFAULT)
    own = isinstance(model, DensityDecoderConfig)
    return replace(model, attn_backend=AttentionBackend.SPLASH) if left_open and not own else model  # type: ignore[call-arg]


def stand_in_tables(environment: AtomsRead, value_table: np.ndarray, relative: bool = False) -> EnvironmentTables:
    """Stand-in constants of the environment; like those of `stand_in_table`, they do not change the program."""
    return EnvironmentTables(
        np.ones((len(SYMBOLS) + 1, environment.basis.n), np.float32),
        np.ones((len(SYMBOLS) + 1, MOST_DESCRIPTORS), np.float32),
        value_table,
        OFFSET_E_PER_A3 if relative else None,
    )


def _stand_in_atoms(config: TrainConfig, batch: hax.Axis) -> NearbyAtoms | None:
    """Shapes of the arrays of each row's atoms, which the loader gives a model with `model.environment`."""
    environment = environment_of(config.model)
    if environment is None:
        return None

    kind = ScatteredAtoms if config.data.sequence_layout.is_scattered else PatchAtoms
    shapes = {
        key: jax.ShapeDtypeStruct((batch.size, *sizes), dtype)
        for key, (dtype, *sizes) in Room.of(environment).shapes(kind, config.seq_len).items()
    }
    return kind.of(shapes, batch)


def placed(tree: Any, mapping: ResourceMapping, mesh: Mesh) -> Any:
    """The shapes of `tree` with the shardings that `mapping` gives them. Arrays without named axes are replicated."""
    whole = NamedSharding(mesh, PartitionSpec())

    def place(leaf: Any, sharding: Any) -> Any:
        if isinstance(leaf, hax.NamedArray):
            return hax.NamedArray(place(leaf.array, sharding), leaf.axes)
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if sharding is not None else whole)

    shardings = infer_resource_partitions(tree, mapping, mesh)
    return jax.tree.map(place, tree, shardings, is_leaf=lambda leaf: isinstance(leaf, hax.NamedArray))


@dataclass(frozen=True)
class DecoderBatch:
    """What a decoder's program depends on beside the configuration."""

    decoder: str
    """`parallel` or `autoregressive`."""
    patches: int
    """Patches at a time, on all devices; boxes for a field model."""
    n_voxels: int
    """Voxels of a patch."""
    n_atoms: int
    """Number of atoms near a patch for which there is room."""
    n_elements: int
    rounds: int = 1
    """Forward passes of the parallel decoder."""
    kv_cache_dtype: KvCacheDtype = "compute"
    """Type of the autoregressive decoder's cache."""


def lower_decoder(
    config: TrainConfig, mesh: Mesh, batch: DecoderBatch, bin_values: np.ndarray | None
) -> jax.stages.Lowered:
    """Lower the program that `RunPredictor` runs for one batch of patches. `bin_values`, float32 [bin], e/Å³, are
    constants; a stand-in changes no operation."""
    environment = environment_of(config.model)
    if environment is None or bin_values is None:
        raise TomatError("decoders are for a model with model.environment and a codec of one token a voxel.")
    trainer = config.trainer_config()
    tables = stand_in_tables(environment, bin_values, config.data.codec_relative)
    mapping = trainer.parameter_axis_mapping
    room, of_boxes = Room(batch.n_atoms, batch.n_elements), is_field(config.model)
    if of_boxes:
        n = batch.patches // BOXES
        shapes = room.shapes(ScatteredAtoms, BOXES * batch.n_voxels)
    else:
        n = batch.patches
        shapes = {"tokens": (jnp.int32, config.seq_len), **room.shapes()}
    if batch.decoder == "autoregressive":
        shapes |= {"patch": (jnp.int32,), "sample": (jnp.int32,)}
    # They have no sharding, like the NumPy arrays that a predictor passes; the compiler chooses it.
    arrays = {name: jax.ShapeDtypeStruct((n, *sizes), dtype) for name, (dtype, *sizes) in shapes.items()}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(mapping):
        built = eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))
        model = placed(inference_mode(built, True), mapping, mesh)
    weights, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    mapped = trainer.compute_axis_mapping, trainer.mp

    # By this name the compiling process selects the files to dump (`process.dump_flags`).
    def decode_patches(weights: Any, arrays: Any, means: Any, temperature: Any, seed: Any) -> Any:
        whole = eqx.combine(weights, static)
        if of_boxes:
            return densities_of_boxes(whole, arrays, tables, *mapped)
        if batch.decoder == "parallel":
            return decode_parallel(whole, arrays, tables, means, batch.n_voxels, batch.rounds, *mapped)
        how = "median", temperature, seed
        kept = batch.kv_cache_dtype
        return decode_autoregressive(whole, arrays, tables, means, batch.n_voxels, *how, *mapped, kept)

    rest = (bin_values.shape, np.float32), ((), np.float32), ((), np.uint32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(decode_patches).lower(weights, arrays, *(jax.ShapeDtypeStruct(*each) for each in rest))
