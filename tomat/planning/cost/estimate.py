"""Seconds of every operation of a compiled step by three cycle models, and the one that is believed.

The three stand alone and are compared in a table: XLA's own `estimated_cycles`, the roofline (`roofline.py`) and the
VLIW schedule (`schedule_model.py`). The estimate takes, by kind of operation, what explains the measured pods best
(`docs/tracking/calibration.md` has the table of all of them):

- a kernel with a schedule takes the longer of its bundles and its HBM traffic, at the rate that HBM is measured to
  reach;
- one without takes its roofline, at that same rate;
- a collective takes what its transfer on the interconnect leaves uncovered by the kernels beside it.

XLA's own cycles are the last resort. Of the parts outside attention they say 1.59 s of the reference's 200M step and
5.48 s of its 1B step, of which the pods' profiles leave 1.10 and 4.78 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tomat.hardware.chips import Slice
from tomat.planning.cost.assumed import Assumption, assumptions
from tomat.planning.cost.interconnect import CollectiveTime, overlap
from tomat.planning.cost.llo import OpSchedule
from tomat.planning.cost.op_times import MODELS, PALLAS_TARGET, OpTimes
from tomat.planning.cost.roofline import RooflineTime, roofline_seconds
from tomat.planning.cost.schedule_model import ScheduleTime, matched_schedules, schedule_time
from tomat.profile.breakdown import Breakdown, Roofs
from tomat.profile.categories import NO_CODE_CALLS, Classified, classify_program
from tomat.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.profile.hlo_costs import kernel_flops
from tomat.profile.hlo_kernels import Kernel, executed_kernels
from tomat.profile.program_breakdown import breakdown_from_program

HBM_EFFICIENCY = 1360 / 1638
"""Share of the nominal HBM bandwidth that a copy reaches on v6e: 1,360 of 1,638 GB/s (AI-Hypercomputer/tpu-recipes,
microbenchmarks). No such figure is at hand for other chips; the same share is assumed there."""


@dataclass(frozen=True)
class StepEstimate:
    """A step by every model."""

    ops: Mapping[str, OpTimes]
    collectives: Mapping[str, CollectiveTime]
    breakdown: Breakdown
    """By the estimate, times `scale`."""
    scale: float
    """Measured over estimated time of the pods so far (`calibration.py`), spread evenly over the operations."""
    assumed: tuple[Assumption, ...] = ()
    """What the models did not find and took for granted."""

    @property
    def model_seconds(self) -> float:
        """The step by the models alone."""
        return self.breakdown.step_seconds / self.scale

    def model_table(self) -> dict[str, dict[str, float]]:
        """Category -> model -> seconds of a step. A model leaves out the operations it does not know."""
        table: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(MODELS, 0.0))
        for op in self.ops.values():
            for model in MODELS:
                table[str(op.category)][model] += (op.seconds(model) or 0.0) * op.executions
        return dict(table)

    def basis_seconds(self) -> dict[str, float]:
        """Seconds of the step by what their estimate rests on."""
        seconds: dict[str, float] = defaultdict(float)
        for op in self.ops.values():
            seconds[op.basis] += (op.estimate or 0.0) * op.executions
        return dict(seconds)


def estimate_step(
    program: HloProgram,
    schedules: Mapping[str, OpSchedule],
    slice_: Slice,
    *,
    title: str,
    scale: float = 1.0,
    notes: tuple[str, ...] = (),
    memory_bytes: Mapping[str, int] | None = None,
) -> StepEstimate:
    """One step of `program` on one device of `slice_`.

    Args:
        program: The optimised module.
        schedules: As `read_schedules` gives them.
        slice_: What it was compiled for.
        title: Of the breakdown.
        scale: What the models' times are multiplied with.
        notes: What the reader of the breakdown should know; what was assumed is added.
        memory_bytes: Of the breakdown, where the program itself has no buffer assignment.
    """
    device_kind = slice_.chip.device_kinds[0]
    roofs = Roofs.of_device_kind(device_kind)
    verdicts = classify_program(program)
    matched = matched_schedules(program, schedules)
    kernels = {kernel.instruction.name: kernel for kernel in executed_kernels(program)}
    ops = {
        name: _op_times(program, kernel, verdicts[name], matched.get(name), slice_, roofs)
        for name, kernel in kernels.items()
    }
    collectives = overlap(program, lambda instruction: ops[instruction.name].estimate, slice_)
    for name, time in collectives.items():
        if name in ops:
            # A collective takes what it makes the step wait; a fusion that multiplies as well, its own time on top.
            inner = {i.opcode for i in program.inner(kernels[name].instruction)}
            own = (ops[name].estimate or 0.0) if inner & {"dot", "convolution"} else 0.0
            ops[name] = replace(ops[name], estimate=own + time.exposed_seconds, basis="interconnect")

    def scaled(instruction: Instruction) -> float | None:
        seconds = ops[instruction.name].estimate
        return None if seconds is None else seconds * scale

    breakdown = breakdown_from_program(
        program,
        device_kind=device_kind,
        kernel_seconds=scaled,
        hidden_seconds=lambda instruction: (
            collectives[instruction.name].hidden_seconds * scale if instruction.name in collectives else 0.0
        ),
        kernel_flops=lambda instruction: _flops(program, instruction, ops[instruction.name].schedule, roofs),
        title=title,
        n_devices=slice_.n_devices,
        n_hosts=slice_.n_hosts,
    )
    assumed = assumptions(program, ops, matched, breakdown)
    # The breakdown's own notes are on loops and kernels that it knows nothing of: `assumed` has them with their shares.
    said = (*notes, *(assumption.sentence for assumption in assumed))
    breakdown = replace(breakdown, notes=said, memory_bytes=memory_bytes or breakdown.memory_bytes)
    return StepEstimate(ops, collectives, breakdown, scale, assumed)


def _flops(program: HloProgram, instruction: Instruction, schedule: ScheduleTime | None, roofs: Roofs) -> float | None:
    """Flops of one execution; of a Pallas kernel what its matrix units do while its bundles keep them busy.

    HLO does not know what a Pallas kernel multiplies, and its author's estimate may say 0. A unit that is busy works at
    its peak, on padding too: a head of 64 fills a quarter of a v6e's matrix unit and counts as if it filled it.
    """
    stated = kernel_flops(program, instruction)
    if instruction.custom_call_target != PALLAS_TARGET or schedule is None or not roofs.peak_flops_per_second:
        return stated
    return max(schedule.mxu_seconds * roofs.peak_flops_per_second, stated or 0.0)


def _op_times(
    program: HloProgram,
    kernel: Kernel,
    verdict: Classified,
    schedule: OpSchedule | None,
    slice_: Slice,
    roofs: Roofs,
) -> OpTimes:
    """Every model on one kernel; collectives are settled later, when it is known what runs beside them."""
    instruction = kernel.instruction
    compiler = roofline = scheduled = None
    if instruction.opcode not in CONTROL_OPCODES and roofs.clock_hz and roofs.peak_hbm_bytes_per_second:
        cycles = instruction.estimated_cycles
        compiler = cycles / roofs.clock_hz if cycles is not None else None
        roofline = roofline_seconds(program, instruction, slice_)
        if schedule is not None:
            reached = roofs.peak_hbm_bytes_per_second * HBM_EFFICIENCY
            scheduled = schedule_time(program, instruction, schedule, roofs.clock_hz, reached)
    seconds, basis = _estimate(instruction, compiler, roofline, scheduled)
    return OpTimes(instruction.name, verdict.category, kernel.executions, compiler, roofline, scheduled, seconds, basis)


def _estimate(
    instruction: Instruction, compiler: float | None, roofline: RooflineTime | None, scheduled: ScheduleTime | None
) -> tuple[float | None, str]:
    """(Seconds of one execution, what they rest on)."""
    if instruction.opcode in CONTROL_OPCODES or instruction.custom_call_target in NO_CODE_CALLS:
        return 0.0, ""
    if instruction.opcode.endswith(("-start", "-done", "-update")):
        # Copies between HBM and VMEM run beside the kernels; what is waited for of collectives is settled later.
        return 0.0, "beside other kernels"
    moving = roofline.hbm_seconds / HBM_EFFICIENCY if roofline is not None else 0.0
    if scheduled is not None:
        return (moving, "hbm") if moving > scheduled.seconds else (scheduled.seconds, "schedule")
    if roofline is not None:
        return max(roofline.seconds, moving), "hbm" if moving >= roofline.seconds else "roofline"
    return compiler, "compiler" if compiler is not None else ""
