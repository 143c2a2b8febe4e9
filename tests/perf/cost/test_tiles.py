import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.hardware.chips import CHIPS
from tomat.perf.cost.roofline import MatrixProduct, matrix_products, mxu_seconds, padded_bytes
from tomat.perf.profile.hlo_costs import instruction_flops
from tomat.perf.profile.hlo_files import program_from_text
from tomat.perf.profile.hlo_kernels import executed_kernels

V6E = CHIPS["v6e"]


def flops(product: MatrixProduct) -> float:
    """Without padding, two a multiply-add."""
    return 2.0 * product.batch * product.m * product.n * product.k


def product_of(operation: str, a: str, b: str) -> MatrixProduct:
    text = f"HloModule m\nENTRY e {{\n  a = {a} parameter(0)\n  b = {b} parameter(1)\n  ROOT y = {operation}\n}}"
    program = program_from_text(text, "inline")
    (product,) = matrix_products(program, program.by_name["y"])
    assert flops(product) == instruction_flops(program, program.by_name["y"])
    return product


def test_a_batched_dot():
    operation = (
        "f32[8,16,32]{2,1,0} dot(a, b), lhs_batch_dims={0}, rhs_batch_dims={0}, lhs_contracting_dims={2}, "
        "rhs_contracting_dims={1}"
    )
    product = product_of(operation, "bf16[8,16,64]{2,1,0}", "bf16[8,64,32]{2,1,0}")
    assert product == MatrixProduct(batch=8, m=16, n=32, k=64, bits=16)


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
        "bf16[64,128]{1,0}",
        "bf16[128,256]{1,0}",
        MatrixProduct(1, 64, 256, 128, 16),
    ),
    "a window of one over rows": (
        "bf16[8,32,256]{2,1,0} convolution(a, b), window={size=1}, dim_labels=b0f_0io->b0f",
        "bf16[8,32,128]{2,1,0}",
        "bf16[1,128,256]{2,1,0}",
        MatrixProduct(1, 8 * 32, 256, 128, 16),
    ),
    "heads of one kernel that share the input: columns": (
        "bf16[64,16,256]{2,1,0} convolution(a, b), window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=b0f_0io->b0f",
        "bf16[64,1,128]{2,1,0}",
        "bf16[16,128,256]{2,1,0}",
        MatrixProduct(1, 64, 16 * 256, 128, 16),
    ),
    "heads on both sides: a batch": (
        "bf16[64,16,256]{2,1,0} convolution(a, b), window={size=16 stride=15 pad=15_15 lhs_dilate=16 rhs_reversal=1}, "
        "dim_labels=b0f_0io->b0f",
        "bf16[64,16,128]{2,1,0}",
        "bf16[16,128,256]{2,1,0}",
        MatrixProduct(16, 64, 256, 128, 16),
    ),
    "heads contracted": (
        "bf16[64,1,256]{2,1,0} convolution(a, b), window={size=16}, dim_labels=b0f_0io->b0f",
        "bf16[64,16,128]{2,1,0}",
        "bf16[16,128,256]{2,1,0}",
        MatrixProduct(1, 64, 256, 16 * 128, 16),
    ),
    "int8, as the projections of a model with int8 products": (
        "s32[64,256]{1,0} convolution(a, b), dim_labels=bf_oi->bf",
        "s8[64,128]{1,0}",
        "s8[256,128]{1,0}",
        MatrixProduct(1, 64, 256, 128, 8, "int8"),
    ),
}


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


@settings(max_examples=100, deadline=None)
@given(*[st.integers(1, 700)] * 4, st.sampled_from([128, 256]))
def test_padding_only_adds(batch, m, n, k, side):
    product = MatrixProduct(batch, m, n, k, 16)
    assert product.padded_flops(side) >= flops(product)
    assert product.padded_flops(side) == MatrixProduct(batch, n, m, k, 16).padded_flops(side)


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
    program = program_from_text(f"HloModule m\nENTRY e {{\n{parameters}\n  ROOT r = f32[5]{{0}} copy(p3)\n}}", "inline")
    found = [padded_bytes(program.by_name[f"p{k}"].proto.shape, 0) for k in range(len(shapes))]
    assert found == list(shapes.values())


def test_products_of_a_compiled_program_are_its_flops():
    def layer(x, up, down):
        return jnp.einsum("bsh,hmk->bsmk", x, up).sum() + (x @ down).sum()

    arguments = (jnp.ones((2, 16, 32)), jnp.ones((32, 4, 8)), jnp.ones((32, 24)))
    text = jax.jit(layer).lower(*arguments).compile().as_text()
    assert text is not None
    program = program_from_text(text, "layer")
    products = [p for kernel in executed_kernels(program) for p in matrix_products(program, kernel.instruction)]
    assert sum(flops(p) for p in products) == 2 * 32 * 32 * 32 + 2 * 32 * 32 * 24
