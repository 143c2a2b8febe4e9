"""Figures as text: fixed formats and Markdown tables, the same bytes for the same values."""

import math
from collections.abc import Callable

UNKNOWN = "–"


def percent(fraction: float | None, digits: int = 1) -> str:
    """0.087 -> `8.7 %`."""
    return UNKNOWN if fraction is None else f"{round(100 * fraction, digits) + 0.0:.{digits}f} %"


def seconds(value: float | None) -> str:
    """With the unit that gives three or four figures before or after the point."""
    if value is None:
        return UNKNOWN
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if abs(value) * scale >= 1.0 or unit == "µs":
            return f"{value * scale:.3f} {unit}"
    return UNKNOWN


def quantity(value: float | None, unit: str = "") -> str:
    """With a decimal prefix: 2.5e12, `FLOP` -> `2.50 TFLOP`."""
    if value is None:
        return UNKNOWN
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {prefix}{unit}".rstrip()
    return f"{value:.0f} {unit}".rstrip()


def count(value: float) -> str:
    """Whole numbers with thousands separators, others with one digit."""
    return f"{value:,.0f}" if abs(value - round(value)) < 0.05 else f"{value:,.1f}"


def signed(value: float, digits: int = 2) -> str:
    """With its sign; a value that rounds to zero has a plus."""
    rounded = round(value, digits) + 0.0
    return f"{rounded:+.{digits}f}"


def change(fraction: float) -> str:
    """0.087 -> `+8.7 %`."""
    return f"{signed(100 * fraction, 1)} %"


def ranged(middle: float, low: float, high: float, show: Callable[[float], str]) -> str:
    """`1.05 (1.02 to 1.08)`."""
    return f"{show(middle)} ({show(low)} to {show(high)})"


def number(digits: int = 3, factor: float = 1.0, unit: str = "") -> Callable[[float], str]:
    """Writes a number times `factor` with so many decimals and thousands separators."""

    def show(value: float) -> str:
        return f"{factor * value:,.{digits}f}{unit}" if math.isfinite(value) else str(value)

    return show


def significant(digits: int = 4, factor: float = 1.0) -> Callable[[float], str]:
    """Writes a number times `factor` with so many figures."""
    return lambda value: f"{factor * value:,.{digits}g}"


def loss(value: float, sign: str = "") -> str:
    """With four decimals, or four figures where that is more: a field model's NMAE has two zeros after its point."""
    return f"{value:{sign},.4f}" if abs(value) >= 0.1 or not value else f"{value:{sign}.4g}"


share = number(2, 100.0, " %")
"""Writes a fraction in per cent, with two decimals."""
