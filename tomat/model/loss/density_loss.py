"""The training loss on density tokens, in blocks of positions; `profiling/plain_loss.py` has it straight from formulas.

Shapes: B batch, P positions, E embedding, V vocabulary, R rows of the head in use, K density bins.
"""

import math
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from jax import lax
from jax.sharding import PartitionSpec

from tomat.base.errors import TomatError
from tomat.model.loss.config import LossConfig
from tomat.model.loss.interface import (
    BinTables,
    BlockSpec,
    DensityTarget,
    LossInputs,
    LossSums,
    PositionWeights,
)
from tomat.model.loss.xla import xla_loss_sums
from tomat.model.sharding import Sharding, current_mesh, mesh_axes


def density_loss(
    hidden: jax.Array | NamedArray,
    head: jax.Array | NamedArray,
    tokens: jax.Array | NamedArray,
    *,
    config: LossConfig,
    target: DensityTarget,
    unread: jax.Array | NamedArray | None = None,
    scale: jax.Array | NamedArray | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a batch and its metrics, never holding the logits of more than `config.block_positions` positions.

    The hidden state at position p, of `[batch, position, embed]` in the compute type, predicts `tokens[p + 1]`, integer
    `[batch, position]`; the head is `[vocab, embed]`. The batch may be missing, and named arrays may have their axes in
    any order. `scale`, float32 `[batch, position]` in e/Å³, is that of a relative codec. Where a mesh is active
    (concrete or abstract) and the current haliax axis mapping spreads `batch` or `position` over it, each device works
    on its part and the gradient of the head is summed over the devices once.

    The loss is a float32 scalar in `config.unit`; each metric is one too, a mean over sequences of a mean over the
    sequence's positions: `density_loss`; `cross_entropy_nats` of the true bin; `top1_accuracy` among the density bins,
    a tie of n counting 1/n; `emd_e_per_A3`, the mean of sum p |v - r|, and `rho_mean_e_per_A3` of the targets, whose
    ratio is the NEMD (both only with values); `preamble_cross_entropy_nats` (only with a preamble weight);
    `density_positions`, mean count; and `sequences_without_density`, the fraction that contributed 0. `unread`, bool
    `[batch]`, marks rows whose density the model was not given; with it there are also `unread_share`, their share, and
    `unread_density_loss`, their part of `density_loss`.
    """
    spec, inputs, constant_metrics = prepared(hidden, head, tokens, config, target, unread, scale)
    sharding = _sharding(hidden, inputs.hidden.shape)
    sums = cast(LossSums, loss_sums(spec, sharding, inputs))  # custom_vjp does not say what it returns
    metrics = loss_metrics(spec, sums, constant_metrics)
    if unread is not None:
        metrics["unread_share"] = jnp.mean(plain(unread, ("batch",)).astype(jnp.float32))
        metrics["unread_density_loss"] = lax.stop_gradient(sums.unread_loss)
    return sums.loss, metrics


def evaluation_sums(loss: jax.Array, metrics: dict[str, jax.Array], n_sequences: int) -> dict[str, jax.Array]:
    """A batch's loss and metrics, but for `sequences_without_density`, as sums over the `sequences` that count, so that
    batches of any size add up exactly. **A sequence counts if it has a density position**: one without, such as those
    that Levanter's loader fills a short last batch with, asks nothing of the model."""
    sums = {name: value * n_sequences for name, value in metrics.items() if name != "sequences_without_density"}
    counted = jnp.round(n_sequences * (1.0 - metrics["sequences_without_density"]))
    return {"sequences": counted, "loss": loss * n_sequences} | sums


def loss_metrics(spec: BlockSpec, sums: LossSums, constant_metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
    metrics = {"density_loss": sums.density_loss, "cross_entropy_nats": sums.cross_entropy, "top1_accuracy": sums.top1}
    metrics |= constant_metrics
    if spec.has_values:
        metrics |= {"emd_e_per_A3": sums.emd, "rho_mean_e_per_A3": sums.rho}
    if spec.config.preamble_weight > 0:
        metrics["preamble_cross_entropy_nats"] = sums.other_cross_entropy
    # The hand-written backward pass has no gradient for them.
    return {name: lax.stop_gradient(value) for name, value in metrics.items()}


def prepared(
    hidden: jax.Array | NamedArray,
    head: jax.Array | NamedArray,
    tokens: jax.Array | NamedArray,
    config: LossConfig,
    target: DensityTarget,
    unread: jax.Array | NamedArray | None = None,
    scale: jax.Array | NamedArray | None = None,
) -> tuple[BlockSpec, LossInputs, dict[str, jax.Array]]:
    """Plain arrays of the right shapes with each position's target and weight, and the metrics that need only these."""
    config.check_layout(target.tokens_per_voxel)
    hidden, head = plain(hidden, ("batch", "position", "embed")), plain(head, ("vocab", "embed"))
    tokens = plain(tokens, ("batch", "position"))
    if hidden.ndim == 2 and tokens.ndim == 1:
        hidden, tokens = hidden[None], tokens[None]
    start, end = target.density_start, target.density_end
    if start < 0 or target.n_density_tokens < 2 or end > head.shape[0]:
        raise TomatError(
            f"the density ids are {start}..{end - 1} and the head has {head.shape[0]} rows; expected two or more ids "
            "within the head. Build the model with the vocabulary of the data's codec."
        )
    if not target.has_values and config.kind != "cross_entropy":
        raise TomatError(f"loss.kind {config.kind} needs the codec's table of densities; there is none for this data.")

    offset = target.offset_e_per_a3 if target.has_values else None
    if offset is not None and scale is None:
        raise TomatError("the density ids are of a codec relative to the sum of atoms, which needs model.environment.")
    in_rho = config.kind == "soft_cross_entropy" and config.target_space == "rho"
    if offset is not None and config.kernel == "pallas" and in_rho:
        said = "loss.kernel is pallas and loss.target_space rho, whose kernels have one width for all voxels"
        raise TomatError(f"{said}, and the codec is relative to the sum of atoms. Set loss.kernel: xla.")

    n_sequences = tokens.shape[0]
    following, last = tokens[:, 1:], jnp.full((n_sequences, 1), target.pad_id, tokens.dtype)
    targets = jnp.concatenate([following, last], axis=1).astype(jnp.int32)
    is_density = (targets >= start) & (targets < end)
    is_other = (targets != target.pad_id) & ~is_density
    density, other = is_density.astype(jnp.float32), is_other.astype(jnp.float32)
    n_density, n_other = density.sum(axis=1, keepdims=True), other.sum(axis=1, keepdims=True)
    has_density = n_density > 0
    total = jnp.where(has_density, n_density + config.preamble_weight * n_other, 1.0) * n_sequences
    density_mean = density / (jnp.maximum(n_density, 1.0) * n_sequences)
    rows_unread = jnp.zeros(n_sequences) if unread is None else plain(unread, ("batch",)).astype(jnp.float32)
    weights = PositionWeights(
        density=density / total,
        other=config.preamble_weight * other * has_density / total,
        density_mean=density_mean,
        other_mean=other * has_density / (jnp.maximum(n_other, 1.0) * n_sequences),
        unread_mean=density_mean * rows_unread[:, None],
    )
    if config.vocabulary == "full" or config.preamble_weight > 0:
        rows, first_bin = targets, start
    else:
        rows, first_bin, head = targets - start, 0, head[start:end]
    spec = BlockSpec(config, first_bin, target.n_density_tokens, target.has_values, offset or 0.0)
    scales = None
    if offset is not None and scale is not None:
        scales = lax.stop_gradient(plain(scale, ("batch", "position")).reshape(targets.shape))
    weights = PositionWeights(*(lax.stop_gradient(w) for w in weights))
    constant_metrics = {
        "density_positions": jnp.mean(n_density),
        "sequences_without_density": 1.0 - jnp.mean(has_density.astype(jnp.float32)),
    }
    return spec, LossInputs(hidden, head, rows, weights, _bin_tables(target), scales), constant_metrics


def _bin_tables(target: DensityTarget) -> BinTables:
    """Values and widths of the bins. A width reaches half-way to both neighbours, and as far outwards at the ends."""
    if not target.has_values:
        return BinTables(jnp.zeros(target.n_density_tokens), jnp.zeros(target.n_density_tokens))
    values = target.values
    gaps = np.diff(values)
    widths = 0.5 * (np.concatenate([gaps[:1], gaps]) + np.concatenate([gaps, gaps[-1:]]))
    return BinTables(jnp.asarray(values, jnp.float32), jnp.asarray(widths, jnp.float32))


def plain(x: jax.Array | NamedArray, axes: tuple[str, ...]) -> jax.Array:
    """The array with its axes in this order; `batch` may be missing."""
    if not isinstance(x, NamedArray):
        return jnp.asarray(x)
    names = {axis.name for axis in x.axes}
    return x.rearrange(tuple(axis for axis in axes if axis in names)).array


def _sharding(hidden: jax.Array | NamedArray, shape: tuple[int, ...]) -> Sharding | None:
    """How the axis mapping spreads batch and position, the first sizes of `shape`, over the mesh, if it does."""
    mesh = current_mesh()
    if mesh is None:
        return None
    has_batch = isinstance(hidden, NamedArray) and any(axis.name == "batch" for axis in hidden.axes) or hidden.ndim == 3
    batch, position = mesh_axes(mesh, "batch") if has_batch else (), mesh_axes(mesh, "position")
    for what, size, axes in (("batch", shape[0], batch), ("positions", shape[1], position)):
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if size % parts:
            said = f"a {what} of {size} does not divide over {parts} devices (mesh axes {', '.join(axes)})"
            raise TomatError(f"{said}; use a multiple of {parts}.")
    return Sharding(mesh, batch, position) if batch or position else None


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_sums(spec: BlockSpec, sharding: Sharding | None, inputs: LossInputs) -> LossSums:
    """Weighted sums of loss and metrics over a batch, on one device or as `sharding` spreads it; only `loss` has a
    gradient, and only by `hidden` and `head`: each device computes its part, and the sums are added once. The forward
    pass of a differentiated call has both gradients already; the backward pass only scales them."""
    return _on_mesh(spec, sharding, False, inputs)[0]


def _forward(spec: BlockSpec, sharding: Sharding | None, inputs: LossInputs):
    sums, (by_hidden, by_head) = _on_mesh(spec, sharding, True, inputs)
    return sums, (by_hidden, by_head.astype(inputs.head.dtype))


def _backward(spec: BlockSpec, sharding: Sharding | None, gradients: tuple[jax.Array, jax.Array], cotangents: LossSums):
    # The scale is 1 in training: nothing is rounded twice.
    by_hidden, by_head = ((cotangents.loss * g).astype(g.dtype) for g in gradients)
    return (LossInputs(by_hidden, by_head, None, None, None, None),)  # pyright: ignore[reportArgumentType]  # None: no gradient


loss_sums.defvjp(_forward, _backward)


def _on_mesh(
    spec: BlockSpec, sharding: Sharding | None, differentiate: bool, inputs: LossInputs
) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """`_on_device`, with each device's part of batch and positions where there is a mesh."""
    on_device = partial(_on_device, spec, sharding, differentiate)
    if sharding is None:
        return on_device(inputs)
    whole, split2, split3 = PartitionSpec(), sharding.spec(2), sharding.spec(3)
    parts = (split3, whole, split2, split2, whole, None if inputs.scale is None else split2)
    return jax.shard_map(
        on_device,
        mesh=sharding.mesh,
        in_specs=(LossInputs._make(parts),),  # pyright: ignore[reportArgumentType]  # a specification for each array
        out_specs=(whole, (split3, whole) if differentiate else ()),
        check_vma=False,
    )(inputs)


def _on_device(
    spec: BlockSpec, sharding: Sharding | None, differentiate: bool, inputs: LossInputs
) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """The part of batch and positions on this device, by the configured kernel, and the sum over devices."""
    local_sums = xla_loss_sums
    if spec.config.kernel == "pallas":
        from tomat.model.loss.pallas import pallas_loss_sums as local_sums  # Pallas' TPU half takes a second
    elif spec.config.kernel == "levanter":
        local_sums = _levanter_loss_sums
    sums, gradients = local_sums(spec, differentiate, inputs)
    if sharding is not None:
        # Once, after the scan. Left to XLA, a CPU mesh reduces the head's gradient in every block; libtpu 0.0.46 moves
        # that reduction out of the loop, but nothing promises that it will.
        devices = sharding.batch + sharding.position
        sums = lax.psum(sums, devices)
        if differentiate:
            gradients = (gradients[0], lax.psum(gradients[1], devices))
    return sums, gradients


def _levanter_loss_sums(
    spec: BlockSpec, differentiate: bool, inputs: LossInputs
) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """As `xla_loss_sums` by Levanter's fused cross-entropy: the step that Levanter's own trainer makes. Top-1 accuracy
    and EMD, which it does not compute, are NaN. It goes through the vocabulary in blocks, of 8,192 ids on a v6e, for
    all positions of a device at once, and computes the logits again in the backward pass. Two steps of 200M that ran
    out of memory are planned within 0.6 % of what the pods needed with it, and 1.0 to 1.3 % too low with tomat's blocks
    (`docs/tracking/calibration.md`)."""
    from levanter.kernels.pallas.fused_cross_entropy_loss import IMPLEMENTATIONS  # takes a second

    hidden, head, rows, weights, *_ = inputs
    dtype = jnp.result_type(hidden, head)
    flat_rows = rows.reshape(-1).astype(jnp.int32)
    # Where the weight is 0 the row may be anything, and Levanter gathers by it.
    flat_rows = jnp.clip(flat_rows, 0, head.shape[0] - 1)

    def sums(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, LossSums]:
        x, w = hidden.reshape(-1, hidden.shape[-1]).astype(dtype), head.astype(dtype).T
        each = IMPLEMENTATIONS["xla"](x, flat_rows, w, dtype=jnp.float32)[0].reshape(rows.shape)
        loss, mean = jnp.sum(weights.density * each), jnp.sum(weights.density_mean * each)
        unknown = jnp.full((), jnp.nan)
        return loss, LossSums(
            loss=loss,
            density_loss=mean,
            unread_loss=jnp.sum(weights.unread_mean * each),
            cross_entropy=mean,
            emd=unknown,
            top1=unknown,
            rho=unknown,
            other_cross_entropy=jnp.zeros(()),
        )

    if not differentiate:
        return sums(hidden, head)[1], ()
    (_, found), (by_hidden, by_head) = jax.value_and_grad(sums, argnums=(0, 1), has_aux=True)(hidden, head)
    return found, (by_hidden, by_head.astype(jnp.float32))
