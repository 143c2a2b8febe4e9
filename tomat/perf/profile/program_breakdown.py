"""A compiled program as a `Breakdown`: the same table as a trace's, with predicted instead of measured time.

Unless the caller gives a time, a kernel takes the ``estimated_cycles`` that XLA:TPU writes into the fusions it
schedules, or else the larger of flops / peak and HBM bytes / bandwidth, at least one cycle. A kernel that neither
covers (a Pallas call without a cost estimate, a collective) has no time, and is reported as unknown.
"""

from collections.abc import Callable
from dataclasses import replace

from tomat.perf.profile.breakdown import Breakdown, OpRow, Roofs
from tomat.perf.profile.categories import Classified
from tomat.perf.profile.directions import settled
from tomat.perf.profile.hlo import CONTROL_OPCODES, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import COLLECTIVES, base_opcode, kernel_hbm_bytes, kernel_operands
from tomat.perf.profile.hlo_costs import kernel_flops as stated_flops
from tomat.perf.profile.hlo_kernels import executed_kernels, loop_notes

KernelFigure = Callable[[Instruction], float | None]


def breakdown_from_program(
    program: HloProgram,
    *,
    device_kind: str,
    kernel_seconds: KernelFigure | None = None,
    hidden_seconds: KernelFigure | None = None,
    kernel_flops: KernelFigure | None = None,
    verdicts: dict[str, Classified] | None = None,
    title: str | None = None,
    n_devices: int = 1,
    n_hosts: int = 1,
) -> Breakdown:
    """One run of `program` on one device: kernels one after another, loop bodies times their trip counts.

    A kernel of unknown time has a row with its flops, bytes and occurrences but no time. A note then states the number
    of such kernels, and the total is a lower bound. `device_kind` is JAX's name of the chip that the program was
    compiled for. `verdicts` classify its operations, by name (default: `settled`).

    For one execution of a kernel, `kernel_seconds` gives its time, None if unknown (default: `compiler_seconds`);
    `hidden_seconds` the time of a collective beside other kernels, which is not part of that (default: none);
    `kernel_flops` its flops, None if unknown (default: from HLO).
    """
    roofs = Roofs.of_device_kind(device_kind)
    cost = kernel_seconds or (lambda instruction: compiler_seconds(program, instruction, roofs))
    decided: list[str] = []
    if verdicts is None:
        verdicts, decided = settled(program)
    rows: list[OpRow] = []
    unknown: list[str] = []
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        seconds = cost(instruction)
        if seconds is None:
            unknown.append(instruction.name)
        row = kernel_row(program, instruction, verdicts[instruction.name])
        if kernel_flops is not None:
            row = replace(row, flops=kernel_flops(instruction))
        if seconds == 0.0:
            # A kernel without own time runs beside others. Its bytes are dropped, because they would have no rate.
            row = replace(row, hbm_bytes=0.0)
        hidden = (hidden_seconds(instruction) or 0.0) if hidden_seconds is not None else 0.0
        times = kernel.executions
        rows.append(row.of_step((seconds or 0.0) * times, hidden * times, times))
    said = [*loop_notes(program), *decided]
    if unknown:
        names = ", ".join(sorted(unknown)[:6])
        said.append(f"no time is known for {len(unknown)} kernels ({names}): the step is a lower bound")
    ops = tuple(sorted(rows, key=lambda row: row.name))
    return Breakdown(
        title=title or program.name,
        source="compiled",
        roofs=roofs,
        step_seconds=sum(op.seconds for op in ops),
        ops=ops,
        n_devices=n_devices,
        n_hosts=n_hosts,
        memory_bytes=program.memory_bytes,
        notes=tuple(said),
    )


def kernel_row(program: HloProgram, instruction: Instruction, verdict: Classified) -> OpRow:
    """The row of a kernel without time, with the flops and bytes of one execution from HLO."""
    return OpRow(
        name=instruction.name,
        program=program.name,
        opcode=instruction.opcode,
        category=verdict.category,
        part=verdict.part,
        direction=verdict.direction,
        occurrences=0.0,
        seconds=0.0,
        flops=stated_flops(program, instruction),
        hbm_bytes=kernel_hbm_bytes(program, instruction),
        op_name=instruction.op_name,
        source=program.source(instruction),
        operands=kernel_operands(program, instruction),
    )


def compiler_seconds(program: HloProgram, instruction: Instruction, roofs: Roofs) -> float | None:
    """Seconds of one execution; None if neither the compiler nor the roofline gives them (see the module)."""
    if instruction.opcode in CONTROL_OPCODES:
        return 0.0
    cycles = instruction.estimated_cycles
    if cycles is not None and roofs.clock_hz:
        return cycles / roofs.clock_hz
    # The end of an asynchronous collective has no own work.
    ends = instruction.opcode.endswith(("-update", "-done"))
    if not ends and any(base_opcode(inner.opcode) in COLLECTIVES for inner in program.inner(instruction)):
        return None
    flops = stated_flops(program, instruction)
    if flops is None or not roofs.peak_flops_per_second or not roofs.peak_hbm_bytes_per_second:
        return None  # opaque, or of an unknown chip
    moved = kernel_hbm_bytes(program, instruction)
    peak = roofs.peak_of(kernel_operands(program, instruction)) or roofs.peak_flops_per_second
    seconds = max(flops / peak, moved / roofs.peak_hbm_bytes_per_second)
    # Nothing takes less than a cycle: a scalar's bytes / bandwidth would be a third of a cycle, at a rate of 100 %.
    return max(seconds, 1 / roofs.clock_hz) if seconds and roofs.clock_hz else seconds
