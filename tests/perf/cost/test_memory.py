import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest
from hlo_text import OUT_OF_MEMORY
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.perf.cost.memory import (
    ALLOCATE,
    FREE,
    LIVE_AT_PEAK,
    memory_of_compiled,
    memory_of_oom,
    read_assignment,
    replayed,
    saved_value,
)
from tomat.perf.profile.hlo_files import load_program, program_from_text

DATA = Path(__file__).parent / "data"
GIB = 2**30
V6E_BYTES = round(31.24 * GIB)

# What memory_analysis() said of scan_fits.
STATS = {
    "argument_size_in_bytes": 134217728,
    "output_size_in_bytes": 100663840,
    "alias_size_in_bytes": 100663296,
    "temp_size_in_bytes": 2281995008,
    "generated_code_size_in_bytes": 3419136,
    "peak_memory_in_bytes": 2181044768,
}


def dump(name: str) -> bytes:
    return gzip.decompress((DATA / f"{name}.hlo.pb.gz").read_bytes())


def test_a_program_that_fits_says_what_the_compiler_said():
    report = memory_of_compiled(dump("scan_fits"), V6E_BYTES, STATS["generated_code_size_in_bytes"])
    assert report.fits and report.argument_bytes == STATS["argument_size_in_bytes"]
    assert report.alias_bytes == STATS["alias_size_in_bytes"]
    assert report.output_bytes == STATS["output_size_in_bytes"] - STATS["alias_size_in_bytes"]
    assert report.program_bytes == STATS["generated_code_size_in_bytes"]
    # The replayed heap has the same bytes live at its peak as the compiler's own count.
    assert report.peak_bytes == STATS["peak_memory_in_bytes"]
    assert report.fragmentation_bytes == report.required_bytes - STATS["peak_memory_in_bytes"]
    assert report.headroom_bytes == V6E_BYTES - report.required_bytes > 0


def test_the_largest_buffers_are_the_saved_activations_with_their_lines():
    report = memory_of_compiled(dump("scan_fits"), V6E_BYTES)
    assert report.largest_are == LIVE_AT_PEAK
    saved = report.largest[:2]  # tanh(h) and 1 - tanh(h), kept for the backward pass of each layer
    assert {b.source for b in saved} == {"model.py:7"}
    assert {b.op_name.rsplit("/", 1)[-1] for b in saved} == {"tanh", "sub"}
    assert {b.hbm_bytes for b in saved} == {6 * 16384 * 4096 * 2}
    assert saved[0].shape == "bf16[6,16384,4096]{1,2,0:T(8,128)(2,1)}"
    everything = sum(b.hbm_bytes for b in report.largest)
    peak = STATS["peak_memory_in_bytes"]
    assert 0.99 * peak < everything <= peak


def test_a_refusal_gets_its_bytes_from_the_dump():
    told, report = memory_of_oom(OUT_OF_MEMORY), memory_of_oom(OUT_OF_MEMORY, dump("scan_oom"))
    assert told is not None and report is not None and not told.fits and not report.fits
    assert told.largest == () and told.capacity_bytes == V6E_BYTES
    # The message's total is arguments, temporaries, constants and outputs, rounded.
    assert abs(report.required_bytes - told.required_bytes) <= 0.005 * GIB
    assert report.headroom_bytes == report.capacity_bytes - report.required_bytes < 0
    # Batch x 1024 and the two weights, bf16, on one chip of four.
    assert report.argument_bytes == 2_097_152 // 4 * 1024 * 2 + 2 * 6 * 1024 * 4096 * 2
    assert report.largest[0].source == "model.py:7"


@pytest.mark.parametrize(
    ("message", "required", "capacity", "space"),
    [
        ("Used 36.01G of 31.25G hbm. Exceeded hbm capacity by 4.76G.", 36.01 * GIB, 31.25 * GIB, "hbm"),
        ("Ran out of memory in memory space vmem while allocating on stack for %k. Scoped allocation with size 17.20M "
         "and limit 16.00M exceeded scoped vmem limit by 1.20M.", 17.20 * 2**20, 16 * 2**20, "vmem"),
    ],
)  # fmt: skip
def test_other_refusals(message, required, capacity, space):
    report = memory_of_oom(message)
    assert report is not None and report.memory_space == space
    assert (report.required_bytes, report.capacity_bytes) == (round(required), round(capacity))


def test_a_program_without_a_buffer_assignment_is_refused():
    with pytest.raises(TomatError, match="no buffer assignment"):
        memory_of_compiled(b"", V6E_BYTES)


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


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 500)), min_size=1, max_size=12))
def test_the_peak_of_a_heap_is_the_largest_sum_of_lifetimes(spans):
    lifetimes = {k: (min(a, b), max(a, b)) for k, (a, b, _) in enumerate(spans)}
    sizes = {k: size for k, (_, _, size) in enumerate(spans)}
    events = []
    for moment in range(10):
        events += [SimpleNamespace(kind=ALLOCATE, buffer_id=k) for k, (at, _) in lifetimes.items() if at == moment]
        events += [SimpleNamespace(kind=FREE, buffer_id=k) for k, (_, end) in lifetimes.items() if end == moment]
    brute = max(sum(sizes[k] for k, (a, b) in lifetimes.items() if a <= t <= b) for t in range(10))
    assert sum(sizes[place] for place, *_ in replayed(events, sizes)[1]) == brute


def test_buffers_of_a_program_are_those_in_hbm():
    path = Path(__file__).parent / "data" / "scan_fits.hlo.pb.gz"
    required = read_assignment(gzip.decompress(path.read_bytes()))["required_bytes"]
    assert sum(load_program(path).memory_bytes.values()) == required
