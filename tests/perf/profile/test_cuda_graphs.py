from dataclasses import replace

import numpy as np
import pytest
from hlo_text import counted_loop, text_of

from tomat.base.errors import TomatError
from tomat.perf.profile.categories import Direction
from tomat.perf.profile.cuda_graphs import with_library_kernels
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_files import program_from_text
from tomat.perf.profile.trace import load_trace
from tomat.perf.profile.trace_breakdown import breakdown_from_trace
from tomat.perf.profile.trace_data import DeviceTrace, Events, ModuleRun, OpKind, Trace


@pytest.fixture(scope="module")
def trace(h100_profile) -> Trace:
    return load_trace(h100_profile)


def test_products_of_cublas_and_cudnn_in_cuda_graphs_are_those_of_the_model(trace):
    breakdown = breakdown_from_trace(trace)
    assert sum(op.seconds for op in breakdown.ops if op.program and op.flops is None) < 0.01 * breakdown.step_seconds
    attention = {op.direction: op for op in breakdown.ops if "dot_product_attention" in op.name}
    # 8 sequences of 8,192 tokens, 12 layers of 8 heads of 128
    pairs, heads = 8192 * 8193 // 2, 8 * 12 * 8
    for direction, products in ((Direction.FORWARD, 2), (Direction.BACKWARD, 5)):
        # Of the three kernels of the gradient one counts.
        assert attention[direction].occurrences == 12
        assert attention[direction].flops == products * 2 * 128 * heads * pairs
    # The reference is the executed work that MFU's HFU counts, but for cuDNN's tiles on the diagonal.
    tokens, width, ffn, vocabulary = 8 * 8192, 1024, 4096, 18570
    once = 12 * (4 * width**2 + 3 * width * ffn)
    again = 12 * 3 * width**2  # queries, keys and what attention yields are projected once more
    expected = 2 * tokens * (3 * once + again + 3 * width * vocabulary) + 7 * 2 * 128 * heads * pairs
    assert sum(op.flops or 0.0 for op in breakdown.ops) == pytest.approx(expected, rel=0.01)


def test_a_damaged_call_is_refused_and_a_loop_without_end_is_left_alone(trace, h100_profile, tmp_path):
    contracted = b'"lhs_contracting_dimensions":["%d"]'
    path = tmp_path / "host0.xplane.pb"
    path.write_bytes(h100_profile.read_bytes().replace(contracted % 1, contracted % 9))
    with pytest.raises(TomatError, match=f"{path}, module .*: the HLO of .* is damaged: .* take the profile again"):
        breakdown_from_trace(load_trace(path))
    loop = """HloModule m
body { p = f32[8,8]{1,0} parameter(0)
  ROOT y = f32[8,8]{1,0} CALL }
cond { q = f32[8,8]{1,0} parameter(0)
  ROOT c = pred[] constant(true) }
ENTRY main { x = f32[8,8]{1,0} parameter(0)
  ROOT w = f32[8,8]{1,0} while(x), condition=cond, body=body, backend_config={"known_trip_count":{"n":"999999999999"}} }
"""
    gemm = 'custom-call(p, p), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{}}'
    for call in ("negate(p)", gemm):
        program = program_from_text(loop.replace("CALL", call), "loop")
        run = replace(trace.devices[0].modules[0], program_id=program.program_id)
        device = replace(trace.devices[0], modules=[run])
        assert len(with_library_kernels(device, program).kinds) == len(device.kinds)


def test_kernels_stay_as_they_are_where_their_number_is_not_that_of_the_calls(trace):
    device = trace.devices[0]
    run = next(one for one in device.modules if "train_step" in one.program)
    program = trace.program(run.program_id)
    assert program is not None
    kernels = [number for number, kind in enumerate(device.kinds) if kind.name.startswith("nvjet")]
    at = int(np.flatnonzero(np.isin(device.ops.kind, kernels) & (device.ops.start_ps >= run.start_ps))[0])
    ops = replace(device.ops, kind=np.delete(device.ops.kind, at), start_ps=np.delete(device.ops.start_ps, at))
    named = with_library_kernels(replace(device, ops=ops, modules=[run]), program).kinds[len(device.kinds) :]
    assert {kind.name.partition(".")[0] for kind in named} == {"dot_product_attention_fwd", "dot_product_attention_bwd"}


DOT = (
    'custom-call(x, x), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)


def nested_loops() -> HloProgram:
    """A loop of three turns, each of which has one that nothing in the program counts, and a product after it."""
    elements = {"i": "s32[]", "n": "s32[]", "x": "f32[8,8]"}
    inner = counted_loop("inner", elements, f"j = s32[] add(i, i)\ninside = f32[8,8] {DOT}", "n", i="j", x="inside")
    body = f"""loop = STATE while(s), condition=inner_cond, body=inner_body
  y = f32[8,8] get-tuple-element(loop), index=2
  l = s32[] add(i, i)
  m = s32[] add(l, l)
  after = f32[8,8] {DOT.replace("x", "y")}"""
    outer = counted_loop("outer", elements, body, "n", i="m", x="after")
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    entry = f"a = STATE parameter(0)\nROOT w = STATE while(a), condition=outer_cond, body=outer_body, {known}"
    return program_from_text(text_of(entry, inner, outer).replace("STATE", "(s32[], s32[], f32[8,8])"), "jit_step")


@pytest.mark.parametrize(("trips", "found"), [((0, 1, 2), True), ((2, 0, 3), True), ((1, 1), False)])
def test_trips_that_a_program_does_not_tell_are_read_off_the_copies_of_its_condition(trips, found):
    """As in attention by blocks, whose inner loop runs once more for each block of queries."""
    program = nested_loops()
    kinds = [OpKind(name, program.program_id, "jit_step") for name in ("nvjet_a", "loop", "j", "l", "m")]
    ran = [kind for count in trips for kind in (1, *[0, 2, 1] * count, 3, 4, 0)]
    ops = Events.build([(kind, 10 * at, 5, 0) for at, kind in enumerate(ran)])
    run = ModuleRun("jit_step", program.program_id, 0, 10 * len(ran))
    named = with_library_kernels(DeviceTrace("h", "/device:GPU:0", "", kinds, ops, modules=[run]), program)
    # `after` is one call as `inside` is: other kernels tell a trip from what is between two executions.
    calls = [named.kinds[kind].name for kind in named.ops.kind if kind not in (1, 2, 3, 4)]
    assert calls == ([name for n in trips for name in [*["inside"] * n, "after"]] if found else ["nvjet_a"] * 4)
