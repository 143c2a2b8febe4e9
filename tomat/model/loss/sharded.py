"""The loss of a batch that may be spread over a mesh of devices: each computes its part, and the sums are added once.

The forward pass of a differentiated call has both gradients already; the backward pass only scales them.
"""

from functools import partial

import jax
from jax import lax
from jax.sharding import PartitionSpec

from tomat.model.loss.interface import BlockSpec, LossInputs, LossSums
from tomat.model.loss.xla import xla_loss_sums
from tomat.model.sharding import Sharding


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def loss_sums(spec: BlockSpec, sharding: Sharding | None, inputs: LossInputs) -> LossSums:
    """Weighted sums of loss and metrics over a batch; only `loss` has a gradient, and only by `hidden` and `head`.

    Args:
        sharding: How batch and positions lie on a mesh; None: on one device.
    """
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
    if spec.config.kernel == "pallas":
        from tomat.model.loss.pallas import pallas_loss_sums as local_sums  # Pallas' TPU half takes a second
    elif spec.config.kernel == "levanter":
        from tomat.model.loss.levanter import levanter_loss_sums as local_sums  # so does what Levanter's imports
    else:
        local_sums = xla_loss_sums
    sums, gradients = local_sums(spec, differentiate, inputs)
    if sharding is not None:
        # Once, after the scan. Left to XLA, a CPU mesh reduces the head's gradient in every block; libtpu 0.0.46 moves
        # that reduction out of the loop, but nothing promises that it will.
        devices = sharding.batch + sharding.position
        sums = lax.psum(sums, devices)
        if differentiate:
            gradients = (gradients[0], lax.psum(gradients[1], devices))
    return sums, gradients
