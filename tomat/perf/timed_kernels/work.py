"""The kernels of a timed program: the work of each, as `perf/cost/chip_model.py` takes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tomat.hardware.chips import Slice
from tomat.perf.cost.chip_model import ChipModel, KernelWork, Parameters
from tomat.perf.cost.estimate import estimate_step
from tomat.perf.cost.llo import kept_schedules
from tomat.perf.cost.op_times import PALLAS_TARGET
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.timed_kernels.child import PROGRAM_FILE, SCHEDULE_FILE


@dataclass(frozen=True)
class ProgramWork:
    """What one run of a program has to do."""

    kernels: tuple[tuple[KernelWork, float], ...]
    """Each kernel, and how often it runs."""
    pallas: bool
    """Whether a Pallas kernel is among them."""
    unscheduled_pallas: tuple[str, ...]
    """Pallas kernels of which no schedule was found."""


def kept_work(folder: Path, slice_: Slice) -> ProgramWork:
    """The work of a program that `compile_kernels` kept."""
    schedules = kept_schedules(folder / SCHEDULE_FILE, f"Delete {folder} and calibrate again.")
    program = load_program(folder / PROGRAM_FILE)
    # For the work alone: no parameters of the chip are needed, and there may be none yet.
    model = ChipModel(slice_.chip.name, Parameters(), borrowed=True)
    step = estimate_step(program, schedules, slice_, title="kernel", model=model)
    ops = step.ops.values()
    pallas = [op for op in ops if program.by_name[op.name].custom_call_target == PALLAS_TARGET]
    return ProgramWork(
        kernels=tuple((op.work, op.executions) for op in ops if op.work is not None and op.executions),
        pallas=bool(pallas),
        unscheduled_pallas=tuple(op.name for op in pallas if op.schedule is None),
    )
