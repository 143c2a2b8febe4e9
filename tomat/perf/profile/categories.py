"""Classifies an operation by its work: one category, one part of the model, one direction.

Evidence, strongest first: the HLO opcode; the opcodes inside a fused computation; the Python call stack and the scope
path of the inner instructions, weighted by their work; the direction of the loop body that contains the kernel. Names
of operations decide only when a trace holds nothing else.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from tomat.perf.profile.breakdown import Category, Direction, Part
from tomat.perf.profile.hlo import CONTROL_OPCODES, FREE_OPCODES, Frame, HloProgram
from tomat.perf.profile.hlo_costs import COLLECTIVES, base_opcode, instruction_flops
from tomat.perf.profile.hlo_kernels import executed_kernels

MOVEMENT = frozenset(
    {"copy", "transpose", "reshape", "bitcast", "bitcast-convert", "convert", "broadcast", "slice", "dynamic-slice",
     "dynamic-update-slice", "concatenate", "pad", "reverse", "gather", "iota", "tuple", "get-tuple-element",
     "parameter", "constant", "partition-id", "replica-id", "opt-barrier"}
)  # fmt: skip
"""A kernel of only these opcodes computes nothing: it moves data, converts types or changes layouts."""

PRODUCTS = frozenset({"dot", "convolution", "ragged-dot", "scaled-dot"})
HOST_OPCODES = frozenset({"infeed", "outfeed", "send", "recv"})
HOST_CALLS = re.compile(r"callback|MoveToHost|MoveToDevice|HostExecute|host_compute", re.IGNORECASE)
MATMUL_CALLS = re.compile(r"gemm|matmul|cublas|onednn|__cudnn\$conv|scaled_dot$", re.IGNORECASE)
ATTENTION_CALLS = re.compile(r"fmha|sdpa|cudnn::fusion|flash_?attention|splash", re.IGNORECASE)
NO_CODE_CALLS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape",
     "SPMDShardToFullShape"}
)  # fmt: skip
"""Custom calls for which no machine code is generated."""

# Scopes on the path that JAX records (`op_name`); the innermost component that matches decides. `online-softmax` is the
# whole path of the kernel that libtpu 0.0.46 makes of attention's softmax and the product with the values.
PATH_RULES: tuple[tuple[re.Pattern[str], Part], ...] = (
    (re.compile(r"optimizer|optax|adam|apply_updates|clip_by_global_norm", re.IGNORECASE), Part.OPTIMIZER),
    (re.compile(r"dot_product_attention|splash|flash_attention|softmax_attention|attn_core|_attention_kernel|"
                r"^online-softmax$", re.IGNORECASE), Part.ATTENTION_CORE),
    (re.compile(r"log_softmax|loss|cross_entropy|logsumexp|lm_head|crps|(^|_)emd(_|$)", re.IGNORECASE), Part.LOSS),
    (re.compile(r"rms_?norm|layer_?norm|rotary|rope", re.IGNORECASE), Part.NORM_ROTARY),
    (re.compile(r"embedding|^embed$", re.IGNORECASE), Part.EMBEDDING),
    (re.compile(r"mlp|feed_?forward|ffn", re.IGNORECASE), Part.MLP),
    (re.compile(r"attention|_compute_qkv|(^|_)[qkvo]_proj", re.IGNORECASE), Part.ATTENTION_PROJECTIONS),
    (re.compile(r"decoder_?layer|transformer|block$|scan\(layer", re.IGNORECASE), Part.LAYER_OTHER),
)  # fmt: skip

# Rules for call frames, which are tried innermost first: (file, function, part). Files show what scopes do not:
# normalisation and rotary code runs under the scope of its caller. A rule without a file matches any file. Older
# programs have the former paths of tomat's loss and attention in their frames, so these are listed too.
FRAME_RULES: tuple[tuple[re.Pattern[str], re.Pattern[str], Part], ...] = tuple(
    (re.compile(file), re.compile(function, re.IGNORECASE), part)
    for file, function, part in (
        (r"/optax/", r"", Part.OPTIMIZER),
        (r"levanter/optim/", r"", Part.OPTIMIZER),
        (r"normalization\.py$", r"norm|standardize", Part.NORM_ROTARY),  # the same file holds softmax
        (r"rotary\.py$", r"", Part.NORM_ROTARY),
        (r"tomat/(model/loss/|loss/|training/loss)\w*\.py$", r"", Part.LOSS),
        (r"levanter/models/loss\.py$", r"", Part.LOSS),
        (r"fused_cross_entropy", r"", Part.LOSS),
        (r"splash_attention", r"", Part.ATTENTION_CORE),
        (r"flash_attention", r"", Part.ATTENTION_CORE),
        (r"tomat/(model|training)/splash\.py$", r"", Part.ATTENTION_CORE),
        (r"tomat/model/(flash|causal_blocks|cudnn)\.py$", r"", Part.ATTENTION_CORE),
        (r"tomat/(model|training)/attention\.py$", r"_attend|flash|_blockwise", Part.ATTENTION_CORE),
        (r"", r"dot_product_attention|softmax_attention", Part.ATTENTION_CORE),
        (r"", r"rms_?norm|layer_?norm|rotary|_rotate_half", Part.NORM_ROTARY),
        (r"", r"cross_entropy|log_softmax|logsumexp|next_token_loss", Part.LOSS),
        (r"/embedding\.py$", r"", Part.EMBEDDING),
        (r"", r"embedding\.embed|^embed$", Part.EMBEDDING),
        (r"", r"mlp|feed_?forward", Part.MLP),
        (r"attention\.py$", r"", Part.ATTENTION_PROJECTIONS),
        (r"", r"decoderlayer", Part.LAYER_OTHER),
    )
)
EARLY_PARTS = frozenset({Part.OPTIMIZER, Part.NORM_ROTARY, Part.ATTENTION_CORE, Part.LOSS})
"""Parts that a call frame decides before the scope path is used."""


@dataclass(frozen=True)
class Evidence:
    """One scope of an operation: its path, its call stack (innermost first), and the weight of its work."""

    op_name: str
    frames: tuple[Frame, ...]
    weight: float


@dataclass(frozen=True)
class Classified:
    category: Category
    part: Part
    direction: Direction


def path_components(op_name: str) -> list[str]:
    """The scopes of an `op_name`, outermost first, with `jit(f)` and the like unwrapped: `jit(silu)` -> `silu`."""
    components = []
    for piece in op_name.split(";")[0].split("/"):
        while match := re.fullmatch(r"(?:jit|pjit|jvp|transpose|vmap|remat|checkpoint|custom_[a-z]+)\((.*)\)", piece):
            piece = match.group(1)
        # haliax names a contraction by its axes ("contract embed -> batch, position"), which are not scopes
        if piece and not piece.startswith("contract "):
            components.append(piece)
    return components


def part_of(op_name: str, frames: tuple[Frame, ...]) -> Part:
    """The part of the model that a scope path and a call stack point to."""
    framed = _part_of_frames(frames)
    if framed in EARLY_PARTS:
        return framed
    components = path_components(op_name)
    for component in reversed(components[:-1] or components):
        for pattern, part in PATH_RULES:
            if pattern.search(component):
                return part
    return framed


def _part_of_frames(frames: tuple[Frame, ...]) -> Part:
    for frame in frames:
        for file, function, part in FRAME_RULES:
            if file.search(frame.file) and function.search(frame.function):
                return part
    return Part.OUTSIDE


def direction_of(op_name: str) -> Direction:
    if "rematted_computation" in op_name:
        return Direction.RECOMPUTE
    if "transpose(" in op_name or re.search(r"_(dq|dkv|bwd)(_|\b)", op_name):
        return Direction.BACKWARD
    return Direction.FORWARD if "jvp(" in op_name else Direction.NONE


def classify(
    opcode: str,
    inner_opcodes: frozenset[str],
    evidence: list[Evidence],
    custom_call_target: str = "",
    surrounding: Direction = Direction.NONE,
) -> Classified:
    """Category, part and direction of one operation. `inner_opcodes` are the opcodes inside a fusion, or else the
    operation's own. `surrounding` is the direction of the computation that contains it. It tells a recomputed forward
    kernel from the first one, because Pallas kernels lose the transforms in their path."""
    # The part and the direction with most of the work.
    parts: dict[Part, float] = defaultdict(float)
    directions: dict[Direction, float] = defaultdict(float)
    for item in evidence:
        parts[part_of(item.op_name, item.frames)] += item.weight
        directions[direction_of(item.op_name)] += item.weight
    informative = {p: w for p, w in parts.items() if p != Part.OUTSIDE} or parts
    known = {d: w for d, w in directions.items() if d != Direction.NONE} or directions
    part = max(informative, key=lambda p: (informative[p], p.value), default=Part.OUTSIDE)
    direction = max(known, key=lambda d: (known[d], d.value), default=Direction.NONE)
    if surrounding in (Direction.BACKWARD, Direction.RECOMPUTE) and direction in (Direction.NONE, Direction.FORWARD):
        direction = Direction.RECOMPUTE
    elif direction == Direction.NONE:
        direction = surrounding
    if part == Part.OPTIMIZER:
        direction = Direction.NONE
    return Classified(_category(opcode, inner_opcodes, part, direction, custom_call_target), part, direction)


def _category(opcode: str, inner: frozenset[str], part: Part, direction: Direction, target: str) -> Category:
    work = {base_opcode(o) for o in inner} - FREE_OPCODES
    products = work & PRODUCTS
    if base_opcode(opcode) in COLLECTIVES or (work & COLLECTIVES and not products):
        return Category.COLLECTIVES_EXPOSED
    if base_opcode(opcode) in HOST_OPCODES or work & HOST_OPCODES or HOST_CALLS.search(target):
        return Category.HOST
    if opcode in CONTROL_OPCODES:
        return Category.CONTROL
    if target in NO_CODE_CALLS or opcode in FREE_OPCODES:
        return Category.COPIES
    if part == Part.EMBEDDING:
        return Category.EMBEDDING
    if work and work <= MOVEMENT:
        return Category.COPIES
    if part == Part.OPTIMIZER:
        return Category.OPTIMIZER
    if part == Part.LOSS:
        return Category.LOSS
    if part == Part.ATTENTION_CORE or ATTENTION_CALLS.search(target):
        return Category.ATTENTION_BACKWARD if direction == Direction.BACKWARD else Category.ATTENTION_FORWARD
    if products or MATMUL_CALLS.search(target):
        return Category.MATMUL
    if part == Part.NORM_ROTARY:
        return Category.NORM_ROTARY
    return Category.CUSTOM_KERNELS if opcode == "custom-call" else Category.ELEMENTWISE


def computation_directions(program: HloProgram) -> dict[int, Direction]:
    """The direction of each loop body or called computation, for all that runs in it. A loop over microbatches holds
    forward and backward passes and has no direction."""
    found: dict[int, Direction] = {}
    for computation_id, instructions in program.computations.items():
        # A constant that XLA moved into a loop keeps the path of another use: the reference's forward scan holds
        # constants of its backward pass.
        paths = [i.op_name for i in instructions if i.op_name and i.opcode not in FREE_OPCODES]
        around = Counter(direction_of(path.rsplit("/while/body", 1)[0]) for path in paths if "/while/body" in path)
        within = {direction_of(path) for path in paths} - {Direction.NONE}
        direction = Direction.NONE
        if around and computation_id != program.entry_id:
            direction = around.most_common(1)[0][0]
            direction = Direction.BACKWARD if direction == Direction.RECOMPUTE else direction
        elif computation_id != program.entry_id and within:
            if within == {Direction.FORWARD}:
                direction = Direction.FORWARD
            elif len(instructions) > 1 and Direction.FORWARD not in within:
                direction = Direction.BACKWARD
        found[computation_id] = direction
    return found


def classify_program(program: HloProgram) -> dict[str, Classified]:
    """The class of every instruction of a program that can run as a kernel, by instruction name, from its own evidence
    alone. `directions.settled` decides what only the sums over a pass can tell."""
    surrounding = computation_directions(program)
    verdicts: dict[str, Classified] = {}
    for kernel in executed_kernels(program):
        instruction = kernel.instruction
        inner = program.inner(instruction)
        # The scopes of its inner instructions, weighted by their flops, or by their elements if those are more.
        evidence = []
        for one in inner:
            names_a_buffer = one.opcode in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
            if (one.op_name or one.frame_id) and not names_a_buffer:
                weight = max(instruction_flops(program, one), float(one.shape.elements))
                evidence.append(Evidence(one.op_name, program.frames(one), weight))
        if not evidence and (instruction.op_name or instruction.frame_id):
            evidence.append(Evidence(instruction.op_name, program.frames(instruction), 1.0))
        target = next((i.custom_call_target for i in (instruction, *inner) if i.custom_call_target), "")
        paths = " ".join(e.op_name for e in evidence)
        around = surrounding[instruction.computation_id]
        if around == Direction.BACKWARD and direction_of(paths) == Direction.BACKWARD:
            around = Direction.NONE
        opcodes = frozenset(i.opcode for i in inner)
        verdicts[instruction.name] = classify(instruction.opcode, opcodes, evidence, target, around)
    return verdicts
