from pathlib import Path

import pytest
from hlo_text import program_of

from tomat.hardware.chips import CHIPS, slice_named
from tomat.perf.cost.roofline import (
    MatrixProduct,
    RooflineTime,
    matrix_products,
    mxu_seconds,
    padded_bytes,
    roofline_seconds,
)
from tomat.perf.profile.hlo_costs import instruction_flops
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.profile.hlo_kernels import executed_kernels

V6E_4 = slice_named("v6e-4")
PROFILES = Path(__file__).parents[2] / "fixtures" / "profiles"


def roofline(entry: str, *computations: str) -> RooflineTime | None:
    program = program_of(entry, *computations, how="num_partitions=4")
    return roofline_seconds(program, program.by_name["y"], V6E_4)


def test_a_wide_product_is_bound_by_the_matrix_units():
    found = roofline(
        "  a = bf16[8192,8192]{1,0:T(8,128)(2,1)} parameter(0)\n"
        "  ROOT y = bf16[8192,8192]{1,0:T(8,128)(2,1)} dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    )
    assert found is not None
    assert found.seconds == found.mxu_seconds == pytest.approx(2 * 8192**3 / 918e12)
    assert found.hbm_seconds == pytest.approx(2 * 8192**2 * 2 / 1638e9)  # the operand once, the result once


def test_vmem_moves_no_hbm_bytes_and_padding_moves_them_twice():
    body = (
        "  a = f32[4096,64]{1,0:T(8,128)} parameter(0)\n  b = f32[4096,64]{1,0:T(8,128)S(1)} parameter(1)\n"
        "  ROOT y = f32[4096,64]{1,0:T(8,128)} add(a, b)"
    )
    found = roofline(body)
    assert found is not None
    assert found.seconds == found.hbm_seconds
    assert found.hbm_seconds == pytest.approx(2 * 4096 * 128 * 4 / 1638e9)
    # 512 registers of 8 x 128, four a cycle
    assert found.vpu_seconds == pytest.approx(512 / 4 / 1.75e9)


FUSED = """
read {
  a = bf16[512,2048]{1,0} parameter(0)
  i = s32[] parameter(1)
  zero = s32[] constant(0)
  none = bf16[] constant(0)
  padded = bf16[512,4096]{1,0} pad(a, none), padding=0_0x0_2048
  ROOT part = bf16[512,128]{1,0} dynamic-slice(padded, zero, i), dynamic_slice_sizes={512,128}
}
window {
  a = bf16[512,2048]{1,0} parameter(0)
  w = bf16[128,256]{1,0} parameter(1)
  i = s32[] parameter(2)
  part = bf16[512,128]{1,0} fusion(a, i), kind=kLoop, calls=read
  ROOT d = bf16[512,256]{1,0} dot(part, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_a_slice_inside_a_nested_fusion_reads_its_slice():
    found = roofline(
        "  a = bf16[512,2048]{1,0} parameter(0)\n  w = bf16[128,256]{1,0} parameter(1)\n  i = s32[] parameter(2)\n"
        "  ROOT y = bf16[512,256]{1,0} fusion(a, w, i), kind=kOutput, calls=window",
        FUSED,
    )
    assert found is not None
    # half of what the slice takes of the padded array is real; the index is four bytes
    moved = 512 * 128 * 2 / 2 + 128 * 256 * 2 + 512 * 256 * 2 + 4
    assert found.hbm_seconds == pytest.approx(moved / 1638e9)


def test_the_compilers_estimate_of_a_step_is_above_the_roofline():
    program = load_program(PROFILES / "v6e_step.hlo.pb.gz")
    estimated = bound = products = 0.0
    for kernel in executed_kernels(program):
        cycles = kernel.instruction.estimated_cycles
        found = roofline_seconds(program, kernel.instruction, V6E_4)
        if cycles is not None and found is not None:
            estimated += kernel.executions * cycles / 1.75e9
            bound += kernel.executions * found.seconds
            flops = sum(2.0 * p.batch * p.m * p.n * p.k for p in matrix_products(program, kernel.instruction))
            products += kernel.executions * flops / 918e12
    # The fixture's kernels take microseconds; on the 200M step the estimate is 2.15 of the roofline.
    assert products < bound < estimated


V6E = CHIPS["v6e"]


def flops(product: MatrixProduct) -> float:
    """Without padding, two a multiply-add."""
    return 2.0 * product.batch * product.m * product.n * product.k


def product_of(operation: str, a: str, b: str) -> MatrixProduct:
    program = program_of(f"  a = {a} parameter(0)\n  b = {b} parameter(1)\n  ROOT y = {operation}")
    (product,) = matrix_products(program, program.by_name["y"])
    assert flops(product) == instruction_flops(program, program.by_name["y"])
    return product


def test_products_of_int8_run_at_the_int8_peak_where_there_is_one():
    operation = "s32[1024,4096]{1,0} dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    narrow = product_of(operation, "s8[1024,1024]{1,0}", "s8[1024,4096]{1,0}")
    assert narrow == MatrixProduct(1, 1024, 4096, 1024, 8, "int8")
    assert mxu_seconds([narrow], V6E) == pytest.approx(flops(narrow) / 1836e12)
    assert mxu_seconds([narrow], CHIPS["tpu7x"]) == pytest.approx(flops(narrow) / (2307e12 / 2))
    # One operand in 8 bits is multiplied as bfloat16 is, and so are, on this chip, floats of 8 bits and of 32.
    for a, b, kind in (("s8", "bf16", "bf16"), ("f8e4m3fn", "f8e4m3fn", "fp8"), ("f32", "f32", "f32")):
        other = product_of(operation.replace("s32", "f32"), f"{a}[1024,1024]{{1,0}}", f"{b}[1024,4096]{{1,0}}")
        assert other.operands == kind
        assert flops(other) == flops(narrow)
        assert mxu_seconds([other, narrow], V6E) == pytest.approx(flops(narrow) * (1 / 918e12 + 1 / 1836e12))


# How XLA:TPU writes three products of a transformer as convolutions (dimension labels of the 1B step on v6e-32).
CONVOLUTIONS = {
    "rows and features": (
        "bf16[64,256]{1,0} convolution(a, b), dim_labels=bf_io->bf",
        "bf16[64,128]{1,0}", "bf16[128,256]{1,0}", MatrixProduct(1, 64, 256, 128, 16),
    ),
    "a window of one over rows": (
        "bf16[8,32,256]{2,1,0} convolution(a, b), window={size=1}, dim_labels=b0f_0io->b0f",
        "bf16[8,32,128]{2,1,0}", "bf16[1,128,256]{2,1,0}", MatrixProduct(1, 8 * 32, 256, 128, 16),
    ),
    "heads of one kernel that share the input: columns": (
        "bf16[64,16,256]{2,1,0} convolution(a, b), window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=b0f_0io->b0f",
        "bf16[64,1,128]{2,1,0}", "bf16[16,128,256]{2,1,0}", MatrixProduct(1, 64, 16 * 256, 128, 16),
    ),
    "heads on both sides: a batch": (
        "bf16[64,16,256]{2,1,0} convolution(a, b), window={size=16 stride=15 pad=15_15 lhs_dilate=16 rhs_reversal=1}, "
        "dim_labels=b0f_0io->b0f",
        "bf16[64,16,128]{2,1,0}", "bf16[16,128,256]{2,1,0}", MatrixProduct(16, 64, 256, 128, 16),
    ),
    "heads contracted": (
        "bf16[64,1,256]{2,1,0} convolution(a, b), window={size=16}, dim_labels=b0f_0io->b0f",
        "bf16[64,16,128]{2,1,0}", "bf16[16,128,256]{2,1,0}", MatrixProduct(1, 64, 256, 16 * 128, 16),
    ),
    "int8, as the projections of a model with int8 products": (
        "s32[64,256]{1,0} convolution(a, b), dim_labels=bf_oi->bf",
        "s8[64,128]{1,0}", "s8[256,128]{1,0}", MatrixProduct(1, 64, 256, 128, 8, "int8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_written_as_convolutions(name):
    operation, a, b, expected = CONVOLUTIONS[name]
    assert product_of(operation, a, b) == expected


def test_full_tiles_run_at_the_peak_and_a_thin_contraction_at_a_quarter():
    full = MatrixProduct(1, 65536, 4096, 1024, 16)
    assert full.padded_flops(256) == flops(full)
    assert mxu_seconds([full], V6E) == pytest.approx(flops(full) / 918e12)
    # the windowed einsum of weights sharded over 16 chips: a contraction of 1024 / 16
    thin = MatrixProduct(1, 65536, 4096, 64, 16)
    assert thin.padded_flops(256) == 4 * flops(thin)
    # the same on the 128 x 128 units of v5e
    assert thin.padded_flops(128) == 2 * flops(thin)


def test_tiles_of_a_layout():
    shapes = {
        "f32[16,64]{1,0:T(8,128)}": 16 * 128 * 4,
        "bf16[3,100,64]{2,1,0:T(8,128)(2,1)}": 3 * 104 * 128 * 2,
        "bf16[3,100,64]{1,2,0:T(8,128)(2,1)}": 3 * 64 * 128 * 2,
        "f32[5]{0:T(128)}": 512,
        "f32[16,64]{1,0}": 16 * 64 * 4,
        "f32[16,64]{1,0:T(8,128)S(1)}": 0,
        "(f32[8,128]{1,0:T(8,128)}, s32[])": 4096 + 4,
    }
    parameters = "\n".join(f"  p{k} = {shape} parameter({k})" for k, shape in enumerate(shapes))
    program = program_of(f"{parameters}\n  ROOT r = f32[5]{{0}} copy(p3)")
    found = [padded_bytes(program.by_name[f"p{k}"].proto.shape, 0) for k in range(len(shapes))]
    assert found == list(shapes.values())
