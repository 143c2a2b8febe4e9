"""The process that compiles one loss for one chip: `python -m tomat.perf.tuning.loss_child REQUEST.json`.

Value and gradients of the loss alone, on one device of a slice, with the schedule that the compiler gives it. Started
by `loss_tuning.py`; `perf/plan/compile/process.py` says why apart from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tomat.perf.plan.compile.process import answer
from tomat.perf.tuning.kernel_measure import keep_measured, measure


def _compile(request: dict[str, Any]) -> None:
    keep_measured(request, measured_loss)


def lower_loss(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of a request's loss on one described device."""
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


def measured_loss(request: dict[str, Any], llo_dump: Path) -> dict[str, Any]:
    """Planned seconds of a request's loss, and its longest kernels.

    Args:
        request: The fields of `LossShape`, and `loss`, the arguments of `LossConfig`.
        llo_dump: Where the compiler was told to write its schedules.

    Raises:
        TomatError: The compiler refuses it: tiles that do not fit, for example.
    """
    from tomat.hardware.chips import slice_named
    from tomat.perf.plan.compile.topology import topology_devices

    device = topology_devices(slice_named(request["slice_name"]))[0]
    found = measure(lower_loss(request, device), request["slice_name"], llo_dump, "loss")
    flops = found.pop("flops_by_category").get("loss", 0.0)
    return found | {"device_kind": device.device_kind, "loss_flops": flops}


if __name__ == "__main__":
    answer(sys.argv[1], _compile)
