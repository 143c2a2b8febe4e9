import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.report.html.thinning import kept_points


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
