"""Forward or recomputed: decided by arithmetic where the names of operations do not tell.

XLA merges a recomputed operation with the one of the forward pass wherever it may, and either name may stay; a Pallas
kernel has no name of a pass at all. But every product has two of its size in the backward pass, and the backward kernel
of attention runs once for each forward pass, so that the backward pass of a part says how much one forward pass is. Of
what is not backward that much is forward, first come first; only what is beyond it is recomputed.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from tomat.base.report.formats import quantity
from tomat.perf.profile.categories import Classified, Direction, Part, classify_program
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_costs import kernel_flops
from tomat.perf.profile.hlo_kernels import executed_kernels

BACKWARD_OVER_FORWARD = 2.0
"""FLOPs of a product's gradients over its own. Attention that XLA does has 2.0, or 2.5 where it computes its scores
again, so that less is certain of it."""
PRODUCTS = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})
WHOLE_SHARE = {Part.MLP: 0.9, Part.ATTENTION_PROJECTIONS: 0.9, Part.ATTENTION_CORE: 0.5}
"""Of one forward pass, what is called forward at the least where none of it has another name."""
NEAR = {Part.MLP: 0.2, Part.ATTENTION_PROJECTIONS: 0.2, Part.ATTENTION_CORE: 0.4}
"""Work this near to a whole number of forward passes is that number."""
LEAST_SHARE = 0.01
"""Of a forward pass, what is not worth a decision."""


@dataclass(frozen=True)
class _Work:
    """An operation's work in one step: FLOPs of products, runs of a kernel whose inside HLO does not show."""

    name: str
    direction: Direction
    amount: float


def settled(program: HloProgram) -> tuple[dict[str, Classified], list[str]]:
    """The verdicts of `classify_program`, directions decided by arithmetic where the names do not tell. With a note for
    each part of which arithmetic decided something."""
    verdicts = classify_program(program)
    products, kernels = _works(program, verdicts)
    notes: list[str] = []
    for part, works in sorted(products.items()):
        backward = sum(work.amount for work in works if work.direction == Direction.BACKWARD)
        one_forward = backward / BACKWARD_OVER_FORWARD
        if _decide(part, works, one_forward, verdicts):
            forward, recomputed = _amounts(works, verdicts)
            said = [quantity(amount, "FLOP") for amount in (backward, one_forward, forward, recomputed)]
            notes.append(
                f"{part}: names do not tell forward from recompute; the products of the backward pass have {said[0]}, "
                f"so that one forward pass has {said[1]}: {said[2]} are forward, {said[3]} recompute"
            )
    for part, by_kind in sorted(kernels.items()):
        # Several kernels may do the backward pass of one; each runs as often as there are forward passes.
        runs = [sum(w.amount for w in works if w.direction == Direction.BACKWARD) for works in by_kind.values()]
        for kind, works in sorted(by_kind.items()):
            if _decide(part, works, max(runs), verdicts):
                forward, recomputed = _amounts(works, verdicts)
                notes.append(
                    f"{part}: the name of kernel {kind} does not tell forward from recompute; a backward kernel runs "
                    f"{max(runs):,.0f} times, so {forward:,.0f} of its runs are forward, {recomputed:,.0f} recompute"
                )
    return verdicts, notes


def _works(
    program: HloProgram, verdicts: dict[str, Classified]
) -> tuple[dict[Part, list[_Work]], dict[Part, dict[str, list[_Work]]]]:
    """The products of each part, and its kernels by what they are, in the order of the program."""
    products: dict[Part, list[_Work]] = defaultdict(list)
    kernels: dict[Part, dict[str, list[_Work]]] = defaultdict(lambda: defaultdict(list))
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        verdict = verdicts[instruction.name]
        if verdict.part not in WHOLE_SHARE:
            continue
        if instruction.opcode == "custom-call" and "gemm_backend_config" not in instruction.backend_config:
            path = "/".join(instruction.op_name.split("/")[-2:])
            kernels[verdict.part][path].append(_Work(instruction.name, verdict.direction, kernel.executions))
        elif instruction.opcode == "custom-call" or PRODUCTS & {i.opcode for i in program.inner(instruction)}:
            flops = kernel_flops(program, instruction) or 0.0
            products[verdict.part].append(_Work(instruction.name, verdict.direction, flops * kernel.executions))
    return products, kernels


def _decide(part: Part, works: list[_Work], one_forward: float, verdicts: dict[str, Classified]) -> bool:
    """Write the directions of works into `verdicts` where their names do not tell; whether that was so."""
    named = sum(work.amount for work in works if work.direction == Direction.FORWARD)
    unsure = {Direction.NONE} | ({Direction.RECOMPUTE} if named < WHOLE_SHARE[part] * one_forward else set())
    open_works = [work for work in works if work.direction in unsure]
    total = sum(work.amount for work in open_works)
    if not one_forward or total < LEAST_SHARE * one_forward:
        return False
    missing = max(0.0, one_forward - named)
    passes = round(total / one_forward)
    if not named and passes and abs(total / one_forward - passes) <= NEAR[part]:
        missing = total / passes
    taken = 0.0
    for work in open_works:
        direction = Direction.FORWARD if taken + work.amount / 2 <= missing else Direction.RECOMPUTE
        verdicts[work.name] = replace(verdicts[work.name], direction=direction)
        taken += work.amount
    return True


def _amounts(works: list[_Work], verdicts: dict[str, Classified]) -> tuple[float, float]:
    found = dict.fromkeys(Direction, 0.0)
    for work in works:
        found[verdicts[work.name].direction] += work.amount
    return found[Direction.FORWARD], found[Direction.RECOMPUTE]
