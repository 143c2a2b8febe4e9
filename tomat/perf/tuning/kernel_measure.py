"""What the planner's models make of one small program, compiled for one chip of a slice."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tomat.base.errors import TomatError
from tomat.perf.plan.compile.process import LLO_DUMP, keep_answer, say

Lower = Callable[[dict[str, Any], Any], Any]
"""(request, described device) -> `jax.stages.Lowered`."""

TOP_KERNELS = 8
"""Kernels on record, the longest."""


def keep_measured(request: dict[str, Any], measured: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Keep what the compiler makes of a request; that it refuses is an answer too.

    Args:
        request: As `tile_tuning.planned` gives it to a child.
        measured: What answers, of the request and of where the compiler was told to write its schedules.
    """
    say("compiling")
    work = Path(request["work_dir"])
    try:
        result = measured(request, work / LLO_DUMP)
    except TomatError as error:
        result = {"refused": str(error)}
    keep_answer(result, work / "part", Path(request["programs_dir"]) / request["key"])


def measure(lower: Lower, request: dict[str, Any], llo_dump: Path, title: str) -> dict[str, Any]:
    """Planned seconds of a program, by the models of `estimate.py`, and its longest kernels.

    Args:
        lower: Lowers what is asked for one device.
        request: `slice_name`, such as `v6e-1`, and what `lower` takes.
        llo_dump: Where the compiler was told to write its schedules.
        title: Of the program, in messages.

    Returns:
        `seconds`, `categories` (seconds), `flops_by_category`, `kernels`, `temporary_bytes`, `compile_seconds`,
        `compiler` and `device_kind`.

    Raises:
        TomatError: The compiler refuses it: tiles that do not fit, for example.
    """
    from tomat.hardware.chips import slice_named
    from tomat.perf.cost.estimate import estimate_step
    from tomat.perf.cost.llo import read_schedules, slot_utilisation
    from tomat.perf.cost.schedule_model import matched_schedules
    from tomat.perf.plan.compile.topology import compiler_version, topology_devices
    from tomat.perf.profile.hlo_files import program_from_bytes

    slice_ = slice_named(request["slice_name"])
    device = topology_devices(slice_)[0]
    lowered = lower(request, device)
    began = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:  # JaxRuntimeError, of which jax exports no stable name
        raise TomatError(f"{compiler_version()} cannot compile it: {str(error).strip().splitlines()[0]}") from error
    compile_seconds = time.perf_counter() - began
    module = compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    program = program_from_bytes(module, f"the compiled {title}")
    schedules = read_schedules(llo_dump)
    matched = matched_schedules(program, schedules)
    estimate = estimate_step(program, schedules, slice_, title=title)
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
    return {
        "compiler": compiler_version(),
        "compile_seconds": compile_seconds,
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "seconds": estimate.model_seconds,
        "categories": {
            category: times["estimate"] for category, times in estimate.model_table().items() if times["estimate"] > 0
        },
        "flops_by_category": flops,
        "kernels": kernels,
        "device_kind": device.device_kind,
    }
