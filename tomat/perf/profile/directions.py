"""Decides by arithmetic whether an operation is forward or recomputed, where names do not tell.

XLA merges a recomputed operation with the one of the forward pass wherever it may, and either name may stay. A Pallas
kernel's name states no pass at all. But every product has two of its size in the backward pass, and the backward kernel
of attention runs once for each forward pass. So the backward pass of a part tells the work of one forward pass. This
much of the work that is not backward counts as forward, in order; only the rest is recomputed.
"""

from collections import defaultdict
from dataclasses import replace

from tomat.base.report.formats import quantity
from tomat.perf.profile.categories import PRODUCTS, Classified, Direction, Part, classify_program
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_costs import kernel_flops
from tomat.perf.profile.hlo_kernels import executed_kernels

BACKWARD_OVER_FORWARD = 2.0
"""FLOPs of a product's gradients, divided by its own. Attention by XLA has 2.0, or 2.5 where it recomputes its scores,
so less is certain about it."""
WHOLE_SHARE = {Part.MLP: 0.9, Part.ATTENTION_PROJECTIONS: 0.9, Part.ATTENTION_CORE: 0.5}
"""If at least this share of a forward pass is named forward, names of recomputed operations are trusted."""
NEAR = {Part.MLP: 0.2, Part.ATTENTION_PROJECTIONS: 0.2, Part.ATTENTION_CORE: 0.4}
"""Work this near to a whole number of forward passes counts as that number."""
LEAST_SHARE = 0.01
"""Less than this share of a forward pass is not worth a decision."""

Works = dict[str, float]
"""An operation's name -> its work in one step: FLOPs of products, or runs of a kernel that HLO cannot look into."""


def settled(program: HloProgram) -> tuple[dict[str, Classified], list[str]]:
    """The verdicts of `classify_program`, with directions decided by arithmetic where names do not tell; and a note for
    each part in which arithmetic decided something."""
    verdicts = classify_program(program)
    products: dict[Part, Works] = defaultdict(dict)
    kernels: dict[Part, dict[str, Works]] = defaultdict(lambda: defaultdict(dict))
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        part = verdicts[instruction.name].part
        if part not in WHOLE_SHARE:
            continue
        if instruction.opcode == "custom-call" and "gemm_backend_config" not in instruction.backend_config:
            path = "/".join(instruction.op_name.split("/")[-2:])
            kernels[part][path][instruction.name] = kernel.executions
        elif instruction.opcode == "custom-call" or PRODUCTS & {i.opcode for i in program.inner(instruction)}:
            flops = kernel_flops(program, instruction) or 0.0
            products[part][instruction.name] = flops * kernel.executions
    notes: list[str] = []
    for part, works in sorted(products.items()):
        backward = _in_direction(Direction.BACKWARD, works, verdicts)
        one_forward = backward / BACKWARD_OVER_FORWARD
        if decided := _decide(part, works, one_forward, verdicts):
            said = [quantity(amount, "FLOP") for amount in (backward, one_forward, *decided)]
            notes.append(
                f"{part}: names do not tell forward from recompute; the products of the backward pass have {said[0]}, "
                f"so that one forward pass has {said[1]}: {said[2]} are forward, {said[3]} recompute"
            )
    for part, by_kind in sorted(kernels.items()):
        # Several kernels may share a backward pass. Each of them runs as often as there are forward passes.
        runs = max(_in_direction(Direction.BACKWARD, works, verdicts) for works in by_kind.values())
        for kind, works in sorted(by_kind.items()):
            if decided := _decide(part, works, runs, verdicts):
                notes.append(
                    f"{part}: the name of kernel {kind} does not tell forward from recompute; a backward kernel runs "
                    f"{runs:,.0f} times, so {decided[0]:,.0f} of its runs are forward, {decided[1]:,.0f} recompute"
                )
    return verdicts, notes


def _in_direction(direction: Direction, works: Works, verdicts: dict[str, Classified]) -> float:
    return sum(amount for name, amount in works.items() if verdicts[name].direction == direction)


def _decide(
    part: Part, works: Works, one_forward: float, verdicts: dict[str, Classified]
) -> tuple[float, float] | None:
    """Write directions into `verdicts` for the works whose names do not tell. Returns how much is then forward, and how
    much recomputed; None if the names tell."""
    named = _in_direction(Direction.FORWARD, works, verdicts)
    unsure = {Direction.NONE} | ({Direction.RECOMPUTE} if named < WHOLE_SHARE[part] * one_forward else set())
    open_works = {name: amount for name, amount in works.items() if verdicts[name].direction in unsure}
    total = sum(open_works.values())
    if not one_forward or total < LEAST_SHARE * one_forward:
        return None
    missing = max(0.0, one_forward - named)
    passes = round(total / one_forward)
    if not named and passes and abs(total / one_forward - passes) <= NEAR[part]:
        missing = total / passes
    taken = 0.0
    for name, amount in open_works.items():
        direction = Direction.FORWARD if taken + amount / 2 <= missing else Direction.RECOMPUTE
        verdicts[name] = replace(verdicts[name], direction=direction)
        taken += amount
    return (_in_direction(Direction.FORWARD, works, verdicts), _in_direction(Direction.RECOMPUTE, works, verdicts))
