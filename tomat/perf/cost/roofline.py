"""The least time a kernel can take on a chip: matrix units, memory, vector units and interconnect, each at its peak.

This is the second of the cycle models (the first is the compiler's own estimate, the third its VLIW schedule). Work is
counted as the chip does it: products padded to the matrix unit, arrays padded to their tiles. Only bytes of buffers in
HBM count; for a slice or an update in place, only the bytes that it touches. The largest of the four is the time.

An array in memory is cut into tiles of its layout, for 32-bit types (8, 128): 8 sublanes of 128 lanes, a vector
register (https://openxla.org/xla/tiled_layout; https://cloud.google.com/tpu/docs/v6e says 128 lanes x 8 sublanes). A
matrix unit holds one square tile of an operand and streams the rows of the other through it
(https://jax-ml.github.io/scaling-book/tpus, appendix B): the held dimensions pad to its side.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

from tomat.hardware.chip_table import Chip, Operand
from tomat.hardware.chips import Slice
from tomat.perf.cost.interconnect import collective_seconds
from tomat.perf.profile.hlo import HBM_MEMORY_SPACE, PRIMITIVE_TYPES, UNKNOWN_TYPE, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import (
    ELEMENTWISE,
    TRANSCENDENTAL,
    base_opcode,
    instruction_flops,
    kernel_flops,
    kernel_hbm_bytes,
    product_operands,
    valid_positions,
)

SUBLANES, LANES = 8, 128


def rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded_elements(shape: Any) -> int:
    """Elements of an array's `ShapeProto`, with dimensions rounded up to the tiles of its layout."""
    dims = [shape.dimensions[axis] for axis in reversed(shape.layout.minor_to_major)] or list(shape.dimensions)
    if shape.layout.tiles:
        tile = shape.layout.tiles[0].dimensions
        dims = [1] * (len(tile) - len(dims)) + dims
        for place in range(1, len(tile) + 1):
            dims[-place] = rounded_up(dims[-place], tile[-place])
    return prod(dims)


def padded_bytes(shape: Any, memory_space: int) -> int:
    """Bytes, padding included, of the arrays of a `ShapeProto` that lie in `memory_space`."""
    if shape.tuple_shapes:
        return sum(padded_bytes(part, memory_space) for part in shape.tuple_shapes)
    if shape.layout.memory_space != memory_space:
        return 0
    return padded_elements(shape) * PRIMITIVE_TYPES.get(shape.element_type, UNKNOWN_TYPE)[1] // 8


@dataclass(frozen=True)
class MatrixProduct:
    """`batch` independent products [m, k] x [k, n]."""

    batch: int
    m: int
    n: int
    k: int
    bits: int
    """Bits of an element of the wider operand."""
    operands: Operand = "bf16"

    def padded_flops(self, side: int) -> float:
        """Flops, padding included, on a systolic array of `side` x `side` that holds the cheaper of the two operands.

        The held tile is `side` x `side`. Rows stream in packed sublanes. At least `side` rows are needed to hide the
        loading of the next tile, which takes as many.
        """
        rows = SUBLANES * max(1, 32 // self.bits)

        def cost(streamed: int, held: int) -> float:
            return 2.0 * self.batch * max(side, rounded_up(streamed, rows)) * rounded_up(held, side)

        return min(cost(self.m, self.n), cost(self.n, self.m)) * rounded_up(self.k, side)


def matrix_products(program: HloProgram, instruction: Instruction) -> list[MatrixProduct]:
    """The products in a kernel.

    XLA:TPU writes every product as a convolution. Dimensions other than rows, columns and features are in its windows.
    Along a window dimension of size one, every output position is a row. If each output position meets one of many
    kernel positions, the dimension is a batch if the input has it too, and more columns if the input is shared. If it
    meets several, they are summed.
    """
    products = []
    for inner in program.inner(instruction):
        if inner.opcode not in ("dot", "convolution"):
            continue
        left, right = (operand.shape for operand in program.operands(inner)[:2])
        bits, operands = max(left.bits, right.bits), product_operands(program, inner)
        if inner.opcode == "dot":
            numbers = inner.proto.dot_dimension_numbers
            batch = prod(left.dims[i] for i in numbers.lhs_batch_dimensions)
            k = prod(left.dims[i] for i in numbers.lhs_contracting_dimensions)
            held = max(1, batch * k)
            products.append(MatrixProduct(batch, left.elements // held, right.elements // held, k, bits, operands))
            continue
        numbers = inner.proto.convolution_dimension_numbers
        n = right.dims[numbers.kernel_output_feature_dimension]
        batch = 1
        for axis, window in enumerate(inner.proto.window.dimensions):
            size_in = left.dims[numbers.input_spatial_dimensions[axis]]
            size_out = inner.shape.dims[numbers.output_spatial_dimensions[axis]]
            if max(1, window.size) > 1 and valid_positions(window, size_in, size_out) <= size_out:
                batch, n = (batch, n * size_out) if size_in == 1 else (batch * size_out, n)
        elements = inner.shape.elements
        k = round(instruction_flops(program, inner) / (2 * elements)) if elements else 0
        products.append(MatrixProduct(batch, elements // max(1, n * batch), n, max(1, k), bits, operands))
    return products


def mxu_seconds(products: list[MatrixProduct], chip: Chip) -> float:
    """Time of the products at a TPU's peak for their operands (`Chip.peak_of`), padding included. float32 operands
    count as bf16, because XLA's default precision rounds them to it."""
    assert chip.mxu_shape is not None  # true for every TPU
    return sum(product.padded_flops(chip.mxu_shape[0]) / chip.peak_of(product.operands) for product in products)


VECTOR_SLOTS = 4
"""Arithmetic instructions that a TensorCore issues to its vector unit per cycle, each on one register of 8 x 128
elements (https://jax-ml.github.io/scaling-book/tpus, appendix A)."""
TRANSCENDENTAL_SLOTS = 1
"""The same for exponentials, logarithms and roots: the bundles of an LLO dump have one `EUP` slot."""


@dataclass(frozen=True)
class RooflineTime:
    """Seconds of one execution in each resource, as if all others were free."""

    mxu_seconds: float
    hbm_seconds: float
    vpu_seconds: float
    ici_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return max(self.mxu_seconds, self.hbm_seconds, self.vpu_seconds, self.ici_seconds)


def roofline_seconds(program: HloProgram, instruction: Instruction, slice_: Slice) -> RooflineTime | None:
    """The roofline of one execution of a kernel; None if the HLO does not state its work (Pallas calls)."""
    chip = slice_.chip
    assert chip.hbm_bytes_per_second is not None  # true for every TPU
    if kernel_flops(program, instruction) is None:
        return None
    transfer = collective_seconds(program, instruction, slice_)
    bandwidth = chip.hbm_bytes_per_second / chip.jax_devices_per_chip
    return RooflineTime(
        mxu_seconds=mxu_seconds(matrix_products(program, instruction), chip),
        hbm_seconds=padded_hbm_bytes(program, instruction) / bandwidth,
        vpu_seconds=vpu_seconds(program, instruction, chip),
        ici_seconds=transfer.seconds if transfer is not None else 0.0,
    )


def padded_hbm_bytes(program: HloProgram, instruction: Instruction) -> float:
    """HBM traffic of one execution, in bytes. `kernel_hbm_bytes` accounts for slices but not for tiles, so its result
    is scaled by the total padding of the kernel's arrays in HBM."""
    if instruction.opcode == "async-start":
        # Each wrapped operation has its own padding.
        return sum(padded_hbm_bytes(program, i) for i in program.inner(instruction) if i is not instruction)
    moved = kernel_hbm_bytes(program, instruction)
    arrays = [instruction, *program.operands(instruction)]
    logical = sum(array.shape.byte_count(HBM_MEMORY_SPACE) for array in arrays)
    padded = sum(padded_bytes(array.proto.shape, HBM_MEMORY_SPACE) for array in arrays)
    return moved * padded / logical if logical else moved


def vpu_seconds(program: HloProgram, instruction: Instruction, chip: Chip) -> float:
    """Time of the elementwise operations and reductions, with one instruction per register of 32-bit elements. It is a
    lower bound, without conversions, moves between lanes, addresses and masks."""
    if chip.clock_hz is None or base_opcode(instruction.opcode) != instruction.opcode:
        return 0.0
    arithmetic = transcendental = 0.0
    for inner in program.inner(instruction):
        if inner.opcode in ELEMENTWISE:
            arithmetic += padded_elements(inner.proto.shape)
        elif inner.opcode in TRANSCENDENTAL:
            transcendental += padded_elements(inner.proto.shape)
        elif inner.opcode == "reduce":
            arithmetic += padded_elements(program.operands(inner)[0].proto.shape)
    register = SUBLANES * LANES * (chip.n_cores or 1) / chip.jax_devices_per_chip * chip.clock_hz
    return max(arithmetic / VECTOR_SLOTS, transcendental / TRANSCENDENTAL_SLOTS) / register
