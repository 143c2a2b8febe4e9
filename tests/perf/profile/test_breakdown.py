import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.perf.profile.breakdown import Bound, Breakdown, OpRow, Roofs
from tomat.perf.profile.categories import Category, Direction, Part

ROOFS = Roofs("chip", peak_flops_per_second=100.0, peak_hbm_bytes_per_second=10.0, clock_hz=1000.0)


def op(category=Category.MATMUL, seconds=1.0, flops=0.0, hbm_bytes=0.0, name="x", **changes) -> OpRow:
    values = {"direction": Direction.NONE, "part": Part.MLP, "occurrences": 1.0, "opcode": "fusion", "program": "p"}
    return OpRow(
        name=name, category=category, seconds=seconds, flops=flops, hbm_bytes=hbm_bytes, **{**values, **changes}
    )


def of(*ops: OpRow, roofs: Roofs = ROOFS) -> Breakdown:
    return Breakdown("t", "trace", roofs, sum(o.seconds for o in ops), ops)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (op(flops=80.0, hbm_bytes=5.0), Bound.COMPUTE),
        (op(flops=10.0, hbm_bytes=9.0), Bound.MEMORY),
        (op(flops=5.0, hbm_bytes=0.5), Bound.LATENCY),
        (op(flops=None, hbm_bytes=9.0), Bound.UNKNOWN),
        (op(Category.COLLECTIVES_EXPOSED, flops=80.0), Bound.COMMUNICATION),
        (op(Category.IDLE, flops=None), Bound.LATENCY),
    ],
)
def test_bounds(row, expected):
    assert of(row).categories[0].bound == expected


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(list(Category)), st.floats(0, 10), st.sampled_from(list(Part))), min_size=1))
def test_groups_sum_to_the_step(rows):
    breakdown = of(*(op(c, s, name=f"o{i}", part=p) for i, (c, s, p) in enumerate(rows)))
    for groups in (breakdown.categories, breakdown.parts):
        assert sum(g.seconds for g in groups) == pytest.approx(breakdown.step_seconds)
    if breakdown.step_seconds > 0:
        assert sum(g.share for g in breakdown.categories) == pytest.approx(1.0)


def test_hidden_collectives_are_a_row_outside_the_sum():
    breakdown = of(op(seconds=2.0), op(Category.COLLECTIVES_EXPOSED, 1.0, name="ar", hidden_seconds=1.5))
    rows = {r.name: r for r in breakdown.categories}
    assert rows["collectives, hidden"].hidden_seconds == 1.5 and rows["collectives, hidden"].share == 0.0
    assert sum(r.share for r in breakdown.categories) == pytest.approx(1.0)


def test_json_of_another_version_or_that_does_not_add_up_is_refused():
    """Other damage: `tests/fuzz/test_result_files.py`."""
    good = of(op()).to_dict()
    assert Breakdown.from_dict(good).to_dict() == good
    twice = {"ops": [good["ops"][0], {**good["ops"][0], "name": "twice"}]}
    for change, reason in (
        ({"format_version": 99}, "not a breakdown of format 1"),
        (twice, "its operations take 2.0 s and the step 1.0 s"),
        ({"device": {}}, "is damaged"),
    ):
        with pytest.raises(TomatError, match=f"x.json.*{reason}"):
            Breakdown.from_dict({**good, **change}, "x.json")


def test_operations_are_held_to_the_peak_for_what_they_multiply():
    roofs = Roofs.of_device_kind("TPU v6 lite")
    half = 918e12 / 2
    rows = [op(flops=half, name="a"), op(flops=2 * half, name="b", operands="int8"), op(flops=half, operands="f32")]
    breakdown = of(*rows, roofs=roofs)
    assert [breakdown.group(row.name, [row]).flops_fraction for row in rows] == pytest.approx([0.5] * 3)
    assert breakdown.categories[0].flops_fraction == pytest.approx(0.5)
    assert Breakdown.from_dict(breakdown.to_dict()).ops == breakdown.top(3)
    # A breakdown of before does not say, and stands on the bf16 peak.
    older = breakdown.to_dict()
    for row in older["ops"]:
        row.pop("operands")
    read = Breakdown.from_dict(older)
    assert max(read.group(row.name, [row]).flops_fraction or 0.0 for row in read.ops) == pytest.approx(1.0)
    with pytest.raises(TomatError, match="operands is 'int3'"):
        Breakdown.from_dict(older | {"ops": [{**older["ops"][0], "operands": "int3"}, *older["ops"][1:]]})
