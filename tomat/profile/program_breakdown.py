"""A compiled program as a `Breakdown`: the same table as a trace's, with predicted instead of measured time."""

from __future__ import annotations

from collections.abc import Callable

from tomat.profile.breakdown import Breakdown, OpRow, Roofs
from tomat.profile.categories import classify_program
from tomat.profile.hlo import HloProgram, Instruction
from tomat.profile.hlo_costs import kernel_flops as stated_flops
from tomat.profile.hlo_costs import kernel_hbm_bytes
from tomat.profile.hlo_kernels import executed_kernels, loop_notes
from tomat.profile.program_costs import compiler_seconds

KernelSeconds = Callable[[Instruction], float | None]
KernelFlops = Callable[[Instruction], float | None]


def breakdown_from_program(
    program: HloProgram,
    *,
    device_kind: str,
    kernel_seconds: KernelSeconds | None = None,
    hidden_seconds: KernelSeconds | None = None,
    kernel_flops: KernelFlops | None = None,
    title: str | None = None,
    n_devices: int = 1,
    n_hosts: int = 1,
) -> Breakdown:
    """One run of `program` on one device, kernels one after the other, loop bodies times their trip counts.

    Args:
        program: the optimised module.
        device_kind: JAX's name of the chip it was compiled for.
        kernel_seconds: time of one execution of a kernel, None where unknown; default: `compiler_seconds`.
        hidden_seconds: time that one execution of a collective runs beside other kernels, not part of `kernel_seconds`;
            None or 0 for other kernels. Default: nothing is hidden.
        kernel_flops: flops of one execution of a kernel, None where unknown; default: what HLO says.
        title: default: the program's name.
        n_devices: devices the program is partitioned over (reported, not used).
        n_hosts: machines that these devices are in (reported, not used).

    A kernel of unknown time has a row with its flops, bytes and occurrences and no time, and a note says how many those
    are: the total is then a lower bound.
    """
    roofs = Roofs.of_device_kind(device_kind)
    cost = kernel_seconds or (lambda instruction: compiler_seconds(program, instruction, roofs))
    count_flops = kernel_flops or (lambda instruction: stated_flops(program, instruction))
    verdicts = classify_program(program)
    rows: dict[str, OpRow] = {}
    unknown: list[str] = []
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        seconds = cost(instruction)
        if seconds is None:
            unknown.append(instruction.name)
        flops = count_flops(instruction)
        before = rows.get(instruction.name)
        times = kernel.executions + (before.occurrences if before else 0.0)
        verdict = verdicts[instruction.name]
        rows[instruction.name] = OpRow(
            name=instruction.name,
            program=program.name,
            opcode=instruction.opcode,
            category=verdict.category,
            part=verdict.part,
            direction=verdict.direction,
            occurrences=times,
            seconds=(seconds or 0.0) * times,
            hidden_seconds=(hidden_seconds(instruction) or 0.0) * times if hidden_seconds is not None else 0.0,
            flops=flops * times if flops is not None else None,
            # What takes no time of its own runs beside the kernels; its bytes over no time would be no rate.
            hbm_bytes=kernel_hbm_bytes(program, instruction) * times if seconds != 0.0 else 0.0,
            op_name=instruction.op_name,
            source=program.source(instruction),
        )
    said = loop_notes(program)
    if unknown:
        names = ", ".join(sorted(set(unknown))[:6])
        said.append(f"no time is known for {len(set(unknown))} kernels ({names}): the step is a lower bound")
    ops = tuple(rows[name] for name in sorted(rows))
    return Breakdown(
        title=title or program.name,
        source="compiled",
        roofs=roofs,
        step_seconds=sum(op.seconds for op in ops),
        ops=ops,
        n_devices=n_devices,
        n_hosts=n_hosts,
        memory_bytes=program.memory_bytes(),
        notes=tuple(said),
    )
