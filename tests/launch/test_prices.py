"""What a slice costs, and where a launch ends by its caps."""

import pytest

from tomat.base.errors import TomatError
from tomat.hardware.chips import slice_named
from tomat.launch.prices import CHIP_HOUR_USD, MARGIN_SECONDS, caps_of

V6E = slice_named("v6e-16")


@pytest.mark.parametrize(
    ("settings", "hours", "hourly"),
    [
        ({}, None, 43.2),
        ({"spot": True}, None, 19.44),
        ({"max_hours": 3.0}, 3.0, 43.2),
        ({"max_cost": 21.6}, 0.5, 43.2),
        ({"max_cost": 21.6, "max_hours": 0.25}, 0.25, 43.2),
        ({"max_cost": 32.0, "price": 1.0}, 2.0, 16.0),
    ],
)
def test_the_tighter_cap_counts(settings, hours, hourly):
    caps = caps_of(V6E, "us-east5-b", **settings)
    assert caps.hours(V6E) == (hours if hours is None else pytest.approx(hours))
    assert caps.cost(V6E, 1.0) == pytest.approx(hourly)
    assert f"${hourly:.2f} an hour" in caps.words(V6E) and ("no cap" in caps.words(V6E)) is (hours is None)


def test_a_cost_without_a_price_is_refused_and_hours_are_not():
    for tpu_slice, zone in ((slice_named("v4-8"), "us-central2-b"), (V6E, "asia-east1-c")):
        with pytest.raises(TomatError, match="--chip_hour_price"):
            caps_of(tpu_slice, zone, max_cost=10.0)
        caps = caps_of(tpu_slice, zone, max_hours=1.0)
        assert caps.hours(tpu_slice) == 1.0 and caps.cost(tpu_slice, 1.0) is None
        assert "price not known" in caps.words(tpu_slice)


def test_caps_that_leave_no_time_are_refused():
    with pytest.raises(TomatError, match="raise --max_hours"):
        caps_of(V6E, "us-east5-b", max_hours=2 * MARGIN_SECONDS / 3600)


def test_spot_is_cheaper_everywhere():
    assert all(0 < spot < asked for regions in CHIP_HOUR_USD.values() for asked, spot in regions.values())
