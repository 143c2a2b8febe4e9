"""The loss of a batch that may be spread over a mesh of devices: each computes its part, and the sums are added once.

The forward pass of a differentiated call has both gradients already; the backward pass only scales them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from tomat.model.loss.interface import BlockSpec, LossInputs, LossSums
from tomat.model.loss.xla import xla_loss_sums
from tomat.model.sharding import Sharding


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_sums(spec: BlockSpec, sharding: Sharding | None, inputs: LossInputs) -> LossSums:
    """Weighted sums of loss and metrics over a batch, on one device or as `sharding` spreads it; only `loss` has a
    gradient, and only by `hidden` and `head`."""
    return _on_mesh(spec, sharding, False, inputs)[0]


def _forward(spec: BlockSpec, sharding: Sharding | None, inputs: LossInputs):
    sums, (by_hidden, by_head) = _on_mesh(spec, sharding, True, inputs)
    return sums, (by_hidden, by_head.astype(inputs.head.dtype))


def _backward(spec: BlockSpec, sharding: Sharding | None, gradients: tuple[jax.Array, jax.Array], cotangents: LossSums):
    # The scale is 1 in training: nothing is rounded twice.
    by_hidden, by_head = ((cotangents.loss * g).astype(g.dtype) for g in gradients)
    return (LossInputs(by_hidden, by_head, None, None, None),)  # pyright: ignore[reportArgumentType]  # None: no gradient


loss_sums.defvjp(_forward, _backward)


def _on_mesh(
    spec: BlockSpec, sharding: Sharding | None, differentiate: bool, inputs: LossInputs
) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """`_on_device`, on each device its part of batch and positions when there is a mesh."""
    on_device = partial(_on_device, spec, sharding, differentiate)
    if sharding is None:
        return on_device(inputs)
    whole, split2, split3 = PartitionSpec(), sharding.spec(2), sharding.spec(3)
    parts: tuple[PartitionSpec, ...] = (split3, whole, split2, split2, whole)
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
    and EMD, which it does not compute, are NaN.

    It goes through the vocabulary in blocks, of 8,192 ids on a v6e, for all positions of a device at once, and computes
    the logits again in the backward pass (its default on a TPU: plain XLA). Two steps of 200M that ran out of memory
    are planned within 0.6 % of what the pods needed with it, and 1.0 to 1.3 % short with tomat's blocks
    (`docs/tracking/calibration.md`).
    """
    from levanter.kernels.pallas.fused_cross_entropy_loss import IMPLEMENTATIONS  # takes a second

    hidden, head, rows, weights, _ = inputs
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
