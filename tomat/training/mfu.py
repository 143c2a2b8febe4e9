"""What a run's step has to do, from its configuration: the FLOPs that `hardware/mfu.py` divides by the chips' peak."""

import warnings
from math import prod

from tomat.base.errors import TomatError
from tomat.hardware.chips import chip_for_device_kind
from tomat.hardware.executed import Recomputation, attention_kernels, executed_head_flops, executed_training_flops
from tomat.hardware.flops import (
    ModelShape,
    UsefulTokens,
    levanter_training_flops,
    training_flops,
    useful_training_flops,
)
from tomat.hardware.mfu import LiveMfu, StepWork
from tomat.settings.config import TrainConfig

TYPICAL_ATOMS = 12
"""Atoms of the median material of the Materials Project set; the preamble's length follows from them."""


def step_work(config: TrainConfig, platform: str, n_atoms: int = TYPICAL_ATOMS) -> StepWork:
    """The work of a run's step.

    Args:
        config: The run.
        platform: "tpu", "gpu" or "cpu"; decides the attention kernel where the configuration names none.
        n_atoms: Atoms of a typical material, for the useful tokens.

    Raises:
        TomatError: A model or a setting whose FLOPs are not known.
    """
    vocab_size = config.data.model_vocabulary
    shape = ModelShape.from_config(config.model, vocab_size)
    density_only = config.loss.vocabulary == "density" and config.loss.preamble_weight == 0
    rows = config.data.n_density_tokens if density_only else vocab_size
    seq_len = config.seq_len
    layout = config.data.sequence_layout
    patch_shape = layout.patch_shape(n_atoms)
    n_preamble = min(layout.preamble_tokens(n_atoms, patch_shape), seq_len)
    useful = UsefulTokens(
        n_preamble=n_preamble,
        n_density=min(layout.tokens_per_voxel * prod(patch_shape), seq_len - n_preamble),
        head_rows=rows,
        loss_on_preamble=config.loss.preamble_weight > 0,
    )
    kernels = attention_kernels(config.model, seq_len, platform)
    executed = executed_training_flops(
        shape,
        seq_len,
        kernels,
        Recomputation.from_config(config.model, kernels.backend),
        executed_head_flops(shape, seq_len, rows, config.loss.block_positions, config.loss.kernel),
    )
    batch = config.batch_size
    return StepWork(
        shape=shape,
        batch_sequences=batch,
        sequence_tokens=seq_len,
        useful=useful,
        flops_full=batch * training_flops(shape, seq_len, "full"),
        flops_causal=batch * training_flops(shape, seq_len, "causal"),
        flops_useful=batch * useful_training_flops(shape, useful),
        flops_levanter=batch * levanter_training_flops(shape, seq_len),
        flops_executed=batch * executed,
    )


def live_mfu(config: TrainConfig, device_kind: str, n_devices: int) -> LiveMfu:
    """What a run logs for each step on the devices at hand.

    An unknown chip, or a model whose FLOPs are not known, warns; the run then logs no MFU.

    Args:
        config: The run.
        device_kind: `jax.devices()[0].device_kind`.
        n_devices: `jax.device_count()`.
    """
    tokens = config.batch_size * config.seq_len
    chip = chip_for_device_kind(device_kind)
    if chip is None:
        return LiveMfu(None, tokens, None, n_devices)
    try:
        work = step_work(config, "tpu" if device_kind.startswith("TPU") else "gpu")
    except TomatError as error:
        warnings.warn(f"no MFU is reported: {error}", stacklevel=2)
        work = None
    peak = n_devices * chip.peak_bf16_flops_per_device
    return LiveMfu(work, tokens, peak, max(1, n_devices // chip.jax_devices_per_chip))
