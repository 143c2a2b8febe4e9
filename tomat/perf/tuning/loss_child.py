"""The process that compiles one loss for one chip: `python -m tomat.perf.tuning.loss_child REQUEST.json`.

Value and gradients of the loss alone, on one device of a slice, with the schedule that the compiler gives it. Started
by `tile_tuning.py`; `perf/plan/compile/process.py` says why apart from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tomat.perf.plan.compile.process import answer
from tomat.perf.tuning.kernel_measure import keep_measured, measure


def lower_loss(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of a request's loss on one described device.

    Args:
        request: The fields of `LossShape`, and `loss`, the arguments of `LossConfig`.
        device: Of a topology.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.data.tokens.vocabulary import Vocabulary
    from tomat.model.loss.config import LossConfig
    from tomat.model.loss.density_loss import density_loss
    from tomat.model.loss.target import DensityTarget
    from tomat.model.loss.tiles import LossTiles

    config = LossConfig(**request["loss"] | {"tiles": LossTiles(**request["loss"].get("tiles", {}))})
    batch, positions, width, n_bins = (request[key] for key in ("batch", "positions", "width", "density_tokens"))
    mesh = Mesh(np.asarray([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.dtype(request["dtype"])
    shapes = (
        jax.ShapeDtypeStruct((batch, positions, width), dtype, sharding=whole),
        jax.ShapeDtypeStruct((Vocabulary(n_bins).size, width), dtype, sharding=whole),
        jax.ShapeDtypeStruct((batch, positions), jnp.int32, sharding=whole),
    )

    def loss(hidden: jax.Array, head: jax.Array, tokens: jax.Array):
        target = DensityTarget(n_bins, np.linspace(0, 36, n_bins))
        return density_loss(hidden, head, tokens, config=config, target=target)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)).lower(*shapes)


def _compile(request: dict[str, Any]) -> None:
    def measured(request: dict[str, Any], llo_dump: Path) -> dict[str, Any]:
        found = measure(lower_loss, request, llo_dump, "loss")
        return found | {"loss_flops": found.pop("flops_by_category").get("loss", 0.0)}

    keep_measured(request, measured)


if __name__ == "__main__":
    answer(sys.argv[1], _compile)
