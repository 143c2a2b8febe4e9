"""Seconds of every operation of a compiled step by three cycle models, the estimate that is used, and its errors.

The three models are independent and are compared in a table: XLA's own `estimated_cycles`, the roofline
(`roofline.py`) and the VLIW schedule (`schedule_model.py`). The estimate is computed by the chip's model
(`chip_model.py`) from a kernel's bundles, products and copies, or without a schedule from its HLO. A collective takes
the part of its transfer that the kernels beside it do not cover. XLA's own cycles are the last resort: for the parts
outside attention they give 1.59 s of the reference's 200M step and 5.48 s of its 1B step; the pods' profiles have 1.10
and 4.78 s.

Each part of the step (`Support`) has the error of the chip's model on kernels of its kind that were left out of its
fit. Within a kind errors add up, since kernels of a step are alike; between kinds they are independent. Operations
that a chip's timings do not cover get the error of a chip that has timed them: on TPU7x the kernels of attention's
backward pass are wrong by 14.5 % and those of the loss by 30 % (nine of ten; `docs/tracking/kernels.md`). For all else
the error is assumed. Both are marked. Assumptions that are no model of the device's work are listed (`Assumption`).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from tomat.base.report.formats import count, percent, seconds
from tomat.hardware.chips import Slice
from tomat.perf.cost.chip_model import MODELS, PALLAS, ChipModel, KernelWork, Support, core_bandwidth, step_error
from tomat.perf.cost.interconnect import CollectiveTime, overlap, spread_collectives
from tomat.perf.cost.llo import OpSchedule, Transfer
from tomat.perf.cost.roofline import RooflineTime, roofline_seconds
from tomat.perf.cost.schedule_model import ScheduleTime, matched_schedules, schedule_time
from tomat.perf.profile.breakdown import Breakdown, Roofs
from tomat.perf.profile.categories import NO_CODE_CALLS, Category, Classified
from tomat.perf.profile.directions import settled
from tomat.perf.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import kernel_flops
from tomat.perf.profile.hlo_kernels import Kernel, executed_kernels, trip_count
from tomat.perf.profile.program_breakdown import breakdown_from_program

PALLAS_TARGET = "tpu_custom_call"
"""Custom-call target of a Pallas kernel on a TPU."""


@dataclass(frozen=True)
class OpTimes:
    """One kernel: seconds of one execution by each model, None where a model does not cover it."""

    name: str
    category: Category
    executions: float
    compiler: float | None
    roofline: RooflineTime | None
    schedule: ScheduleTime | None
    estimate: float | None
    basis: str
    """What the estimate is based on: what bounds the kernel (`chip_model.BOUNDS`), `unscheduled <bound>` if its bundles
    were not found, `interconnect`, `compiler`, or `beside other kernels`; "" if it has no basis."""
    work: KernelWork | None = None
    """The work from which the chip's model computed the estimate; None if the model does not cover the kernel."""
    pallas: bool = False
    """Whether it is a Pallas kernel. Estimates of these are only verified for kernels like a timed one."""

    def seconds(self, model: str) -> float | None:
        if model == "roofline":
            return self.roofline.seconds if self.roofline is not None else None
        if model == "schedule":
            return self.schedule.core_seconds if self.schedule is not None else None
        return self.compiler if model == "compiler" else self.estimate


ASSUMED_ERROR = 0.5
"""Error of parts that rest on no measured kind: collectives, kernels whose bundles were not found, XLA's own cycles,
Pallas kernels unlike any that a chip has timed. (A guess.)"""

_LOSS = "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss"
PALLAS_OPERATIONS = {
    Category.ATTENTION_FORWARD: ("pallas_mosaic_tpu_flash_attention",),
    Category.ATTENTION_BACKWARD: ("pallas_mosaic_tpu_flash_attention_vjp",),
    Category.LOSS: (_LOSS, f"{_LOSS}_vjp"),
}
"""Category of a Pallas kernel -> the timed operations that do the same work (`kernels.json`)."""


def supports(ops: Iterable[OpTimes], model: ChipModel) -> tuple[Support, ...]:
    """The parts that a step's estimate rests on, the largest first. The times of collectives in `ops` must be final."""
    seconds: dict[str, float] = defaultdict(float)
    unlike: dict[str, Category] = {}
    for op in ops:
        if op.estimate:
            kind = op.basis
            done = PALLAS_OPERATIONS.get(op.category, ())
            timed = bool(done) and all(model.chip in model.operations.get(name, {}) for name in done)
            if op.pallas and not timed:
                kind = f"{PALLAS}{op.category}"
                unlike[kind] = op.category
            seconds[kind] += op.estimate * op.executions
    whole = sum(seconds.values())
    found = []
    for kind, part in sorted(seconds.items(), key=lambda item: -item[1]):
        known = None if model.borrowed or kind in unlike else model.errors.get(kind)
        if known is not None:
            found.append(Support(kind, part, part / whole, known["absolute_error_p90"], known["kernels"]))
            continue
        error, chips = ASSUMED_ERROR, ()
        operations = PALLAS_OPERATIONS.get(unlike[kind], ()) if kind in unlike else ()
        elsewhere = [model.operations.get(name, {}) for name in operations]
        if elsewhere and all(elsewhere):
            # The worst chip counts. Such estimates are too short: a plan that is 30 % too short takes 1 / 0.7 as long.
            worst = min(0.9, max(errors["absolute_error_p90"] for each in elsewhere for errors in each.values()))
            error, chips = 1 / (1 - worst) - 1, tuple(sorted({chip for each in elsewhere for chip in each}))
        found.append(Support(kind, part, part / whole, error, 0, chips))
    return tuple(found)


NAMES_SHOWN = 4

SENTENCES = {
    "mask_not_found": "the mask of {names} was not found: every block of it is counted, an upper bound",
    "bundles_not_found": "no bundles of {names} were found: costed by HBM traffic alone, a lower bound",
    "bundle_loops_not_found": "the trip count of a loop in the bundles of {names} was not found: costed by HBM traffic "
    "alone, a lower bound",
    "trip_count_not_found": "the trip count of {names} was not found: the body is counted once, a lower bound",
    "branch_not_known": "which branch of {names} runs is not known: each is counted as often as the others",
    "time_not_known": "no time is known for {names}: counted as none, so the step is a lower bound",
}  # fmt: skip
"""Sentence for each kind of assumption. The operations' names replace `{names}`."""


@dataclass(frozen=True)
class Assumption:
    """One kind of assumption, with all operations for which it was made."""

    kind: str
    """A key of `SENTENCES`."""
    operations: tuple[str, ...]
    """Names of the kernels, loops or conditionals."""
    executions_per_step: float
    seconds_per_step: float
    """Planned time of these kernels, or of the bodies and branches."""
    step_share: float

    @property
    def sentence(self) -> str:
        shown = ", ".join(self.operations[:NAMES_SHOWN])
        if len(self.operations) > NAMES_SHOWN:
            shown += f" and {len(self.operations) - NAMES_SHOWN} more"
        return (
            f"{SENTENCES[self.kind].format(names=shown)} ({count(self.executions_per_step)} executions a step, "
            f"{seconds(self.seconds_per_step)}, {percent(self.step_share)} of the step)"
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "operations": list(self.operations), "sentence": self.sentence}


def assumptions(
    program: HloProgram, ops: Mapping[str, OpTimes], matched: Mapping[str, OpSchedule], breakdown: Breakdown
) -> tuple[Assumption, ...]:
    """What was assumed about a step, in the order of `SENTENCES`."""
    found: dict[str, list[str]] = {kind: [] for kind in SENTENCES}
    inside: dict[str, list[str]] = {}
    """Name of a loop or a conditional -> the kernels that its computations execute."""
    for name, op in ops.items():
        instruction = program.by_name[name]
        called = instruction.called_ids if instruction.opcode in ("while", "conditional") else ()
        run = [kernel.instruction.name for each in called for kernel in executed_kernels(program, each)]
        if instruction.opcode == "while" and trip_count(program, instruction) is None:
            found["trip_count_not_found"].append(name)
            inside[name] = run
        elif instruction.opcode == "conditional" and len(instruction.called_ids) > 1:
            inside[name] = [inner for inner in run if ops[inner].estimate]
            if inside[name]:
                found["branch_not_known"].append(name)
        elif op.schedule is not None and not op.schedule.mask_found:
            found["mask_not_found"].append(name)
        elif op.estimate is None:
            found["time_not_known"].append(name)
        elif instruction.custom_call_target == PALLAS_TARGET and op.schedule is None:
            found["bundle_loops_not_found" if name in matched else "bundles_not_found"].append(name)
    rows = {row.name: row for row in breakdown.ops}
    assumed = []
    for kind, names in found.items():
        if names:
            timed = dict.fromkeys(kernel for name in names for kernel in inside.get(name, [name]))
            total = sum(rows[kernel].seconds for kernel in timed if kernel in rows)
            share = total / breakdown.step_seconds if breakdown.step_seconds else 0.0
            executions = sum(ops[name].executions for name in names)
            assumed.append(Assumption(kind, tuple(names), executions, total, share))
    return tuple(assumed)


@dataclass(frozen=True)
class StepEstimate:
    ops: Mapping[str, OpTimes]
    collectives: Mapping[str, CollectiveTime]
    breakdown: Breakdown
    model: ChipModel
    """The chip's model that the estimate was made with."""
    assumed: tuple[Assumption, ...] = ()
    """What the models did not find and therefore assumed."""

    @cached_property
    def supports(self) -> tuple[Support, ...]:
        return supports(self.ops.values(), self.model)

    @property
    def error(self) -> float:
        return step_error(self.supports)

    def model_table(self) -> dict[str, dict[str, float]]:
        """Category -> model -> seconds of a step. A model leaves out operations that it does not cover."""
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
    """Estimate one step of `program` on one device of `slice_`. `model` is the chip's (default: the release's);
    `memory_bytes` is for a program without a buffer assignment. Assumptions are added to `notes`."""
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
    for name, start in spread_collectives(program).items():
        # The kernel that starts the collective is charged with all of its time on the links.
        if name != start and name in ops and (least := ops[name].roofline) is not None:
            ops[name] = replace(ops[name], roofline=replace(least, ici_seconds=0.0))
    collectives = overlap(program, lambda instruction: ops[instruction.name].estimate, slice_, chip_model.links)
    for name, time in collectives.items():
        if name in ops:
            # A collective takes the time that the step waits for it. A fusion that also multiplies adds its own time.
            inner = {i.opcode for i in program.inner(kernels[name].instruction)}
            own = (ops[name].estimate or 0.0) if inner & {"dot", "convolution"} else 0.0
            ops[name] = replace(ops[name], estimate=own + time.exposed_seconds, basis="interconnect")

    hidden = {name: time.hidden_seconds for name, time in collectives.items()}
    breakdown = breakdown_from_program(
        program,
        device_kind=device_kind,
        kernel_seconds=lambda instruction: ops[instruction.name].estimate,
        hidden_seconds=lambda instruction: hidden.get(instruction.name),
        kernel_flops=lambda instruction: _flops(program, instruction, ops[instruction.name].schedule, roofs),
        verdicts=verdicts,
        title=title,
        n_devices=slice_.n_devices,
        n_hosts=slice_.n_hosts,
    )
    assumed = assumptions(program, ops, matched, breakdown)
    # The breakdown's own notes are about unknown loops and kernels. `assumed` has these with their shares.
    said = (*notes, *chip_model.notes(), *(assumption.sentence for assumption in assumed), *decided)
    breakdown = replace(breakdown, notes=said, memory_bytes=memory_bytes or breakdown.memory_bytes)
    return StepEstimate(ops, collectives, breakdown, chip_model, assumed)


def _flops(program: HloProgram, instruction: Instruction, schedule: ScheduleTime | None, roofs: Roofs) -> float | None:
    """Flops of one execution. For a Pallas kernel, for which HLO may say 0, at least those of its busy matrix units."""
    # They count at their peak, padding included: a head of 64 fills a quarter of a v6e's matrix unit, but counts whole.
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
    """Apply every model to one kernel. Collectives get their time later, when it is known what runs beside them."""
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
        # Copies between HBM and VMEM run beside the kernels. The wait for collectives is computed later.
        return replace(times, estimate=0.0, basis="beside other kernels")
    bandwidth = core_bandwidth(slice_.chip)
    if scheduled is not None:
        work = scheduled
    elif roofline is not None:
        size = round(roofline.hbm_seconds * bandwidth)  # the bytes of this core
        copies = ((Transfer(False, size), 1.0),) if size else ()
        core = max(roofline.mxu_seconds, roofline.vpu_seconds)
        work = KernelWork(core, roofline.mxu_seconds, copies, scheduled=False)
    else:
        return replace(times, estimate=compiler, basis="compiler" if compiler is not None else "")
    seconds, bound = model.time(work, bandwidth)
    basis = bound if work.scheduled else f"unscheduled {bound}"
    pallas = instruction.custom_call_target == PALLAS_TARGET
    return replace(times, estimate=seconds, basis=basis, work=work, pallas=pallas)
