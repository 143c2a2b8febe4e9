import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.report.html.metrics import kept_points, read_curves

NAMES = ("train/loss", "mfu_full", "lr")
VALUES = st.floats(-1e9, 1e9) | st.just(math.nan) | st.none()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.dictionaries(st.sampled_from(NAMES), VALUES)), max_size=20))
def test_curves_are_the_lines_of_the_log_in_order_of_step(tmp_path_factory, rows):
    run = tmp_path_factory.mktemp("run")
    lines = [json.dumps({"step": step, "name": "text", **values}) for step, values in rows]
    (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines) + '{"step": 7, "train/lo')
    found = read_curves(str(run))
    assert (found.lines, found.unreadable) == (len(rows), 1)
    assert found.steps_done == max((step for step, _ in rows), default=-1) + 1
    for name in NAMES:
        known = [(step, values[name]) for step, values in rows if values.get(name) is not None]
        finite = sorted((one for one in known if math.isfinite(one[1])), key=lambda one: one[0])
        assert (name in found.curves) == bool(finite)
        if finite:
            curve = found.curves[name]
            assert list(zip(curve.steps.tolist(), curve.values.tolist(), strict=True)) == finite


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200), st.integers(1, 20))
def test_every_stretch_keeps_its_extremes_and_the_curve_its_ends(values, buckets):
    curve = np.array(values)
    kept = kept_points(curve, buckets)
    assert (np.diff(kept) > 0).all() and kept[0] == 0 and kept[-1] == len(curve) - 1
    assert len(kept) <= 2 * buckets + 2
    if len(curve) <= 2 * buckets:
        assert len(kept) == len(curve)
        return
    size = -(-len(curve) // buckets)
    for start in range(0, len(curve), size):
        mine = kept[(kept >= start) & (kept < start + size)]
        assert curve[mine].min() == curve[start : start + size].min()
        assert curve[mine].max() == curve[start : start + size].max()
