"""The work of a run's step, from its configuration: the products that `hardware/mfu.py` compares with peak rates."""

import dataclasses
import warnings

import jax.numpy as jnp
from levanter.models.lm_model import LmConfig

from tomat.base.errors import TomatError
from tomat.hardware import executed, flops
from tomat.hardware.chip_table import Operand
from tomat.hardware.chips import chip_for_device_kind
from tomat.hardware.flops import OperandTypes, UsefulTokens
from tomat.hardware.mfu import LiveMfu, StepWork
from tomat.model.any_decoder import environment_of, int8_matmuls_of
from tomat.model.attention import resolve_backend
from tomat.model.decoder import DensityDecoderConfig, parameter_count
from tomat.model.environment import EnvironmentConfig
from tomat.model.field import FieldConfig
from tomat.model.shape import decoder_shape, field_shape
from tomat.train.settings.config import TrainConfig

TYPICAL_ATOMS = 12
"""Number of atoms of the median material of the Materials Project set; the length of the preamble follows from it."""


def step_work(config: TrainConfig, platform: str, n_atoms: int = TYPICAL_ATOMS) -> StepWork:
    """The work of a run's step on `platform` ("tpu", "gpu" or "cpu"), which decides the attention kernel where the
    configuration names none. `n_atoms`, of a typical material, gives the number of useful tokens."""
    if isinstance(config.model, FieldConfig):
        return _field_work(config, config.model)
    vocab_size = config.data.model_vocabulary
    shape = decoder_shape(config.model, vocab_size)
    density_only = config.loss.vocabulary == "density" and config.loss.preamble_weight == 0
    rows = config.data.n_density_tokens if density_only else vocab_size
    seq_len = config.seq_len
    preamble, density = config.data.sequence_layout.row_tokens(n_atoms)
    n_preamble = min(preamble, seq_len)
    useful = UsefulTokens(
        n_preamble=n_preamble,
        n_density=min(density, seq_len - n_preamble),
        head_rows=rows,
        loss_on_preamble=config.loss.preamble_weight > 0,
    )
    kernels = executed.attention_kernels(config.model, seq_len, platform)
    again = executed.Recomputation.from_config(config.model, shape, kernels.backend)
    # The prior adds components to hidden states and head (`Environment.with_prior`).
    wide = dataclasses.replace(shape, hidden_dim=shape.hidden_dim + _prior_anchors(config.model))
    head = executed.executed_head_flops(wide, seq_len, rows, config.loss.block_positions, config.loss.kernel)
    batch = config.batch_size
    return StepWork(
        shape=shape,
        parameters=parameter_count(config.model_config(), vocab_size),
        batch_sequences=batch,
        sequence_tokens=seq_len,
        useful=useful,
        full=flops.training_products(shape, seq_len, "full").times(batch),
        causal=flops.training_products(shape, seq_len, "causal").times(batch),
        useful_products=flops.useful_training_products(shape, useful).times(batch),
        executed=executed.executed_training_products(shape, seq_len, kernels, again, head).times(batch),
        flops_levanter=batch * flops.levanter_training_flops(shape, seq_len),
        operands=operand_types(config),
    )


def _prior_anchors(model: LmConfig) -> int:
    """Components that the prior of a decoder adds to hidden states and head."""
    environment = environment_of(model)
    return environment.prior_anchors if isinstance(environment, EnvironmentConfig) else 0


def _field_work(config: TrainConfig, model: FieldConfig) -> StepWork:
    """The work of a field model, whose tokens are voxels; the counted products stand for the executed ones too."""
    shape, voxels = field_shape(model), config.batch_size * config.seq_len
    whole = flops.field_training_products(shape, voxels)
    return StepWork(
        shape=shape,
        parameters=parameter_count(config.model_config(), config.data.model_vocabulary),
        batch_sequences=config.batch_size,
        sequence_tokens=config.seq_len,
        useful=UsefulTokens(0, config.seq_len, head_rows=1),
        full=whole,
        causal=whole,
        useful_products=flops.field_training_products(shape, voxels, useful=True),
        executed=whole,
        flops_levanter=whole.total,
        operands=operand_types(config),
    )


def operand_types(config: TrainConfig) -> OperandTypes:
    """The operand types of the products in a run's step, from all settings of types and precision."""
    compute = jnp.dtype(config.trainer.compute_dtype)
    usual: Operand = "f32" if compute == jnp.float32 else "bf16"
    attention: Operand = "f32" if getattr(config.model, "upcast_attn", False) else usual
    precision = config.trainer.jax_config.get("jax_default_matmul_precision")
    if compute.itemsize > 4 or ("f32" in (usual, attention) and precision not in (None, "default", "fastest")):
        said = f"products in {compute.name} (jax_default_matmul_precision {precision}) have no known peak"
        raise TomatError(f"{said}; set trainer.mp to bfloat16, float16 or, at the default precision, float32.")
    forward = inputs = weights = usual
    quantised = config.trainer.quantization
    if quantised is not None and (quantised.int8 or quantised.fp8):
        if quantised.targets is not None:
            raise TomatError("trainer.quantization.targets is set: FLOPs of some layers are not counted; leave it out.")
        forward = inputs = "int8" if quantised.int8 else "fp8"
        weights = usual if quantised.int8 else "fp8"  # AQT leaves the weights' gradients in `usual`, as tomat does
    if (products := int8_matmuls_of(config.model)) is not None:
        forward = "int8"
        inputs = "int8" if products == "forward_and_inputs" else usual
    return OperandTypes(forward, inputs, weights, attention, usual)


def live_mfu(config: TrainConfig, device_kind: str, n_devices: int) -> LiveMfu:
    """The figures that a run logs for each step on the devices at hand. There is no MFU on an unknown chip, nor, with a
    warning, of a model whose FLOPs are not known."""
    chip = chip_for_device_kind(device_kind)
    work = None
    if chip is not None:
        try:
            model = config.model
            platform = "tpu" if device_kind.startswith("TPU") else "gpu"
            if platform == "gpu" and isinstance(model, DensityDecoderConfig) and model.attn_backend is None:
                dtype = jnp.float32 if model.upcast_attn else config.trainer.compute_dtype
                chosen = resolve_backend(None, platform, head_size=model.actual_head_size, dtype=dtype)
                config = dataclasses.replace(config, model=dataclasses.replace(model, attn_backend=chosen))
            work = step_work(config, platform)
        except TomatError as error:
            warnings.warn(f"no MFU is reported: {error}", stacklevel=2)
    return LiveMfu(work, config.batch_size * config.seq_len, chip, n_devices)
