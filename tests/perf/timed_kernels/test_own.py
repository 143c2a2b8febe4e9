"""tomat's own timed programs: what they compute, and what they refuse."""

import jax
import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.measure.bench.chip_rows import full_rows, quick_rows
from tomat.perf.timed_kernels.own import CARRIED, ONCE, SPLASH, TIMED_WITH, own_program
from tomat.perf.timed_kernels.timings import OWN

TINY = {"x": "f32[8,16]", "up": "f32[16,24]", "down": "f32[24,16]"}


def computed(op: str, settings: dict | None = None, **arguments: str):
    """What the program gives for normal values, and these values."""
    program = own_program(op, arguments, settings or {})
    random = np.random.default_rng(0)
    arrays = {name: random.normal(size=each.shape).astype(np.float32) / 3 for name, each in program.arrays.items()}
    return jax.tree.map(np.asarray, jax.jit(program.run)(arrays)), arrays


def test_rounds_follow_each_other():
    given, arrays = computed("tomat_add", {"loop": 3, "links": 2}, x="f32[8,16]", y="f32[8,16]")
    np.testing.assert_allclose(given["x"], arrays["x"] + 6 * arrays["y"], rtol=1e-5, atol=1e-6)
    given, arrays = computed("tomat_matmul_chain", {"loop": 2, "links": 2}, **TINY)
    both = arrays["up"] @ arrays["down"]
    np.testing.assert_allclose(given["x"], arrays["x"] @ both @ both @ both @ both, rtol=1e-4, atol=1e-5)


def test_what_runs_once():
    given, arrays = computed("tomat_matmul_transposed", x="f32[16,8]", y="f32[16,4]")
    np.testing.assert_allclose(given, arrays["x"].T @ arrays["y"], rtol=1e-5, atol=1e-6)
    given, arrays = computed("tomat_column_slice", {"columns": 3, TIMED_WITH: "jax"}, x="f32[8,16]")
    np.testing.assert_array_equal(given, arrays["x"][:, :3])
    given, arrays = computed("tomat_copy_heads_first", x="f32[2,8,4,16]")
    np.testing.assert_array_equal(given, np.swapaxes(arrays["x"], 1, 2))


@pytest.mark.parametrize(
    ("op", "arguments", "settings", "says"),
    [
        ("tomat_divide", {"x": "f32[8]"}, {}, "no operation tomat_divide"),
        ("tomat_matmul", {"x": "f32[8,8]"}, {}, "expected x, w"),
        ("tomat_copy", {"x": "f16[8,8]"}, {}, "bf16 or f32"),
        ("tomat_copy", {"x": "f32[0,8]"}, {}, "bf16 or f32"),
        ("tomat_copy", {"x": "f32[8,8]"}, {"loop": 2}, "no setting loop"),
        ("tomat_add", {"x": "f32[8]", "y": "f32[8]"}, {"loop": 0}, "loop is 0"),
    ],
)
def test_rows_that_cannot_be_are_refused(op, arguments, settings, says):
    with pytest.raises(TomatError, match=says):
        own_program(op, arguments, settings)


def test_every_row_of_the_bench_can_be_traced_and_no_two_are_one():
    assert {row[0] for row in quick_rows()} == {row[0] for row in full_rows()} == CARRIED.keys() | ONCE.keys()
    assert all(op.startswith(OWN) for op in (*CARRIED, *ONCE))
    seen = []
    for op, arguments, settings in full_rows() + quick_rows():
        program = own_program(op, arguments, settings)
        assert (op, arguments, settings) not in seen
        seen.append((op, arguments, settings))
        if op not in SPLASH:  # their tracing takes seconds; one is compiled in `test_programs.py`
            assert jax.tree.leaves(jax.eval_shape(program.run, program.arrays))
