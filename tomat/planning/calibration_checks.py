"""Which figures a calibration takes: finite, and of the size that their unit has.

One wrong row moves every estimate: 2,080 where 2.080 s were meant makes each step of that chip 31 times as long.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tomat.base.errors import TomatError

BOUNDS: dict[str, tuple[float, float, str]] = {
    "step_seconds": (1e-4, 600.0, "seconds"),
    "model_seconds": (1e-6, 600.0, "seconds"),
    "hbm_required_gib": (1e-3, 10_000.0, "GiB of one device"),
    "attention_share": (0.0, 1.0, "a fraction of the step"),
    "collectives_share": (0.0, 1.0, "a fraction of the step"),
    "matmul_share": (0.0, 1.0, "a fraction of the step"),
}
"""Figures of a row: the least, the most, the unit. The slowest step on record takes 5.76 s, the fastest planned one
some milliseconds: what is 100 times beyond either is no step of this kind any more, but another unit. The largest need
on record is 71.87 GiB; 100 times that is MiB."""

RATIO = 10.0
"""By which factor a measurement may differ from its plan, either way. The pods on record took 1.2 times as long as the
models say and needed 1 % more than planned; a slip of units is a factor of 60, 1,000 or 1,024."""

COMPARED = (("step_seconds", "model_seconds"), ("hbm_required_gib", "hbm_required_gib"))
"""(measured, predicted) of the same thing."""


def check_figures(figures: Any, where: str) -> None:
    """Refuse figures that are none: unknown keys, text, NaN, infinity, what is outside `BOUNDS`, no `fits`.

    Args:
        figures: `measured` or `predicted` of a row.
        where: File, row and field, for the error.

    Raises:
        TomatError: With the key, what was found and what was expected.
    """
    if not isinstance(figures, Mapping):
        raise TomatError(f"{where} is {figures!r}; expected a mapping of fits and {', '.join(BOUNDS)}.")
    for key, value in figures.items():
        if key == "fits":
            if not isinstance(value, bool):
                raise TomatError(f"{where}: fits is {value!r}; expected true or false.")
            continue
        if key not in BOUNDS:
            raise TomatError(f"{where} has the unknown figure {key!r}; expected some of fits, {', '.join(BOUNDS)}.")
        least, most, unit = BOUNDS[key]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or not least <= value <= most:
            raise TomatError(
                f"{where}: {key} is {value!r}; expected a number from {least:g} to {most:g}, {unit}. Correct the "
                "figure, or take the row out."
            )
    if "fits" not in figures:
        raise TomatError(f"{where} does not say whether the step fits; add fits: true or fits: false.")


def check_against_plan(measured: Mapping[str, Any], predicted: Mapping[str, Any], where: str) -> None:
    """Refuse a measurement that is `RATIO` times its plan or more, either way.

    Raises:
        TomatError: With both figures.
    """
    for found, planned in COMPARED:
        if measured.get(found) and predicted.get(planned):
            ratio = measured[found] / predicted[planned]
            if not 1 / RATIO <= ratio <= RATIO:
                unit = BOUNDS[found][2].split()[0]
                raise TomatError(
                    f"{where}: measured {found} is {measured[found]:g}, {ratio:.3g} times the "
                    f"{predicted[planned]:.4g} {unit} that were planned; a factor of {RATIO:g} is a slip of units. "
                    f"Correct the figure (it is in {unit}), or take the row out."
                )
