"""How arrays and matrix products pad to the tiles that a TPU works in.

An array in memory is cut into tiles of its layout, for 32-bit types (8, 128): 8 sublanes of 128 lanes, a vector
register (https://openxla.org/xla/tiled_layout; https://cloud.google.com/tpu/docs/v6e says 128 lanes x 8 sublanes). A
matrix unit holds one square tile of an operand and streams the rows of the other through it
(https://jax-ml.github.io/scaling-book/tpus, appendix B): the held dimensions pad to its side.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from tomat.hardware.chip_table import Chip, Operand
from tomat.perf.profile.hlo import PRIMITIVE_TYPES, UNKNOWN_TYPE, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import instruction_flops, product_operands, valid_positions

SUBLANES, LANES = 8, 128


def rounded_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def padded_elements(shape: Any) -> int:
    """Elements of an array's `ShapeProto` with its dimensions rounded up to the tiles of its layout."""
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
    """Of one element of the wider operand."""
    operands: Operand = "bf16"
    """Of both."""

    def padded_flops(self, side: int) -> float:
        """What a systolic array of `side` x `side` goes through: the cheaper of holding either operand.

        The held tile is `side` x `side`; rows stream in packed sublanes, and no fewer than `side` of them hide the
        loading of the next tile, which takes as many.
        """
        rows = SUBLANES * max(1, 32 // self.bits)

        def cost(streamed: int, held: int) -> float:
            return 2.0 * self.batch * max(side, rounded_up(streamed, rows)) * rounded_up(held, side)

        return min(cost(self.m, self.n), cost(self.n, self.m)) * rounded_up(self.k, side)


def matrix_products(program: HloProgram, instruction: Instruction) -> list[MatrixProduct]:
    """The dots and convolutions inside a kernel."""
    products = []
    for inner in program.inner(instruction):
        if inner.opcode == "dot":
            products.append(_of_dot(program, inner))
        elif inner.opcode == "convolution":
            products.append(_of_convolution(program, inner))
    return products


def _of_dot(program: HloProgram, dot: Instruction) -> MatrixProduct:
    left, right = (operand.shape for operand in program.operands(dot)[:2])
    numbers = dot.proto.dot_dimension_numbers
    batch = prod(left.dims[i] for i in numbers.lhs_batch_dimensions)
    k = prod(left.dims[i] for i in numbers.lhs_contracting_dimensions)
    held = max(1, batch * k)
    return MatrixProduct(
        batch,
        left.elements // held,
        right.elements // held,
        k,
        max(left.bits, right.bits),
        product_operands(program, dot),
    )


def _of_convolution(program: HloProgram, convolution: Instruction) -> MatrixProduct:
    """XLA:TPU writes every product as a convolution; its windows carry what are no rows, columns or features.

    Along a window dimension of size one every output position is a row. Where each output position meets one of many
    kernel positions, the dimension is a batch if the input has one too, and more columns if the input is shared. Where
    it meets several, they are summed.
    """
    left, kernel = (operand.shape for operand in program.operands(convolution)[:2])
    numbers = convolution.proto.convolution_dimension_numbers
    n = kernel.dims[numbers.kernel_output_feature_dimension]
    batch = 1
    for axis, window in enumerate(convolution.proto.window.dimensions):
        size_in = left.dims[numbers.input_spatial_dimensions[axis]]
        size_out = convolution.shape.dims[numbers.output_spatial_dimensions[axis]]
        if max(1, window.size) > 1 and valid_positions(window, size_in, size_out) <= size_out:
            batch, n = (batch, n * size_out) if size_in == 1 else (batch * size_out, n)
    elements = convolution.shape.elements
    k = round(instruction_flops(program, convolution) / (2 * elements)) if elements else 0
    bits = max(left.bits, kernel.bits)
    return MatrixProduct(
        batch, elements // max(1, n * batch), n, max(1, k), bits, product_operands(program, convolution)
    )


def mxu_seconds(products: list[MatrixProduct], chip: Chip) -> float:
    """Time of the products at a TPU's peak for their operands, padding included.

    float32 operands count as bf16, to which XLA's default precision rounds them; where no source states a peak for int8
    (TPU7x), that of bf16 is an upper bound of their time (`Chip.peak_of`).
    """
    assert chip.mxu_shape is not None  # of every TPU
    return sum(product.padded_flops(chip.mxu_shape[0]) / chip.peak_of(product.operands) for product in products)
