"""Seconds of every operation of a compiled step by three cycle models, and the one that is believed.

The three stand alone and are compared in a table: XLA's own `estimated_cycles`, the roofline (`roofline.py`) and the
VLIW schedule (`schedule_model.py`). The estimate is made of the kernel's work by the model of its chip
(`chip_model.py`), whose parameters are fitted to kernels that TPUs have run:

- a kernel with a schedule: its bundles, its matrix products and its copies;
- one without: the products, vector operations and bytes that HLO tells of it;
- a collective takes what its transfer on the interconnect leaves uncovered by the kernels beside it.

XLA's own cycles are the last resort. Of the parts outside attention they say 1.59 s of the reference's 200M step and
5.48 s of its 1B step, of which the pods' profiles leave 1.10 and 4.78 s.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from tomat.hardware.chips import Slice
from tomat.perf.cost.assumed import Assumption, assumptions
from tomat.perf.cost.chip_model import ChipModel, core_bandwidth, kernel_work
from tomat.perf.cost.interconnect import CollectiveTime, overlap
from tomat.perf.cost.llo import OpSchedule
from tomat.perf.cost.op_times import MODELS, PALLAS_TARGET, OpTimes
from tomat.perf.cost.roofline import roofline_seconds
from tomat.perf.cost.schedule_model import ScheduleTime, matched_schedules, schedule_time
from tomat.perf.cost.support import Support, step_error, supports
from tomat.perf.profile.breakdown import Breakdown, Roofs
from tomat.perf.profile.categories import NO_CODE_CALLS, Classified
from tomat.perf.profile.directions import settled
from tomat.perf.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import kernel_flops
from tomat.perf.profile.hlo_kernels import Kernel, executed_kernels
from tomat.perf.profile.program_breakdown import breakdown_from_program


@dataclass(frozen=True)
class StepEstimate:
    """A step by every model."""

    ops: Mapping[str, OpTimes]
    collectives: Mapping[str, CollectiveTime]
    breakdown: Breakdown
    """By the estimate."""
    model: ChipModel
    """Of the chip, that the estimate was made with."""
    assumed: tuple[Assumption, ...] = ()
    """What the models did not find and took for granted."""

    @cached_property
    def supports(self) -> tuple[Support, ...]:
        """What the step rests on, the largest part first."""
        return supports(self.ops.values(), self.model)

    @property
    def error(self) -> float:
        """By which fraction the step may be off, either way."""
        return step_error(self.supports)

    @property
    def model_seconds(self) -> float:
        """The step by the models."""
        return self.breakdown.step_seconds

    def model_table(self) -> dict[str, dict[str, float]]:
        """Category -> model -> seconds of a step. A model leaves out the operations it does not know."""
        table: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(MODELS, 0.0))
        for op in self.ops.values():
            for model in MODELS:
                table[str(op.category)][model] += (op.seconds(model) or 0.0) * op.executions
        return dict(table)


def estimate_step(
    program: HloProgram,
    schedules: Mapping[str, OpSchedule],
    slice_: Slice,
    *,
    title: str,
    model: ChipModel | None = None,
    notes: tuple[str, ...] = (),
    memory_bytes: Mapping[str, int] | None = None,
) -> StepEstimate:
    """One step of `program` on one device of `slice_`.

    Args:
        program: The optimised module.
        schedules: As `read_schedules` gives them.
        slice_: What it was compiled for.
        title: Of the breakdown.
        model: Of the chip; default: the one of the release.
        notes: What the reader of the breakdown should know; what was assumed is added.
        memory_bytes: Of the breakdown, where the program itself has no buffer assignment.
    """
    device_kind = slice_.chip.device_kinds[0]
    roofs = Roofs.of_device_kind(device_kind)
    chip_model = model or ChipModel.load(None, slice_.chip)
    verdicts, decided = settled(program)
    matched = matched_schedules(program, schedules)
    kernels = {kernel.instruction.name: kernel for kernel in executed_kernels(program)}
    ops = {
        name: _op_times(program, kernel, verdicts[name], matched.get(name), slice_, roofs, chip_model)
        for name, kernel in kernels.items()
    }
    collectives = overlap(program, lambda instruction: ops[instruction.name].estimate, slice_, chip_model.links)
    for name, time in collectives.items():
        if name in ops:
            # A collective takes what it makes the step wait; a fusion that multiplies as well, its own time on top.
            inner = {i.opcode for i in program.inner(kernels[name].instruction)}
            own = (ops[name].estimate or 0.0) if inner & {"dot", "convolution"} else 0.0
            ops[name] = replace(ops[name], estimate=own + time.exposed_seconds, basis="interconnect")

    breakdown = breakdown_from_program(
        program,
        device_kind=device_kind,
        kernel_seconds=lambda instruction: ops[instruction.name].estimate,
        hidden_seconds=lambda instruction: (
            collectives[instruction.name].hidden_seconds if instruction.name in collectives else 0.0
        ),
        kernel_flops=lambda instruction: _flops(program, instruction, ops[instruction.name].schedule, roofs),
        verdicts=verdicts,
        title=title,
        n_devices=slice_.n_devices,
        n_hosts=slice_.n_hosts,
    )
    assumed = assumptions(program, ops, matched, breakdown)
    # The breakdown's own notes are on loops and kernels that it knows nothing of: `assumed` has them with their shares.
    said = (*notes, *chip_model.notes(), *(assumption.sentence for assumption in assumed), *decided)
    breakdown = replace(breakdown, notes=said, memory_bytes=memory_bytes or breakdown.memory_bytes)
    return StepEstimate(ops, collectives, breakdown, chip_model, assumed)


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
    model: ChipModel,
) -> OpTimes:
    """Every model on one kernel; collectives are settled later, when it is known what runs beside them."""
    instruction = kernel.instruction
    compiler = roofline = scheduled = None
    if instruction.opcode not in CONTROL_OPCODES and roofs.clock_hz and roofs.peak_hbm_bytes_per_second:
        cycles = instruction.estimated_cycles
        compiler = cycles / roofs.clock_hz if cycles is not None else None
        roofline = roofline_seconds(program, instruction, slice_)
        if schedule is not None:
            scheduled = schedule_time(program, instruction, schedule, roofs.clock_hz)
    times = OpTimes(
        instruction.name, verdict.category, kernel.executions, compiler, roofline, scheduled, estimate=None, basis=""
    )
    if instruction.opcode in CONTROL_OPCODES or instruction.custom_call_target in NO_CODE_CALLS:
        return replace(times, estimate=0.0)
    if instruction.opcode.endswith(("-start", "-done", "-update")):
        # Copies between HBM and VMEM run beside the kernels; what is waited for of collectives is settled later.
        return replace(times, estimate=0.0, basis="beside other kernels")
    bandwidth = core_bandwidth(slice_.chip)
    work = kernel_work(scheduled, roofline, bandwidth)
    if work is None:
        return replace(times, estimate=compiler, basis="compiler" if compiler is not None else "")
    time = model.time(work, bandwidth)
    basis = time.bound if work.scheduled else f"unscheduled {time.bound}"
    pallas = instruction.custom_call_target == PALLAS_TARGET
    return replace(times, estimate=time.seconds, basis=basis, work=work, pallas=pallas)
