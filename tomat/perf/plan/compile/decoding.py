"""The two decoders of `inference` for a mesh of devices that are not there, as StableHLO; `lowering.py` says how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from levanter.utils.tree_utils import inference_mode

from tomat.base.errors import TomatError
from tomat.model.any_decoder import environment_of
from tomat.model.kv_cache import KvCacheDtype
from tomat.perf.plan.compile.lowering import placed, stand_in_tables
from tomat.predict.inference.autoregressive import decode_autoregressive
from tomat.predict.inference.parallel import decode_parallel
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import TrainConfig


@dataclass(frozen=True)
class DecoderBatch:
    """What decides a decoder's program beside the configuration."""

    decoder: str
    """`parallel` or `autoregressive`."""
    patches: int
    """At a time, of all devices."""
    n_voxels: int
    """Of a patch."""
    n_atoms: int
    """That there is room for near a patch."""
    n_elements: int
    """Of these atoms."""
    rounds: int = 1
    """Forward passes of the parallel decoder."""
    kv_cache_dtype: KvCacheDtype = "compute"
    """Of what the autoregressive decoder keeps."""


def lower_decoder(
    config: TrainConfig, mesh: Mesh, batch: DecoderBatch, bin_values: np.ndarray | None
) -> jax.stages.Lowered:
    """Lower what `RunPredictor` runs for one batch of patches.

    Args:
        config: Of a run whose model has `environment`.
        mesh: Devices of a topology or of this machine.
        batch: Its sizes.
        bin_values: float32 [bin], e/A^3; a stand-in changes no operation.
    """
    environment = environment_of(config.model)
    if environment is None or bin_values is None:
        raise TomatError("decoders are for a model with model.environment and a codec of one token a voxel.")
    trainer, tables = config.trainer_config(), stand_in_tables(environment, bin_values)
    mapping = trainer.parameter_axis_mapping
    n, atoms = batch.patches, batch.n_atoms
    shapes = {
        "tokens": (jnp.int32, n, config.seq_len),
        "positions": (jnp.float32, n, atoms, 3),
        "numbers": (jnp.int32, n, atoms),
        "kinds": (jnp.int32, n, batch.n_elements),
        "steps": (jnp.float32, n, 3, 3),
        "shape": (jnp.int32, n, 3),
    }
    if batch.decoder == "autoregressive":
        shapes |= {"patch": (jnp.int32, n), "sample": (jnp.int32, n)}
    # Without a sharding, as the NumPy arrays that a predictor hands over: the compiler finds it.
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (dtype, *shape) in shapes.items()}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping(mapping):
        built = eqx.filter_eval_shape(model_initialiser(config, jax.random.PRNGKey(0)))
        model = placed(inference_mode(built, True), mapping, mesh)
    weights, static = eqx.partition(model, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    mapped = trainer.compute_axis_mapping, trainer.mp

    # The name says to the compiling process whose files to keep (`process.dump_flags`).
    def decode_patches(weights: Any, arrays: Any, means: Any, temperature: Any, seed: Any) -> Any:
        whole = eqx.combine(weights, static)
        if batch.decoder == "parallel":
            return decode_parallel(whole, arrays, tables, means, batch.n_voxels, batch.rounds, *mapped)
        how = "median", temperature, seed
        kept = batch.kv_cache_dtype
        return decode_autoregressive(whole, arrays, tables, means, batch.n_voxels, *how, *mapped, kept)

    rest = (bin_values.shape, np.float32), ((), np.float32), ((), np.uint32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(decode_patches).lower(weights, arrays, *(jax.ShapeDtypeStruct(*each) for each in rest))
