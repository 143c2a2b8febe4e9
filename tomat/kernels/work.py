"""What the kernels of a compiled program have to do, before any chip's efficiency comes in.

Each part is the time that it would take at the chip's nominal rate: bytes over bandwidth, padded products over the peak
of the matrix units, bundles over the clock. `cost_model.py` makes seconds of them.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tomat.base.errors import TomatError
from tomat.hardware.chips import Slice
from tomat.kernels.child import PROGRAM_FILE, SCHEDULE_FILE
from tomat.planning.cost.estimate import estimate_step
from tomat.planning.cost.llo import OpSchedule
from tomat.planning.cost.op_times import PALLAS_TARGET, OpTimes
from tomat.planning.cost.schedule_model import scalar_trips
from tomat.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.profile.hlo_files import load_program

PALLAS, MATMUL, VECTOR, COPY, ASYNC = "pallas", "matmul", "vector", "copy", "async"
"""Kinds of kernels: a Pallas kernel, a fusion with a product, one without, one that only moves, a transfer that runs
beside others."""


@dataclass(frozen=True)
class KernelWork:
    """One kernel of a program, all its executions in one run of the program together."""

    name: str
    kind: str
    executions: float
    hbm_seconds: float
    """Bytes to and from HBM, padding included, at the nominal bandwidth."""
    mxu_seconds: float
    """Products, padding included, at the peak of the matrix units."""
    bundle_seconds: float
    """Executed bundles of the final schedule at the clock; 0 where none was found."""
    steps: float
    """Steps of a Pallas kernel's grid that run; 0 for others."""
    scheduled: bool
    """Whether the compiler's final schedule of it was found."""


def program_work(
    program: HloProgram, schedules: Mapping[str, OpSchedule], slice_: Slice
) -> tuple[float, list[KernelWork]]:
    """Seconds of a program on one device of `slice_` by the models of a plan, and its kernels; those that do not run
    are left out."""
    estimate = estimate_step(program, schedules, slice_, title="kernel")
    found = []
    for op in estimate.ops.values():
        instruction = program.by_name[op.name]
        if instruction.opcode in CONTROL_OPCODES or not op.executions:
            continue
        pallas = instruction.custom_call_target == PALLAS_TARGET
        found.append(_work(program, instruction, op, _kind(op, instruction.opcode, pallas), schedules.get(op.name)))
    return estimate.model_seconds, found


def _kind(op: OpTimes, opcode: str, pallas: bool) -> str:
    if pallas:
        return PALLAS
    if opcode.endswith(("-start", "-done", "-update")):
        return ASYNC
    if op.roofline is not None and op.roofline.mxu_seconds:
        return MATMUL
    return COPY if opcode == "copy" else VECTOR


def _work(
    program: HloProgram, instruction: Instruction, op: OpTimes, kind: str, schedule: OpSchedule | None
) -> KernelWork:
    scheduled, roofline = op.schedule, op.roofline
    hbm = roofline.hbm_seconds if roofline is not None else 0.0
    steps = 0.0
    if kind == PALLAS and scheduled is not None:
        hbm = scheduled.hbm_seconds or hbm
        if schedule is not None:
            dynamic = scalar_trips(program, instruction, schedule)
            steps = sum(dynamic.values()) or math.prod(schedule.grid) * (scheduled.active_share or 1.0)
    times = op.executions
    return KernelWork(
        name=op.name,
        kind=kind,
        executions=times,
        hbm_seconds=times * hbm,
        mxu_seconds=times * (roofline.mxu_seconds if roofline is not None else 0.0),
        bundle_seconds=times * (scheduled.bundle_seconds if scheduled is not None else 0.0),
        steps=times * steps,
        scheduled=scheduled is not None,
    )


def kept_work(folder: Path, slice_: Slice) -> tuple[float, list[KernelWork]]:
    """`program_work` of what `compile_kernels` kept.

    Raises:
        TomatError: A file of the folder is damaged.
    """
    try:
        values = json.loads(gzip.decompress((folder / SCHEDULE_FILE).read_bytes()))
        schedules = {name: OpSchedule.from_dict(value) for name, value in values.items()}
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TomatError(f"{folder} is damaged ({error}); delete it and calibrate again.") from None
    return program_work(load_program(folder / PROGRAM_FILE), schedules, slice_)
