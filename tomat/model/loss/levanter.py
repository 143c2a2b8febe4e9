"""Levanter's fused cross-entropy in the place of tomat's loss: the step that Levanter's own trainer makes.

It goes through the vocabulary in blocks, of 8,192 ids on a v6e, for all positions of a device at once, and computes the
logits again in the backward pass (`levanter/kernels/pallas/fused_cross_entropy_loss`, its default on a TPU: plain XLA).
For plans beside runs of Levanter: two steps of 200M that ran out of memory are planned within 0.6 % of what the pods
needed with it, and 1.0 to 1.3 % short with tomat's blocks (`docs/tracking/calibration.md`).

Shapes: B batch, P positions, E embedding, R rows of the head in use.
"""

import jax
import jax.numpy as jnp
from levanter.kernels.pallas.fused_cross_entropy_loss import IMPLEMENTATIONS

from tomat.model.loss.interface import BlockSpec, LossInputs, LossSums


def levanter_loss_sums(
    spec: BlockSpec, differentiate: bool, inputs: LossInputs
) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """The sums of the positions on this device; top-1 accuracy and EMD, which it does not compute, are NaN.

    Returns:
        As for `xla_loss_sums`.

    Args:
        spec: The loss: `cross_entropy` over the `full` vocabulary.
    """
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
