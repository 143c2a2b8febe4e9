import jax
import jax.numpy as jnp
import pytest
from hlo_text import counted_loop, program_of, text_of
from trace_builder import serialise_program

from tomat.base.errors import TomatError
from tomat.perf.profile.hlo import HloProgram
from tomat.perf.profile.hlo_costs import instruction_flops
from tomat.perf.profile.hlo_files import load_program, program_from_bytes, program_from_text
from tomat.perf.profile.hlo_kernels import executed_kernels, loop_notes, trip_count
from tomat.perf.profile.load import load_breakdown
from tomat.perf.profile.protos import new_message


def test_source_lines_skip_wrapper_libraries(v6e_program):
    sources = {v6e_program.source(k.instruction) for k in executed_kernels(v6e_program)} - {""}
    assert any(s.startswith("levanter/layers/rotary.py:") for s in sources)
    assert not any(s.startswith(("/", "jax/_src")) for s in sources)
    rows = [k.instruction for k in executed_kernels(v6e_program) if "Attention" in k.instruction.op_name]
    assert {v6e_program.source(i).split("/")[0] for i in rows if v6e_program.frames(i)[1:]} == {"levanter"}


def test_text_module_and_proto_are_the_same_program(v6e_program, tmp_path):
    raw = serialise_program(v6e_program)
    module = v6e_program.module.SerializeToString()
    (tmp_path / "a.hlo.pb").write_bytes(raw)
    (tmp_path / "b.pb").write_bytes(module)
    product = jax.jit(lambda x: (x @ x).sum()).lower(jnp.ones((8, 8))).compile()
    (tmp_path / "c.txt").write_text(product.as_text())
    names = [i.instruction.name for i in executed_kernels(v6e_program)]
    for file in ("a.hlo.pb", "b.pb"):
        assert [k.instruction.name for k in executed_kernels(load_program(tmp_path / file))] == names
    from_text = load_program(tmp_path / "c.txt")
    products = [i for i in from_text.by_id.values() if i.opcode in ("dot", "convolution")]
    assert sum(instruction_flops(from_text, product) for product in products) == 2 * 8**3


def test_bad_modules_are_refused(v6e_program, tmp_path):
    with pytest.raises(TomatError, match="not HLO text that XLA can parse"):
        program_from_text("HloModule broken\nENTRY main { oops }", "x.txt")
    with pytest.raises(TomatError, match="is no compiled program, or is damaged"):
        program_from_bytes(b"\x00\x01 not a proto", "x.pb")
    with pytest.raises(TomatError, match="is no compiled program"):
        program_from_bytes(serialise_program(v6e_program)[:5000], "cut.pb")
    (tmp_path / "bad.hlo.gz").write_bytes(b"\x1f\x8b\x08\x00 broken")
    with pytest.raises(TomatError, match="cannot be read"):
        load_program(tmp_path / "bad.hlo.gz")


def test_a_text_whose_parts_do_not_fit_is_refused_with_its_file(tmp_path):
    path = tmp_path / "x.hlo"
    config = '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["9"]}}}'
    call = f'custom-call(a, a), custom_call_target="__cublas$gemm", backend_config={config}'
    path.write_text(text_of(f"a = f32[8,8]{{1,0}} parameter(0)\n  ROOT y = f32[8,8]{{1,0}} {call}"))
    with pytest.raises(TomatError, match=f"^{path}: the HLO of m is damaged: .*IndexError.* Dump the module"):
        load_breakdown(str(path), device_kind="TPU v6 lite")


@pytest.mark.parametrize("size", ["-128", "-1", "-9223372036854775809"])
def test_a_false_layout_is_refused(size, tmp_path):
    """XLA's parser ends the process that it runs in: this test would, too."""
    text = """HloModule m, entry_computation_layout={(f32[4,2]{1,0:T(8,128)})->f32[4,2]{1,0}}

    ENTRY e {
      ROOT a = f32[4,2]{1,0} parameter(0)
    }
    """
    assert program_from_text(text, "x.txt").name == "m"
    path = tmp_path / "x.hlo"
    path.write_text(text.replace("T(8,128)", f"T(8,{size})"))
    with pytest.raises(TomatError, match="x.hlo: not HLO text that XLA can parse"):
        load_program(path)


def test_stack_frames_that_lead_back_end(v6e_program):
    message = new_message("HloProto")
    message.ParseFromString(serialise_program(v6e_program))
    frames = message.hlo_module.stack_frame_index.stack_frames
    frames[0].parent_frame_id = 1
    program = program_from_bytes(message.SerializeToString(), "x.pb")
    found = [i for body in program.computations.values() for i in body if i.frame_id]
    assert found and all(len(program.frames(i)) <= len(frames) for i in found)


def triangle(turns: int, first: str, last: str) -> HloProgram:
    """A loop of so many turns, each of which has one from `first` to `last`, made of `i`, `next` and `most`, a 5."""
    array, state = "f32[8]{0}", "(s32[], s32[], f32[8]{0})"
    elements = {"j": "s32[]", "end": "s32[]", "x": array}
    inner = counted_loop("inner", elements, f"y = {array} add(x, x)", "end", j="next", x="y")
    body = f"""most = s32[] constant(5)
  first = s32[] {first}
  last = s32[] {last}
  state = {state} tuple(first, last, x)
  inner = {state} while(state), condition=inner_cond, body=inner_body
  y = {array} get-tuple-element(inner), index=2"""
    outer = counted_loop("outer", {"i": "s32[]", "x": array}, body, str(turns), i="next", x="y")
    entry = f"""x = {array} parameter(0)
  zero = s32[] constant(0)
  s = (s32[], {array}) tuple(zero, x)
  outer = (s32[], {array}) while(s), condition=outer_cond, body=outer_body
  ROOT r = {array} get-tuple-element(outer), index=1"""
    return program_of(entry, inner, outer, how="is_scheduled=true")


@pytest.mark.parametrize(
    ("first", "last", "counts"),
    [
        ("constant(0)", "minimum(next, most)", [1, 2, 3, 4, 5, 5, 5]),  # attention's keys, up to the diagonal
        ("copy(i)", "constant(7)", [7, 6, 5, 4, 3, 2, 1]),  # its queries, from the diagonal on
        ("copy(i)", "multiply(next, next)", [1, 3, 7, 13, 21, 31, 43]),
        ("copy(i)", "subtract(most, next)", [4, 2, 0, 0, 0, 0, 0]),
    ],
)
def test_a_loop_that_the_turn_around_it_decides_runs_as_often_in_the_mean(first, last, counts):
    program = triangle(len(counts), first, last)
    assert trip_count(program, program.by_name["outer"]) == len(counts)
    assert trip_count(program, program.by_name["inner"]) == pytest.approx(sum(counts) / len(counts))
    adds = [kernel.executions for kernel in executed_kernels(program) if kernel.instruction.shape.dims == (8,)]
    assert adds == pytest.approx([sum(counts)])


def test_a_loop_that_data_decide_is_counted_once_and_said():
    program = triangle(4, "constant(0)", "negate(next)")
    assert trip_count(program, program.by_name["inner"]) is None
    adds = [kernel.executions for kernel in executed_kernels(program) if kernel.instruction.shape.dims == (8,)]
    assert adds == [4] and loop_notes(program) == ["loop inner: trip count unknown, its body is counted once"]


def test_a_loop_that_counts_down_to_zero_runs():
    body = """b {
  s = (s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  u = s32[] constant(-1)
  n = s32[] add(i, u)
  ROOT t = (s32[]) tuple(n)
}
c {
  s = (s32[]) parameter(0)
  i = s32[] get-tuple-element(s), index=0
  m = s32[] constant(0)
  ROOT p = pred[] compare(i, m), direction=NE
}"""
    entry = "  z = s32[] constant(12)\n  s = (s32[]) tuple(z)\n  ROOT w = (s32[]) while(s), condition=c, body=b"
    program = program_of(entry, body)
    assert trip_count(program, next(i for i in program.by_id.values() if i.opcode == "while")) == 12
