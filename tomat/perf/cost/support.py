"""What an estimate of a step rests on, and how far off it may therefore be.

Each part of the step has the error that the chip's model shows on kernels of its kind, left out of its fit. Within a
kind errors add up, since kernels of a step are alike; between kinds they are independent.

What a chip's timings do not cover is a part of its own. Where another chip has timed the operation, the part has the
error of that chip's model there: on TPU7x the kernels of attention's backward pass are off by 14.5 % and those of the
loss by 30 % (nine of ten; `docs/tracking/kernels.md`), of which no v6e has timed any, while a v6e's kernels by what
bounds them are right to 5 %. For all else the error is assumed. Both are said to be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from tomat.base.report.formats import percent
from tomat.perf.cost.chip_model import BOUNDS, ChipModel
from tomat.perf.cost.op_times import OpTimes
from tomat.perf.profile.categories import Category

ASSUMED_ERROR = 0.5
"""Of parts that rest on no measured kind: collectives, kernels whose bundles were not found, XLA's own cycles, Pallas
kernels that no chip has timed the like of. (A guess.)"""

_LOSS = "pallas_mosaic_tpu_linear_softmax_cross_entropy_loss"
PALLAS_OPERATIONS = {
    Category.ATTENTION_FORWARD: ("pallas_mosaic_tpu_flash_attention",),
    Category.ATTENTION_BACKWARD: ("pallas_mosaic_tpu_flash_attention_vjp",),
    Category.LOSS: (_LOSS, f"{_LOSS}_vjp"),
}
"""What a Pallas kernel does -> the timed operations that do the same (`kernels.json`)."""
PALLAS = "Pallas: "
"""Begins the kind of a part of Pallas kernels that the chip's timings do not cover; what they do follows."""


@dataclass(frozen=True)
class Support:
    """A part of the step that rests on one kind of kernel."""

    kind: str
    """As `OpTimes.basis`, or `PALLAS` and what the kernels do."""
    seconds_per_step: float
    step_share: float
    error: float
    """Nine of ten measured kernels of the kind are closer, as a fraction; or `ASSUMED_ERROR`."""
    measured_kernels: int
    """How many kernels of the kind the chip has timed; 0 where none."""
    chips: tuple[str, ...] = ()
    """Where it has timed none: the chips that the error is from; none: it is assumed."""

    @property
    def name(self) -> str:
        """For a reader."""
        if self.kind.startswith(PALLAS):
            return f"Pallas kernels, {self.kind.removeprefix(PALLAS)}"
        return BOUNDS.get(self.kind) or self.kind or "nothing known"

    @property
    def timed(self) -> str:
        """How many kernels of the kind were timed, for a reader."""
        if self.measured_kernels:
            return f"{self.measured_kernels:,}"
        return f"none: error as on {', '.join(self.chips)}" if self.chips else "none: assumed"

    def to_dict(self) -> dict[str, Any]:
        """JSON; fractions and seconds."""
        return {**asdict(self), "chips": list(self.chips)}


def supports(ops: Iterable[OpTimes], model: ChipModel) -> tuple[Support, ...]:
    """What a step rests on, the largest part first.

    Args:
        ops: The kernels of a step, collectives settled.
        model: Of the chip.
    """
    seconds: dict[str, float] = defaultdict(float)
    unlike: dict[str, Category] = {}
    for op in ops:
        if op.estimate:
            kind = op.basis
            if op.pallas and not _is_timed(op.category, model):
                kind = f"{PALLAS}{op.category}"
                unlike[kind] = op.category
            seconds[kind] += op.estimate * op.executions
    whole = sum(seconds.values())
    found = []
    for kind, part in sorted(seconds.items(), key=lambda item: -item[1]):
        known = None if model.borrowed or kind in unlike else model.errors.get(kind)
        if known is not None:
            found.append(Support(kind, part, part / whole, known.p90, known.kernels))
        else:
            error, chips = _error_elsewhere(unlike[kind], model) if kind in unlike else (ASSUMED_ERROR, ())
            found.append(Support(kind, part, part / whole, error, 0, chips))
    return tuple(found)


def _is_timed(category: Category, model: ChipModel) -> bool:
    """Whether the chip has timed all that Pallas kernels of a category do."""
    names = PALLAS_OPERATIONS.get(category, ())
    return bool(names) and all(model.chip in model.operations.get(name, {}) for name in names)


def _error_elsewhere(category: Category, model: ChipModel) -> tuple[float, tuple[str, ...]]:
    """(error of the worst chip that has timed what Pallas kernels of a category do, the chips)."""
    timed = [model.operations.get(name, {}) for name in PALLAS_OPERATIONS.get(category, ())]
    if not timed or not all(timed):
        return ASSUMED_ERROR, ()
    # Estimates of these are too short: what is planned 30 % short takes 1 / 0.7 of its plan.
    worst = min(0.9, max(error.p90 for errors in timed for error in errors.values()))
    return 1 / (1 - worst) - 1, tuple(sorted({chip for errors in timed for chip in errors}))


def step_error(parts: Iterable[Support]) -> float:
    """By which fraction a step may be off, either way."""
    return math.hypot(*(part.step_share * part.error for part in parts))


def untimed_share(parts: Iterable[Support]) -> float:
    """Share of the step that rests on kernels which the chip has timed none like."""
    return sum(part.step_share for part in parts if not part.measured_kernels)


def untimed_text(parts: Iterable[Support]) -> str:
    """`30.0 %: Pallas kernels, attention backward 18.5 %, interconnect 6.2 %, ...`."""
    untimed = [part for part in parts if not part.measured_kernels and part.step_share >= 0.0005]
    names = ", ".join(f"{part.name} {percent(part.step_share)}" for part in untimed)
    return percent(untimed_share(untimed)) + (f": {names}" if names else "")
