import pytest

from tomat.base.report.formats import change, count, number, percent, quantity, seconds, signed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (percent(0.0871), "8.7 %"),
        (percent(-0.0), "0.0 %"),
        (percent(-0.0001), "0.0 %"),
        (change(-0.0001), "+0.0 %"),
        (change(-0.087), "-8.7 %"),
        (percent(None), "–"),
        (seconds(2.08), "2.080 s"),
        (seconds(-0.0015), "-1.500 ms"),
        (seconds(2.5e-7), "0.250 µs"),
        (quantity(2.5e12, "FLOP"), "2.50 TFLOP"),
        (quantity(0.0), "0"),
        (count(1234.0), "1,234"),
        (count(0.25), "0.2"),
        (signed(-0.001), "+0.00"),
        (number(1, 1e3, " ms")(0.0123), "12.3 ms"),
        (number()(float("inf")), "inf"),
    ],
)
def test_formats(text, expected):
    assert text == expected
