"""Forward or recomputed: decided by arithmetic where the names of operations do not tell.

XLA merges a recomputed operation with the one of the forward pass wherever it may (layers that are not scanned, all
values kept), and either name may stay; a Pallas kernel has no name of a pass at all. But a product has two of its size
in the backward pass, and attention of two products five, so that the backward pass of a part says how much one forward
pass is. Of what is not backward that much is forward, first come first; only what is beyond it is recomputed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from tomat.pages.tables import quantity
from tomat.profile.categories import Classified, Direction, Part
from tomat.profile.hlo import HloProgram, Instruction
from tomat.profile.hlo_costs import kernel_flops
from tomat.profile.hlo_kernels import executed_kernels

BACKWARD_OVER_FORWARD = 2.0
"""FLOPs of the backward pass over those of one forward pass: a product has two gradients."""
ATTENTION_BACKWARD_OVER_FORWARD = 2.5
"""The same of attention in one kernel, which computes its scores again: five products against two."""
PRODUCT_PARTS = frozenset({Part.MLP, Part.ATTENTION_PROJECTIONS, Part.ATTENTION_CORE})
"""Parts of which nearly all FLOPs are in products."""
WHOLE_SHARE = 0.9
"""Of one forward pass, what is called forward where none of it has another name."""
LEAST_SHARE = 0.01
"""Of a forward pass, what is not worth a decision."""
NEAR = 0.3
"""Work this near to a whole number of forward passes is that number."""


@dataclass(frozen=True)
class _Work:
    """An operation's work in one step: FLOPs, or executions where its FLOPs are not known."""

    name: str
    kind: str
    """Which kernel it is: the end of its path."""
    direction: Direction
    amount: float


def settled(
    program: HloProgram,
    verdicts: dict[str, Classified],
    flops: Callable[[Instruction], float | None] | None = None,
) -> tuple[dict[str, Classified], list[str]]:
    """The verdicts of `classify_program` with the directions that arithmetic decides.

    Args:
        program: What was classified.
        verdicts: By name of the instruction.
        flops: Of one execution of a kernel, None where unknown; default: what HLO says.

    Returns:
        All verdicts, and a note for each part of which arithmetic decided something.
    """
    verdicts = dict(verdicts)
    notes: list[str] = []
    for (part, unit), works in sorted(_works(program, verdicts, flops or partial(kernel_flops, program)).items()):
        ratio = ATTENTION_BACKWARD_OVER_FORWARD if part == Part.ATTENTION_CORE else BACKWARD_OVER_FORWARD
        backward = Counter[str]()
        for work in works:
            if work.direction == Direction.BACKWARD:
                backward[work.kind] += work.amount
        # Several kernels may do the backward pass of one; each runs as often as there are forward passes.
        one_forward = backward.total() / ratio if unit else max(backward.values(), default=0.0)
        if not one_forward:
            continue
        named = sum(work.amount for work in works if work.direction == Direction.FORWARD)
        unsure = {Direction.NONE} | ({Direction.RECOMPUTE} if named < WHOLE_SHARE * one_forward else set())
        open_works = [work for work in works if work.direction in unsure]
        if sum(work.amount for work in open_works) < LEAST_SHARE * one_forward:
            continue
        forward, recomputed = _shared(open_works, max(0.0, one_forward - named), one_forward)
        for works_of, direction in ((forward, Direction.FORWARD), (recomputed, Direction.RECOMPUTE)):
            for work in works_of:
                verdicts[work.name] = replace(verdicts[work.name], direction=direction)
        called = Counter[Direction]()
        for work in works:
            called[verdicts[work.name].direction] += work.amount
        amounts = [quantity(called[direction], unit) for direction in (Direction.FORWARD, Direction.RECOMPUTE)]
        if unit:
            whole, first = quantity(backward.total(), unit), quantity(one_forward, unit)
            notes.append(
                f"{part}: names do not tell forward from recompute; of a backward pass of {whole} one forward pass is "
                f"{first}, so {amounts[0]} are forward and {amounts[1]} recompute"
            )
        else:
            notes.append(
                f"{part}: names and FLOPs do not tell forward from recompute; the backward kernels run "
                f"{one_forward:,.0f} times, so {amounts[0]} runs are forward and {amounts[1]} recompute"
            )
    return verdicts, notes


def _works(
    program: HloProgram, verdicts: dict[str, Classified], flops: Callable[[Instruction], float | None]
) -> dict[tuple[Part, str], list[_Work]]:
    """The work of the parts that have products, in the order of the program; by part and unit (`FLOP`, "" for runs)."""
    found: dict[tuple[Part, str], list[_Work]] = defaultdict(list)
    for kernel in executed_kernels(program):
        name = kernel.instruction.name
        verdict = verdicts[name]
        each = flops(kernel.instruction) if verdict.part in PRODUCT_PARTS else 0.0
        if each == 0:
            continue
        unit, amount = ("", kernel.executions) if each is None else ("FLOP", each * kernel.executions)
        kind = "/".join(kernel.instruction.op_name.split("/")[-2:])
        found[verdict.part, unit].append(_Work(name, kind, verdict.direction, amount))
    return found


def _shared(works: list[_Work], missing: float, one_forward: float) -> tuple[list[_Work], list[_Work]]:
    """The works up to what is missing of a forward pass, and the rest."""
    total = sum(work.amount for work in works)
    passes = total / one_forward
    if passes >= 1 - NEAR and abs(passes - round(passes)) <= NEAR and missing >= (1 - NEAR) * one_forward:
        missing = total / round(passes)
    forward: list[_Work] = []
    taken = 0.0
    for work in works:
        if taken + work.amount / 2 > missing:
            break
        forward.append(work)
        taken += work.amount
    return forward, works[len(forward) :]
