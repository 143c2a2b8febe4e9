"""The least time a kernel can take on a chip: matrix units, memory, vector units and interconnect, each at its peak.

The second of the cycle models (the first is the compiler's own estimate, the third its VLIW schedule). Work is counted
as the chip does it: products padded to the matrix unit, arrays padded to their tiles; bytes only of buffers in HBM, and
of what a slice or an update in place touches. The largest of the four is the time, and names what binds.
"""

from __future__ import annotations

from dataclasses import dataclass

from tomat.hardware.chip_table import Chip
from tomat.hardware.chips import Slice
from tomat.perf.cost.interconnect import collective_seconds
from tomat.perf.cost.tiles import LANES, SUBLANES, matrix_products, mxu_seconds, padded_bytes, padded_elements
from tomat.perf.profile.hlo import CONTROL_OPCODES, HBM_MEMORY_SPACE, HloProgram, Instruction
from tomat.perf.profile.hlo_costs import (
    ELEMENTWISE,
    TRANSCENDENTAL,
    base_opcode,
    kernel_flops,
    kernel_hbm_bytes,
)

VECTOR_SLOTS = 4
"""Arithmetic instructions a TensorCore issues to its vector unit in a cycle, each on one register of 8 x 128 elements
(https://jax-ml.github.io/scaling-book/tpus, appendix A)."""
TRANSCENDENTAL_SLOTS = 1
"""The same for exponentials, logarithms and roots: the bundles of an LLO dump have one `EUP` slot."""


@dataclass(frozen=True)
class RooflineTime:
    """Seconds of one execution, by what would bind if all else were free."""

    mxu_seconds: float
    hbm_seconds: float
    vpu_seconds: float
    ici_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """The largest."""
        return max(self.mxu_seconds, self.hbm_seconds, self.vpu_seconds, self.ici_seconds)


def roofline_seconds(program: HloProgram, instruction: Instruction, slice_: Slice) -> RooflineTime | None:
    """The roofline of one execution.

    Args:
        program: The optimised module.
        instruction: A kernel of it.
        slice_: The TPUs it runs on.

    None for kernels whose work HLO does not tell (Pallas calls).
    """
    chip = slice_.chip
    assert chip.hbm_bytes_per_second is not None  # of every TPU
    if instruction.opcode in CONTROL_OPCODES:
        return RooflineTime(0.0, 0.0, 0.0)
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
    """HBM traffic of one execution, padding included.

    `kernel_hbm_bytes` knows what slices touch but not tiles: its bytes are scaled by the padding of the kernel's arrays
    in HBM taken together.
    """
    if instruction.opcode == "async-start":
        # Its shape repeats the operands; what moves is what the wrapped operations read and write.
        inner = [i for i in program.inner(instruction) if i.opcode not in ("parameter", "tuple")]
        return sum(padded_hbm_bytes(program, i) for i in inner if i is not instruction)
    moved = kernel_hbm_bytes(program, instruction)
    arrays = [instruction, *program.operands(instruction)]
    logical = sum(array.shape.byte_count(HBM_MEMORY_SPACE) for array in arrays)
    padded = sum(padded_bytes(array.proto.shape, HBM_MEMORY_SPACE) for array in arrays)
    return moved * padded / logical if logical else moved


def vpu_seconds(program: HloProgram, instruction: Instruction, chip: Chip) -> float:
    """Time of the elementwise operations and reductions, one instruction a register of 32-bit elements.

    A lower bound: conversions, moves between lanes, addresses and masks come on top.
    """
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
