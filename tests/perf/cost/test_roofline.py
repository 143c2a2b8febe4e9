from pathlib import Path

import pytest

from tomat.hardware.chips import slice_named
from tomat.perf.cost.roofline import RooflineTime, matrix_products, roofline_seconds
from tomat.perf.profile.hlo_files import load_program, program_from_text
from tomat.perf.profile.hlo_kernels import executed_kernels

V6E_4 = slice_named("v6e-4")
PROFILES = Path(__file__).parents[2] / "fixtures" / "profiles"


def roofline(body: str, name: str = "y", computations: str = "") -> RooflineTime | None:
    program = program_from_text(f"HloModule m, num_partitions=4\n{computations}\nENTRY e {{\n{body}\n}}", "inline")
    return roofline_seconds(program, program.by_name[name], V6E_4)


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


def test_exponentials_have_one_slot():
    found = roofline(
        "  a = f32[1024,128]{1,0:T(8,128)S(1)} parameter(0)\n  ROOT y = f32[1024,128]{1,0:T(8,128)S(1)} exponential(a)"
    )
    assert found is not None
    assert found.seconds == found.vpu_seconds == pytest.approx(128 / 1.75e9)


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
        computations=FUSED,
    )
    assert found is not None
    # half of what the slice takes of the padded array is real; the index is four bytes
    moved = 512 * 128 * 2 / 2 + 128 * 256 * 2 + 512 * 256 * 2 + 4
    assert found.hbm_seconds == pytest.approx(moved / 1638e9)


def test_a_collective_is_bound_by_its_links():
    body = (
        "  a = bf16[4,1024,1024]{2,1,0} parameter(0)\n"
        "  ROOT y = bf16[4,1024,1024]{2,1,0} collective-permute(a), channel_id=1, source_target_pairs={{0,1},{1,0}}"
    )
    found = roofline(body)
    assert found is not None
    assert found.seconds == found.ici_seconds == pytest.approx(8 * 2**20 / 90e9 + 1e-6)


def test_a_pallas_call_is_unknown():
    body = '  a = f32[8,128]{1,0} parameter(0)\n  ROOT y = f32[8,128]{1,0} custom-call(a), custom_call_target="kernel"'
    assert roofline(body) is None


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
