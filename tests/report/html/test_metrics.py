import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.report.html.metrics import read_curves

VALUES = st.floats(-1e9, 1e9) | st.just(math.nan) | st.none()


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.dictionaries(st.sampled_from(["train/loss", "mfu_full", "lr"]), VALUES)),
        max_size=20,
    )
)
def test_curves_are_the_lines_of_the_log_in_order_of_step(tmp_path_factory, rows):
    run = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"step": step, "name": "text", **values}) for step, values in rows]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines) + '{"step": 7, "train/lo')
    found = read_curves(str(run))
    assert (found.lines, found.unreadable) == (len(rows), 1)
    assert found.steps_done == max((step for step, _ in rows), default=-1) + 1
    for name in ("train/loss", "mfu_full", "lr"):
        finite = [
            (step, values[name])
            for step, values in rows
            if values.get(name) is not None and values[name] == values[name]
        ]
        finite.sort(key=lambda one: one[0])
        if not finite:
            assert name not in found.curves
            continue
        assert np.array_equal(found.curves[name].steps, [step for step, _ in finite])
        assert np.array_equal(found.curves[name].values, [value for _, value in finite])


def test_a_run_that_has_no_log_has_no_curves(tmp_path):
    found = read_curves(str(tmp_path))
    assert (found.curves, found.steps_done, found.written_utc) == ({}, 0, None)
