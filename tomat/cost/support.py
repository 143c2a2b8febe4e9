"""What an estimate of a step rests on, and how far off it may therefore be.

Each part of the step has the error that the chip's model shows on kernels of its kind, left out of its fit. Within a
kind errors add up, since kernels of a step are alike; between kinds they are independent. What no measured kind of
kernel covers has an error that is assumed, and said to be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tomat.cost.chip_model import ChipModel
from tomat.cost.op_times import OpTimes

ASSUMED_ERROR = 0.5
"""Of parts that rest on no measured kind: collectives, kernels whose bundles were not found, XLA's own cycles. (A
guess.)"""


@dataclass(frozen=True)
class Support:
    """A part of the step that rests on one kind of kernel."""

    kind: str
    """As `OpTimes.basis`."""
    seconds_per_step: float
    step_share: float
    error: float
    """Nine of ten measured kernels of the kind are closer, as a fraction; or `ASSUMED_ERROR`."""
    measured_kernels: int
    """How many kernels of the kind were measured; 0 where the error is assumed."""

    def to_dict(self) -> dict[str, Any]:
        """JSON; fractions and seconds."""
        return asdict(self)


def supports(ops: Iterable[OpTimes], model: ChipModel) -> tuple[Support, ...]:
    """What a step rests on, the largest part first.

    Args:
        ops: The kernels of a step, collectives settled.
        model: Of the chip.
    """
    seconds: dict[str, float] = defaultdict(float)
    for op in ops:
        if op.estimate:
            seconds[op.basis] += op.estimate * op.executions
    whole = sum(seconds.values())
    found = []
    for kind, part in sorted(seconds.items(), key=lambda item: -item[1]):
        known = None if model.borrowed else model.errors.get(kind)
        error, kernels = (ASSUMED_ERROR, 0) if known is None else (known.p90, known.kernels)
        found.append(Support(kind, part, part / whole, error, kernels))
    return tuple(found)


def step_error(parts: Iterable[Support]) -> float:
    """By which fraction a step may be off, either way."""
    return math.hypot(*(part.step_share * part.error for part in parts))
