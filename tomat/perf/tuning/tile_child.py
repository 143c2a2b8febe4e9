"""Compiles one loss, or one attention layer, for one chip: `python -m tomat.perf.tuning.tile_child REQUEST.json`.

Value and gradients on one device of a slice, with the schedule that the compiler gives them. Started by
`tile_tuning.py`; `perf/plan/compile/process.py` says why apart from it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.perf.plan.compile.process import LLO_DUMP, answer, keep_answer, say

TOP_KERNELS = 8
"""Kernels on record, the longest."""


def lower_loss(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of the loss alone on one described device.

    The request has the fields of `LossShape`, and `loss`, the arguments of `LossConfig`.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.data.tokens.vocabulary import Vocabulary
    from tomat.model.loss.config import LossConfig
    from tomat.model.loss.density_loss import density_loss
    from tomat.model.loss.interface import DensityTarget
    from tomat.model.tiles import LossTiles

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


def lower_attention(request: dict[str, Any], device: Any) -> Any:
    """The lowered value and gradients (`jax.stages.Lowered`) of one layer of the decoder on one described device:
    projections, norms, rotary embedding and attention.

    The request has `batch`, `dtype`, and `model`, keys of `DensityDecoderConfig`.
    """
    import draccus
    import equinox as eqx
    import haliax as hax
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tomat.model.any_decoder import build_mask
    from tomat.model.attention import DensityAttention
    from tomat.model.decoder import DensityDecoderConfig

    config = draccus.decode(DensityDecoderConfig, request["model"])
    mesh = Mesh(np.asarray([device]), ("data",))
    whole = NamedSharding(mesh, PartitionSpec())
    dtype = jnp.dtype(request["dtype"])

    def described(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=whole), tree)

    Batch, Pos = hax.Axis("batch", request["batch"]), hax.Axis("position", config.max_seq_len)
    layer = eqx.filter_eval_shape(lambda: DensityAttention.init(config.attention_config(), key=jax.random.key(0)))
    x = eqx.filter_eval_shape(lambda: hax.zeros((Batch, Pos, config.Embed), dtype))

    def attended(layer, x, by_out):
        out, back = jax.vjp(lambda layer, x: layer(x, build_mask(config)), layer, x)
        return out, back(by_out)

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), hax.axis_mapping({}):
        return jax.jit(attended).lower(*map(described, (layer, x, x)))


def measure(request: dict[str, Any], llo_dump: Path) -> dict[str, Any]:
    """Planned seconds of a request's program, by the models of `estimate.py`, and its longest kernels.

    Refuses what the compiler refuses: tiles that do not fit, for example.
    """
    from tomat.hardware.chips import slice_named
    from tomat.perf.cost.estimate import estimate_step
    from tomat.perf.cost.llo import read_schedules, slot_utilisation
    from tomat.perf.cost.schedule_model import matched_schedules
    from tomat.perf.plan.compile.topology import compiler_version, topology_devices
    from tomat.perf.profile.hlo_files import program_from_bytes

    slice_ = slice_named(request["slice_name"])
    device = topology_devices(slice_)[0]
    lowered = (lower_loss if "loss" in request else lower_attention)(request, device)
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:  # JaxRuntimeError, of which jax exports no stable name
        raise TomatError(f"{compiler_version()} cannot compile it: {str(error).strip().splitlines()[0]}") from error
    compile_seconds = time.perf_counter() - began
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    program = program_from_bytes(module, "the compiled kernel")
    schedules = read_schedules(llo_dump)
    matched = matched_schedules(program, schedules)
    estimate = estimate_step(program, schedules, slice_, title="kernel")
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
    flops: dict[str, float] = {}
    for op in estimate.breakdown.ops:
        flops[str(op.category)] = flops.get(str(op.category), 0.0) + (op.flops or 0.0)
    found = {
        "compiler": compiler_version(),
        "compile_seconds": compile_seconds,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": estimate.model_seconds,
        "categories": {
            category: times["estimate"] for category, times in estimate.model_table().items() if times["estimate"] > 0
        },
        "kernels": kernels,
        "device_kind": device.device_kind,
    }
    return found | ({"loss_flops": flops.get("loss", 0.0)} if "loss" in request else {"flops_by_category": flops})


def answer_request(request: dict[str, Any]) -> None:
    """Keep what the compiler makes of a request; that it refuses is an answer too."""
    say("compiling")
    work = Path(request["work_dir"])
    try:
        result = measure(request, work / LLO_DUMP)
    except TomatError as error:
        result = {"refused": str(error)}
    keep_answer(result, work / "part", Path(request["programs_dir"]) / request["key"])


if __name__ == "__main__":
    answer(sys.argv[1], answer_request)
