"""Floating-point operations and memory traffic of one execution of an HLO kernel, from shapes alone.

The conventions are those of XLA's ``HloCostAnalysis``, so that totals can be compared: a multiply-add is two
operations, an elementwise operation one per element, a reduction one per input element. Transcendentals are *not*
counted as flops. Memory traffic counts each operand and result once, and only buffers in HBM: a buffer in VMEM
(``S(1)``) moves no HBM bytes. For an operand that a fusion only slices, the slices count; for an update in place, the
update counts.
"""

import math

from tomat.hardware.chip_table import Operand
from tomat.hardware.flops import attention_pairs
from tomat.perf.profile.hlo import (
    CONTROL_OPCODES,
    FREE_OPCODES,
    HBM_MEMORY_SPACE,
    PRIMITIVE_TYPES,
    UNKNOWN_TYPE,
    HloProgram,
    Instruction,
)

TRANSCENDENTAL = frozenset(
    {"exponential", "exponential-minus-one", "log", "log-plus-one", "tanh", "tan", "sine", "cosine", "rsqrt", "sqrt",
     "cbrt", "logistic", "power", "atan2", "erf"}
)  # fmt: skip
ELEMENTWISE = frozenset(
    {"add", "subtract", "multiply", "divide", "maximum", "minimum", "negate", "abs", "compare", "select", "and", "or",
     "not", "xor", "clamp", "floor", "ceil", "round-nearest-afz", "round-nearest-even", "remainder", "sign",
     "shift-left", "shift-right-logical", "shift-right-arithmetic", "popcnt", "count-leading-zeros", "is-finite"}
)  # fmt: skip
COLLECTIVES = frozenset(
    {"all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
     "collective-broadcast"}
)  # fmt: skip


def base_opcode(opcode: str) -> str:
    """The opcode without the `-start`, `-update` or `-done` of its asynchronous halves."""
    for suffix in ("-start", "-update", "-done"):
        if opcode.endswith(suffix):
            return opcode.removesuffix(suffix)
    return opcode


def instruction_flops(program: HloProgram, instruction: Instruction) -> float:
    opcode, out = instruction.opcode, instruction.shape.elements
    if opcode == "dot":
        left = program.operands(instruction)[0].shape.dims
        contracted = math.prod([left[i] for i in instruction.proto.dot_dimension_numbers.lhs_contracting_dimensions])
        return 2.0 * out * contracted
    if opcode == "convolution":
        # Output elements x (kernel window positions that read real input) x input features per group. TPU matmuls are
        # convolutions. Those with a window (batched ones, windowed reductions) also read padding at the edges or
        # dilation holes, which do not count, so the valid positions are counted along each spatial dimension.
        left, kernel = program.operands(instruction)[:2]
        numbers = instruction.proto.convolution_dimension_numbers
        spatial_outputs = pairs = 1
        for axis, window in enumerate(instruction.proto.window.dimensions):
            size_out = instruction.shape.dims[numbers.output_spatial_dimensions[axis]]
            pairs *= valid_positions(window, left.shape.dims[numbers.input_spatial_dimensions[axis]], size_out)
            spatial_outputs *= size_out
        return 2.0 * (out / max(1, spatial_outputs)) * pairs * kernel.shape.dims[numbers.kernel_input_feature_dimension]
    if opcode == "custom-call":
        return library_flops(program, instruction) or 0.0
    if opcode in ELEMENTWISE:
        return float(out)
    if opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter"):
        operands = program.operands(instruction)
        return float(operands[-1].shape.elements if opcode == "scatter" else operands[0].shape.elements)
    if base_opcode(opcode) in ("all-reduce", "reduce-scatter") and not opcode.endswith("-done"):
        return float(sum(o.shape.elements for o in program.operands(instruction)))
    return 0.0


def valid_positions(window: object, size_in: int, size_out: int) -> int:
    """Pairs (output position, kernel position) along one dimension that meet an input element."""

    def get(name: str, default: int) -> int:
        return getattr(window, name) or default  # proto3 leaves ones as zero

    size, stride = get("size", 1), get("stride", 1)
    dilation, base = get("window_dilation", 1), get("base_dilation", 1)
    low = int(getattr(window, "padding_low", 0))
    reach = (size_in - 1) * base
    count = 0
    for kernel in range(size):
        offset = kernel * dilation - low
        # positions o with 0 <= o * stride + offset <= reach and divisible by the base dilation
        first = max(0, (stride - 1 - offset) // stride)
        last = min(size_out - 1, (reach - offset) // stride)
        common = math.gcd(stride, base)
        if offset % common == 0 and last >= first:
            period = base // common
            residue = -(offset // common) * pow(stride // common, -1, period) % period
            count += (last - residue) // period - (first - 1 - residue) // period
    return count


def kernel_flops(program: HloProgram, instruction: Instruction) -> float | None:
    """Flops of one execution of a kernel; None for an opaque custom call, whose work is not in the HLO."""
    if instruction.opcode in FREE_OPCODES or instruction.opcode in CONTROL_OPCODES:
        return 0.0
    if instruction.opcode.endswith(("-done", "-update")):
        return 0.0  # counted at the start
    if instruction.opcode == "custom-call":
        if (flops := library_flops(program, instruction)) is not None:
            return flops
        estimate = instruction.backend_config.get("custom_call_config", {}).get("cost_estimate", {})
        return float(estimate["flops"]) if "flops" in estimate else None
    return sum(instruction_flops(program, inner) for inner in program.inner(instruction))


def product_operands(program: HloProgram, product: Instruction) -> Operand:
    """The type of both operands of a dot, a convolution or a cuBLAS call, by which a chip's peak is chosen."""
    kinds: set[Operand] = set()
    for operand in program.operands(product)[:2]:
        name, _ = PRIMITIVE_TYPES.get(operand.proto.shape.element_type, UNKNOWN_TYPE)
        if name in ("s8", "u8"):
            kinds.add("int8")
        elif name.startswith("f8") and name != "f8e8m0fnu":
            kinds.add("fp8")
        else:
            kinds.add("f32" if name == "f32" else "bf16")  # a type without its own peak counts as bf16
    return kinds.pop() if len(kinds) == 1 else "bf16"


def kernel_operands(program: HloProgram, instruction: Instruction) -> Operand:
    """The operand type of most flops of a kernel's products; bf16 if the HLO shows no products."""
    flops: dict[Operand, float] = {"bf16": 0.0}
    for inner in program.inner(instruction):
        if inner.opcode in ("dot", "convolution", "custom-call"):
            kind = product_operands(program, inner)
            flops[kind] = flops.get(kind, 0.0) + instruction_flops(program, inner)
    return max(flops, key=lambda kind: flops[kind])


def library_flops(program: HloProgram, instruction: Instruction) -> float | None:
    """Flops of a call of cuBLAS or of cuDNN's attention, whose config describes what it replaced; None for any other.

    cuBLAS (`__cublas$gemm`, `__cublas$lt$matmul`): one dot. cuDNN (`__cudnn$fmhaSoftmax`): two products for each pair
    that the mask leaves, and five in the backward pass, which recomputes the scores.
    """
    config = instruction.backend_config
    if "gemm_backend_config" in config:
        numbers = config["gemm_backend_config"].get("dot_dimension_numbers", {})
        left = program.operands(instruction)[0].shape.dims
        contracted = math.prod([left[int(i)] for i in numbers.get("lhs_contracting_dimensions", [])])
        result = instruction.shape.parts[0] if instruction.shape.parts else instruction.shape
        return 2.0 * result.elements * contracted
    if "cudnn_fmha_backend_config" not in config:
        return None
    attention = config["cudnn_fmha_backend_config"]
    batch, heads, queries, keys = (int(size) for size in attention["intermediate_tensor_shape"]["dimensions"])
    pairs = queries * keys
    if "CAUSAL" in attention.get("mask_type", "") and queries == keys:
        pairs = attention_pairs(queries, "causal", int(attention.get("sliding_window_length", 0)) or None)
    products = 5 if "Backward" in instruction.custom_call_target else 2
    return 2.0 * products * batch * heads * pairs * program.operands(instruction)[0].shape.dims[-1]


def kernel_hbm_bytes(program: HloProgram, instruction: Instruction) -> float:
    """Bytes that one execution of a kernel reads from and writes to HBM."""
    opcode = instruction.opcode
    if opcode in FREE_OPCODES or opcode in CONTROL_OPCODES or opcode.endswith(("-done", "-update")):
        return 0.0
    operands = program.operands(instruction)
    if opcode == "async-start":  # its shape repeats the operands, so the wrapped instructions are counted
        inner = (one for one in program.inner(instruction) if one is not instruction)
        return sum(kernel_hbm_bytes(program, one) for one in inner)
    if opcode in ("all-gather-start", "collective-permute-start"):  # (operands, results, contexts)
        results = instruction.shape.parts[1] if instruction.shape.parts else instruction.shape
        read = {o.proto.id: o.shape.byte_count(HBM_MEMORY_SPACE) for o in operands}
        return float(results.byte_count(HBM_MEMORY_SPACE) + sum(read.values()))
    if opcode == "copy-start":  # (destination, source, context)
        written = instruction.shape.parts[0] if instruction.shape.parts else instruction.shape
        return float(written.byte_count(HBM_MEMORY_SPACE) + operands[0].shape.byte_count(HBM_MEMORY_SPACE))
    if opcode in ("dynamic-slice", "slice", "gather"):
        return float(_sliced(operands[0], instruction) + instruction.shape.byte_count(HBM_MEMORY_SPACE))
    if opcode == "dynamic-update-slice":
        return float(operands[1].shape.byte_count(HBM_MEMORY_SPACE) + _sliced(instruction, operands[1]))
    if opcode == "fusion":
        return _fusion_bytes(program, instruction, operands)
    total = instruction.shape.byte_count(HBM_MEMORY_SPACE)
    for operand in {o.proto.id: o for o in operands}.values():
        total += operand.shape.byte_count(HBM_MEMORY_SPACE)
    return float(total)


def _sliced(holder: Instruction, window: Instruction) -> int:
    """Bytes of `window` moved from or to the buffer of `holder`; 0 if that buffer is not in HBM."""
    in_hbm = holder.shape.byte_count(HBM_MEMORY_SPACE) > 0
    return window.shape.byte_count() if in_hbm else 0


def _users(program: HloProgram, computation_id: int) -> dict[int, list[Instruction]]:
    users: dict[int, list[Instruction]] = {}
    for instruction in program.computations[computation_id]:
        for operand_id in set(instruction.operand_ids):
            users.setdefault(operand_id, []).append(instruction)
    return users


def _touched_bytes(program: HloProgram, holder: Instruction, users: dict[int, list[Instruction]]) -> int | None:
    """Bytes of a fused parameter that its slices read, through bitcasts, padding and nested fusions; None: all."""
    reads = users.get(holder.proto.id, [])
    if not reads:
        return None
    total = 0
    for read in reads:
        if read.opcode in ("bitcast", "pad"):
            touched = _touched_bytes(program, read, users)
            if touched is not None and read.opcode == "pad":  # the padding in a slice is not read
                touched = touched * holder.shape.elements // max(1, read.shape.elements)
        elif read.opcode in ("dynamic-slice", "slice", "gather") and read.operand_ids[0] == holder.proto.id:
            touched = read.shape.byte_count()
        elif read.opcode == "dynamic-update-slice" and read.operand_ids[0] == holder.proto.id:
            touched = 0
        elif read.opcode == "fusion" and read.operand_ids.count(holder.proto.id) == 1:
            number = read.operand_ids.index(holder.proto.id)
            inner = next(
                i
                for i in program.computations[read.called_ids[0]]
                if i.opcode == "parameter" and i.proto.parameter_number == number
            )
            touched = _touched_bytes(program, inner, _users(program, read.called_ids[0]))
        else:
            touched = None
        if touched is None:
            return None
        total += touched
    return total


def _fusion_bytes(program: HloProgram, fusion: Instruction, operands: list[Instruction]) -> float:
    users = _users(program, fusion.called_ids[0])
    total = 0
    for parameter in program.computations[fusion.called_ids[0]]:
        if parameter.opcode != "parameter" or parameter.proto.parameter_number >= len(operands):
            continue
        operand = operands[parameter.proto.parameter_number]
        if operand.shape.byte_count(HBM_MEMORY_SPACE) == 0:
            continue
        touched = _touched_bytes(program, parameter, users)
        total += operand.shape.byte_count(HBM_MEMORY_SPACE) if touched is None else touched
    root = program.root(fusion.called_ids[0])
    results = program.operands(root) if root.opcode == "tuple" else [root]
    shapes = fusion.shape.parts or (fusion.shape,)
    for shape, result in zip(shapes, results, strict=False):
        if result.opcode == "dynamic-update-slice" and shape.memory_space == HBM_MEMORY_SPACE:
            total += program.operands(result)[1].shape.byte_count()
        else:
            total += shape.byte_count(HBM_MEMORY_SPACE)
    return float(total)
