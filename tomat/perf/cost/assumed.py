"""What an estimate of a step had to assume: trip counts, masks and bundles that were not found, and what hangs on them.

A plan is read for its sum. What in it is no model of the device's work is named here, with its share of the step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tomat.base.report.formats import count, percent, seconds
from tomat.perf.cost.llo import OpSchedule
from tomat.perf.cost.op_times import PALLAS_TARGET, OpTimes
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_kernels import executed_kernels, trip_count

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
"""What is assumed, by kind; the operations' names go into `{names}`."""


@dataclass(frozen=True)
class Assumption:
    """One thing that was assumed, of all operations that it was assumed of."""

    kind: str
    """A key of `SENTENCES`."""
    operations: tuple[str, ...]
    """Names of the kernels, loops or conditionals."""
    executions_per_step: float
    seconds_per_step: float
    """What they take in the plan, or what the bodies and branches take."""
    step_share: float
    """The same as a fraction of the step."""

    @property
    def sentence(self) -> str:
        """For the reader of the plan."""
        shown = ", ".join(self.operations[:NAMES_SHOWN])
        if len(self.operations) > NAMES_SHOWN:
            shown += f" and {len(self.operations) - NAMES_SHOWN} more"
        return (
            f"{SENTENCES[self.kind].format(names=shown)} ({count(self.executions_per_step)} executions a step, "
            f"{seconds(self.seconds_per_step)}, {percent(self.step_share)} of the step)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON."""
        return {**asdict(self), "operations": list(self.operations), "sentence": self.sentence}


def assumptions(
    program: HloProgram, ops: Mapping[str, OpTimes], matched: Mapping[str, OpSchedule], breakdown: Breakdown
) -> tuple[Assumption, ...]:
    """What was assumed of a step, in the order of `SENTENCES`.

    Args:
        program: The compiled step.
        ops: Its kernels by every model.
        matched: Their schedules (`matched_schedules`).
        breakdown: The step by the estimate.
    """
    found: dict[str, list[str]] = {kind: [] for kind in SENTENCES}
    inside: dict[str, list[str]] = {}
    """Of a loop or a conditional: the kernels that its computations execute."""
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

    def assumption(kind: str, names: list[str]) -> Assumption:
        timed = dict.fromkeys(kernel for name in names for kernel in inside.get(name, [name]))
        total = sum(rows[kernel].seconds for kernel in timed if kernel in rows)
        return Assumption(
            kind=kind,
            operations=tuple(names),
            executions_per_step=sum(ops[name].executions for name in names),
            seconds_per_step=total,
            step_share=total / breakdown.step_seconds if breakdown.step_seconds else 0.0,
        )

    return tuple(assumption(kind, names) for kind, names in found.items() if names)
