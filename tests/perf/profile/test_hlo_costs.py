import jax
import jax.numpy as jnp
import pytest
from hlo_text import program_of

from tomat.perf.profile.hlo_costs import instruction_flops, kernel_flops, kernel_hbm_bytes
from tomat.perf.profile.hlo_files import program_from_text
from tomat.perf.profile.hlo_kernels import executed_kernels


def test_flops_of_plain_programs_are_xlas_own():
    def step(x, w):
        return jnp.tanh(x @ w).sum(axis=0) * 2.0

    compiled = jax.jit(step).lower(jnp.ones((64, 32)), jnp.ones((32, 48))).compile()
    program = program_from_text(compiled.as_text(), "step")
    mine = sum(kernel_flops(program, k.instruction) or 0.0 for k in executed_kernels(program))
    assert mine == pytest.approx(compiled.cost_analysis()["flops"], rel=0.02)


def test_matmul_flops_of_the_v6e_step_are_the_models(v6e_program):
    tokens, hidden, ffn, vocab, layers = 2 * 1024, 256, 1024, 4096, 4
    layer = 2 * tokens * (4 * hidden * hidden + 3 * hidden * ffn)
    # forward, recomputed forward (the down projection's result is not needed again), backward twice
    expected = layers * (4 * layer - 2 * tokens * hidden * ffn) + 3 * 2 * tokens * hidden * vocab
    ran = executed_kernels(v6e_program)
    kernels = [(inner, k.executions) for k in ran for inner in v6e_program.inner(k.instruction)]
    products = [(one, times) for one, times in kernels if one.opcode in ("dot", "convolution")]
    total = sum(instruction_flops(v6e_program, one) * times for one, times in products)
    assert total == pytest.approx(expected, rel=0.001)


def test_slices_and_updates_count_what_they_touch():
    parameters = "  a = f32[1000,8]{1,0} parameter(0)\n  i = s32[] parameter(1)\n  u = f32[1,8]{1,0} parameter(2)"
    sliced = program_of(f"{parameters}\n  ROOT y = f32[1,8]{{1,0}} dynamic-slice(a, i, i), dynamic_slice_sizes={{1,8}}")
    assert kernel_hbm_bytes(sliced, sliced.by_name["y"]) == 2 * 8 * 4
    updated = program_of(f"{parameters}\n  ROOT y = f32[1000,8]{{1,0}} dynamic-update-slice(a, u, i, i)")
    assert kernel_hbm_bytes(updated, updated.by_name["y"]) == 2 * 8 * 4


def test_padded_convolutions_count_only_real_input():
    # Width-3 kernel over 5 positions with padding 1: 13 of the 15 pairs meet an input element.
    program = program_of(
        "  x = f32[2,5,7]{2,1,0} parameter(0)\n  k = f32[3,7,4]{2,1,0} parameter(1)\n"
        "  ROOT y = f32[2,5,4]{2,1,0} convolution(x, k), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f"
    )
    assert kernel_flops(program, program.by_name["y"]) == 2 * (2 * 4) * 13 * 7


def test_flops_of_cudnns_attention_are_those_of_the_pairs_that_its_mask_leaves():
    config = (
        '{"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"dimensions":["2","4","64","64"]},'
        '"mask_type":"CAUSAL","sliding_window_length":%d}}'
    )
    array = "bf16[2,64,4,16]{3,2,1,0}"

    def flops(target: str, window: int) -> float | None:
        given = "\n".join(f"  {name} = {array} parameter({at})" for at, name in enumerate("qkv"))
        call = f'  ROOT y = ({array}, u8[0]{{0}}) custom-call(q, k, v), custom_call_target="{target}"'
        program = program_of(f"{given}\n{call}, backend_config={config % window}")
        return kernel_flops(program, program.by_name["y"])

    pairs = 64 * 65 // 2
    assert flops("__cudnn$fmhaSoftmax", 0) == 2 * 2 * 2 * 4 * 16 * pairs
    assert flops("__cudnn$fmhaSoftmaxBackward", 0) == 5 * 2 * 2 * 4 * 16 * pairs
    assert flops("__cudnn$fmhaSoftmax", 8) == 2 * 2 * 2 * 4 * 16 * (8 * 9 // 2 + 56 * 8)


def test_asynchronous_slices_move_what_they_slice():
    source, piece = "bf16[20,1024,4096]{2,1,0}", "bf16[1,1024,4096]{2,1,0:S(1)}"
    sliced = f"""sliced {{
  p = {source} parameter(0)
  i = s32[] parameter(1)
  z = s32[] constant(0)
  ROOT d = {piece} dynamic-slice(p, i, z, z), dynamic_slice_sizes={{1,1024,4096}}
}}"""
    whole = "f32[1024,1024]{1,0}"
    program = program_of(
        f"""  w = {source} parameter(0)
  i = s32[] parameter(1)
  x = {whole} parameter(2)
  st = (({source}, s32[]), {piece}, s32[]) async-start(w, i), calls=sliced
  dn = {piece} async-done(st)
  cp = ({whole}, {whole}, u32[], u32[]) collective-permute-start(x), source_target_pairs={{{{0,1}},{{1,0}}}}
  cpd = {whole} collective-permute-done(cp)
  ROOT r = ({piece}, {whole}) tuple(dn, cpd)""",
        sliced,
    )
    assert kernel_hbm_bytes(program, program.by_name["st"]) == 2 * 1024 * 4096
    assert kernel_hbm_bytes(program, program.by_name["cp"]) == 2 * 4 * 1024 * 1024
