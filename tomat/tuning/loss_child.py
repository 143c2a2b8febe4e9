"""The process that compiles one loss for one chip: `python -m tomat.tuning.loss_child REQUEST.json`.

Value and gradients of the loss alone, on one device of a slice, with the schedule that the compiler gives it. Started
by `loss_tuning.py`; `planning/compile/process.py` says why apart from it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.planning.compile.process import LLO_DUMP, answer, keep_answer, say

TOP_KERNELS = 8
"""Kernels on record, the longest."""


def _compile(request: dict[str, Any]) -> None:
    """Keep what the compiler makes of the request; a loss that it refuses is an answer."""
    say("compiling")
    work = Path(request["work_dir"])
    try:
        result = measure(request, work / LLO_DUMP)
    except TomatError as error:
        result = {"refused": str(error)}
    keep_answer(result, work / "part", Path(request["programs_dir"]) / request["key"])


def lower_loss(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of a request's loss on one described device."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.loss.config import LossConfig
    from tomat.loss.density_loss import density_loss
    from tomat.loss.target import DensityTarget
    from tomat.loss.tiles import LossTiles
    from tomat.tokens.vocabulary import Vocabulary

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


def measure(request: dict[str, Any], llo_dump: Path) -> dict[str, Any]:
    """Planned seconds of a request's loss, by the models of `estimate.py`, and its longest kernels.

    Args:
        request: The fields of `LossShape`, and `loss`, the arguments of `LossConfig`.
        llo_dump: Where the compiler was told to write its schedules.

    Raises:
        TomatError: The compiler refuses it: tiles that do not fit, for example.
    """
    from tomat.cost.estimate import estimate_step
    from tomat.cost.llo import read_schedules, slot_utilisation
    from tomat.cost.schedule_model import matched_schedules
    from tomat.hardware.chips import slice_named
    from tomat.planning.compile.topology import compiler_version, topology_devices
    from tomat.profile.hlo_files import program_from_bytes

    slice_ = slice_named(request["slice_name"])
    device = topology_devices(slice_)[0]
    lowered = lower_loss(request, device)
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:  # JaxRuntimeError, of which jax exports no stable name
        raise TomatError(f"{compiler_version()} cannot compile it: {str(error).strip().splitlines()[0]}") from error
    seconds = time.perf_counter() - began
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    program = program_from_bytes(module, "the compiled loss")
    schedules = read_schedules(llo_dump)
    matched = matched_schedules(program, schedules)
    estimate = estimate_step(program, schedules, slice_, title="loss")
    kernels = []
    ops = sorted(estimate.ops.values(), key=lambda op: (op.estimate or 0.0) * op.executions, reverse=True)
    for op in ops[:TOP_KERNELS]:
        row: dict[str, Any] = {
            "name": op.name,
            "category": str(op.category),
            "executions": op.executions,
            "seconds": (op.estimate or 0.0) * op.executions,
            "basis": op.basis,
        }
        if op.schedule is not None:
            row["bundle_seconds"] = op.schedule.bundle_seconds * op.executions
            row["mxu_seconds"] = op.schedule.mxu_seconds * op.executions
            row["slots"] = slot_utilisation(matched[op.name])
            row["grid"] = list(matched[op.name].grid)
        kernels.append(row)
    return {
        "compiler": compiler_version(),
        "device_kind": device.device_kind,
        "compile_seconds": seconds,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": estimate.model_seconds,
        "categories": {
            category: times["estimate"] for category, times in estimate.model_table().items() if times["estimate"] > 0
        },
        "loss_flops": sum(op.flops or 0.0 for op in estimate.breakdown.ops if str(op.category) == "loss"),
        "kernels": kernels,
    }


if __name__ == "__main__":
    answer(sys.argv[1], _compile)
