from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.perf.cost.memory import ALLOCATE, FREE, SHARE, replayed, saved_value, shape_text
from tomat.perf.profile.hlo_files import program_from_text


@dataclass(frozen=True)
class Event:
    kind: int
    buffer_id: int
    share_with_canonical_id: int = 0


def test_a_shared_place_counts_once_and_until_its_last_user():
    sizes = {1: 100, 2: 100, 3: 30, 4: 60}
    events = [
        Event(ALLOCATE, 1),
        Event(SHARE, 2, 1),
        Event(FREE, 1),
        Event(ALLOCATE, 3),  # 130: 2 still holds the place of 1
        Event(FREE, 2),
        Event(ALLOCATE, 4),  # 90
        Event(FREE, 3),
        Event(FREE, 4),
    ]
    assert replayed(events, sizes)[1] == [[1, 2], [3]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 500)), min_size=1, max_size=12))
def test_the_peak_is_the_largest_sum_of_lifetimes(spans):
    """Each buffer lives from its first to its last moment; the brute force adds up every moment."""
    lifetimes = {k: (min(a, b), max(a, b)) for k, (a, b, _) in enumerate(spans)}
    sizes = {k: size for k, (_, _, size) in enumerate(spans)}
    events = []
    for moment in range(10):
        events += [Event(ALLOCATE, k) for k, (start, _) in lifetimes.items() if start == moment]
        events += [Event(FREE, k) for k, (_, end) in lifetimes.items() if end == moment]
    brute = max(sum(sizes[k] for k, (a, b) in lifetimes.items() if a <= t <= b) for t in range(10))
    assert sum(sizes[place] for place, *_ in replayed(events, sizes)[1]) == brute


def test_shapes_are_spelt_as_in_hlo_text():
    shapes = [
        "bf16[20,8,8192]{1,2,0:T(8,128)(2,1)}",
        "f32[4096]{0:T(1024)S(1)}",
        "pred[]",
        "(f32[8,128]{1,0:T(8,128)}, s32[2]{0})",
    ]
    parameters = "\n".join(f"  p{k} = {shape} parameter({k})" for k, shape in enumerate(shapes))
    program = program_from_text(f"HloModule m\nENTRY e {{\n{parameters}\n  ROOT r = pred[] copy(p2)\n}}", "inline")
    assert [shape_text(program.by_name[f"p{k}"].proto.shape) for k in range(4)] == shapes


SAVED = """
HloModule m
fused {
  stack = bf16[6,8,128]{2,1,0} parameter(0)
  value = f32[8,128]{1,0} parameter(1)
  i = s32[] parameter(2)
  zero = s32[] constant(0)
  half = f32[8,128]{1,0} tanh(value), metadata={op_name="jit(f)/layer/tanh" source_file="model.py" source_line=7}
  rounded = bf16[8,128]{1,0} convert(half)
  update = bf16[1,8,128]{2,1,0} bitcast(rounded)
  ROOT stored = bf16[6,8,128]{2,1,0} dynamic-update-slice(stack, update, i, zero, zero)
}
ENTRY e {
  stack = bf16[6,8,128]{2,1,0} parameter(0)
  x = f32[8,128]{1,0} parameter(1)
  i = s32[] parameter(2)
  ROOT y = bf16[6,8,128]{2,1,0} fusion(stack, x, i), kind=kLoop, calls=fused,
    metadata={op_name="jit(f)/while/dynamic_update_slice" source_file="scan.py" source_line=99}
}
"""


def test_a_scans_stack_is_told_by_the_value_it_keeps():
    program = program_from_text(SAVED, "inline")
    assert program.source(saved_value(program, program.by_name["y"])) == "model.py:7"
    assert saved_value(program, program.by_name["half"]) is program.by_name["half"]
