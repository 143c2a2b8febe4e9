import pytest

from tomat.perf.profile.breakdown import Breakdown, OpRow, Roofs
from tomat.perf.profile.categories import Category, Direction, Part
from tomat.perf.profile.two_breakdowns import Verdict, compare_breakdowns

ROOFS = Roofs("chip", 1.0, 1.0, clock_hz=1000.0)


def of(**seconds: float) -> Breakdown:
    ops = tuple(
        OpRow(name, "p", "fusion", Category[name], Part.MLP, Direction.NONE, 1.0, value)
        for name, value in seconds.items()
    )
    return Breakdown("t", "trace", ROOFS, sum(seconds.values()), ops)


def test_deltas_in_cycles_and_points():
    result = compare_breakdowns(of(MATMUL=60.0, LOSS=40.0), of(MATMUL=60.0, LOSS=20.0, OPTIMIZER=1.0))
    rows = {r.category: r for r in result.rows}
    assert rows["loss"].delta_cycles == -20_000
    assert rows["loss"].delta_points == pytest.approx(100 * (20 / 81 - 0.4))
    assert rows["optimizer"].growth_percent_of_step == pytest.approx(1.0)
    assert rows["matmul"].delta_seconds == 0 and rows["matmul"].delta_points > 0
    assert result.rows[0].category == "loss"
    assert result.step_growth_percent == pytest.approx(-19.0)
    assert sum(r.delta_seconds for r in result.rows) == pytest.approx(result.b_step_seconds - result.a_step_seconds)


@pytest.mark.parametrize(
    ("loss", "verdict"), [(40.0, Verdict.PASS), (41.9, Verdict.PASS), (43.0, Verdict.WARN), (46.0, Verdict.FAIL)]
)
def test_verdicts(loss, verdict):
    assert compare_breakdowns(of(MATMUL=60.0, LOSS=40.0), of(MATMUL=60.0, LOSS=loss)).verdict == verdict


def test_a_category_can_fail_although_the_step_does_not():
    a, b = of(MATMUL=50.0, LOSS=50.0), of(MATMUL=40.0, LOSS=60.0)
    result = compare_breakdowns(a, b)
    assert result.step_verdict == Verdict.PASS and result.verdict == Verdict.FAIL
    assert compare_breakdowns(a, b, 15.0, 20.0).verdict == Verdict.PASS
    assert result.to_dict()["verdict"] == "fail"
