"""Seconds of a TPU kernel from the compiler's own schedule: bundles x how often each region runs.

A bundle takes one cycle. The compiler spaces the products on a matrix unit as far apart as the unit needs, so the count
already includes the unit's occupancy: no region of the reference 200M and 1B steps has more `mxu_cycles` than bundles,
and the densest has 98 % as many. The count leaves out waiting, above all for HBM: bundles of those steps are 0.25 of
XLA's `estimated_cycles` in matmuls, 0.19 in normalisation and rotary and 0.07 in copies. The copies between HBM and the
core that the bundles start are counted here. `chip_model.py` says how long bundles and copies take together.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tomat.perf.cost.chip_model import KernelWork
from tomat.perf.cost.llo import OpSchedule, Region, Transfer
from tomat.perf.profile.hlo import HloProgram, Instruction
from tomat.perf.profile.hlo_kernels import constant_values, origin

UNCOUNTED_LOOP_SHARE = 0.01
"""No time is given if a larger share of an op's executed bundles is in loops of unknown trip count (counted once)."""


@dataclass(frozen=True, kw_only=True)
class ScheduleTime(KernelWork):
    """The work of one execution of an op, from its schedule."""

    active_share: float | None
    """Splash kernels: share of the grid's steps whose block the mask does not empty."""
    assumed_bundle_share: float
    """Share of the executed bundles in predicated regions that are only assumed to be entered."""
    mask_found: bool = True
    """False for a splash kernel whose mask was not found as a constant. Every block then counts: an upper bound."""


def schedule_time(
    program: HloProgram, instruction: Instruction, schedule: OpSchedule, clock_hz: float
) -> ScheduleTime | None:
    """One execution of `instruction` by its schedule; None if the trip count of a loop that matters is unknown.

    Predicated regions that depend only on loop counters or grid indices count for their share of the iterations. Those
    of a splash kernel that depend on its mask count for the share of active blocks. All others (remainders of dynamic
    slices, regions that depend on data) count as entered each time.
    """
    trips = scalar_trips(program, instruction, schedule)
    shares = entered_shares(program, instruction, schedule)
    blocks = mask_blocks(program, instruction, schedule) if not trips else None
    active = None
    if blocks is not None:
        active = sum(b > 0 for b in blocks) / len(blocks) if blocks else 1.0

    def executions(region: Region) -> float | None:
        if region.first_bundle in trips and region.kind == "loop":
            return trips[region.first_bundle]
        return shares.get(id(region), active if region.operand is not None else None)

    # Identities of the regions that run an unknown number of times, and of all regions in them.
    uncounted: dict[str, set[int]] = {"loop": set(), "branch": set()}
    for region in schedule.body.walk():
        if region.executions is None and region.kind in uncounted and executions(region) is None:
            uncounted[region.kind] |= {id(inner) for inner in region.walk()}

    def executed(kind: str) -> float:
        return schedule.executed(lambda region: region.bundles if id(region) in uncounted[kind] else 0, executions)

    bundles = schedule.executed(lambda region: region.bundles, executions)
    if not bundles or executed("loop") > UNCOUNTED_LOOP_SHARE * bundles:
        return None
    undecided = 1.0 if active is None else active
    copies: list[tuple[Transfer, float]] = []
    for region, times in schedule.timed(executions):
        for copy in region.transfers:
            if started := times * (undecided if copy.share is None else copy.share):
                copies.append((copy, started))
    return ScheduleTime(
        core_seconds=bundles / clock_hz,
        mxu_seconds=schedule.executed(lambda region: region.mxu_cycles, executions) / clock_hz,
        copies=tuple(copies),
        steps=max(1.0, sum(trips.values()) or math.prod(schedule.grid) * undecided),
        active_share=active,
        assumed_bundle_share=executed("branch") / bundles,
        mask_found=blocks is None or bool(blocks),
    )


def scalar_trips(program: HloProgram, instruction: Instruction, schedule: OpSchedule) -> dict[int, float]:
    """Loop (its first bundle) -> trips, for loops whose bound is a scalar operand that is a constant of the program,
    such as the grid of a kernel that visits only the active blocks of its mask (tokamax's splash attention)."""
    operands = program.operands(instruction)
    found = {}
    for region in schedule.body.walk():
        if region.scalar_trips is not None and region.scalar_trips[0] < len(operands):
            number, base, slope = region.scalar_trips
            values = constant_integers(program, operands[number])
            if values is not None and len(values) == 1:
                found[region.first_bundle] = float(max(0, base + slope * values[0]))
    return found


def entered_shares(program: HloProgram, instruction: Instruction, schedule: OpSchedule) -> dict[int, float]:
    """Branch (its identity) -> the share of mask blocks in which it is entered, out of those in which the branches
    around it are. Covers branches that only a block's value decides, if the mask is a constant of the program.

    tokamax's backward pass has a branch for whole blocks and one for blocks on the diagonal, each with all products.
    """
    operands = program.operands(instruction)
    found: dict[int, float] = {}

    def walk(region: Region, around: tuple[bool, ...]) -> None:
        """`around` says for each block whether the region is entered; empty if no mask has decided yet."""
        if region.entered_for is not None and region.operand is not None and region.operand < len(operands):
            values = constant_integers(program, operands[region.operand])
            if values:
                if len(around) != len(values):
                    around = (True,) * len(values)
                inside = tuple(here and value in region.entered_for for here, value in zip(around, values, strict=True))
                found[id(region)] = sum(inside) / max(1, sum(around))
                around = inside
        for inner in region.regions:
            walk(inner, around)

    walk(schedule.body, ())
    return found


def mask_blocks(program: HloProgram, instruction: Instruction, schedule: OpSchedule) -> list[int] | None:
    """For each block of a splash kernel's grid, what its mask leaves to do there; None for other kernels. It is the
    prefetched operand that decides regions (`block_mask`: 0 for a block that the mask empties, 1 partly masked, 2 full;
    JAX's `splash_attention_mask_info.MaskInfo`), a constant of the program for causal and local masks. Empty if it is
    not found; every step then counts as active, and `ScheduleTime.mask_found` is False."""
    deciding = [region.operand for region in schedule.body.walk() if region.operand is not None]
    # Kernels of JAX's splash attention have `splash_m` in their name.
    if not deciding or instruction.custom_call_target != "tpu_custom_call" or "splash_m" not in instruction.op_name:
        return None
    operands = program.operands(instruction)
    return (constant_integers(program, operands[deciding[0]]) if deciding[0] < len(operands) else None) or []


def constant_integers(program: HloProgram, instruction: Instruction) -> list[int] | None:
    """The values of an integer array that is a constant of the program, also behind copies and nested loops that pass
    it on unchanged; None if it is computed."""
    found = origin(program, instruction)
    if found[0].opcode == "broadcast" and not found[1]:
        values = constant_values(origin(program, program.operands(found[0])[0]))
        return values * found[0].shape.elements if values is not None and len(values) == 1 else None
    return constant_values(found)


def matched_schedules(program: HloProgram, schedules: Mapping[str, OpSchedule]) -> dict[str, OpSchedule]:
    """The schedule of each instruction of `program` that has one, by name.

    libtpu compiles equal instructions only once (the two halves of a windowed einsum, the recomputed forward of a
    checkpointed layer). An instruction without its own schedule gets that of an equal one, with the same opcode,
    operand and result layouts, backend estimate and computation.
    """
    by_key: dict[tuple, OpSchedule] = {}
    waiting: list[tuple[str, tuple]] = []
    found: dict[str, OpSchedule] = {}
    for instruction in program.by_id.values():
        schedule = schedules.get(instruction.name)
        if schedule is not None:
            found[instruction.name] = schedule
            by_key.setdefault(_key(program, instruction), schedule)
        elif instruction.opcode in ("fusion", "custom-call", "copy", "broadcast", "iota", "convert", "add"):
            waiting.append((instruction.name, _key(program, instruction)))
    for name, key in waiting:
        if key in by_key:
            found[name] = by_key[key]
    return found


def _key(program: HloProgram, instruction: Instruction) -> tuple:
    """A key that two instructions with the same code share."""

    def shape(i: Instruction) -> tuple:
        return tuple(
            (one.element_type, tuple(one.dimensions), tuple(one.layout.minor_to_major), one.layout.memory_space)
            for one in (i.proto.shape.tuple_shapes or (i.proto.shape,))
        )

    inner = tuple((i.opcode, shape(i)) for i in program.inner(instruction)) if instruction.opcode == "fusion" else ()
    kernel = instruction.op_name.rsplit("/", 2)[-2:] if instruction.opcode == "custom-call" else ()
    return (
        instruction.opcode,
        instruction.custom_call_target,
        tuple(kernel),
        instruction.estimated_cycles,
        shape(instruction),
        tuple(shape(o) for o in program.operands(instruction)),
        inner,
    )
