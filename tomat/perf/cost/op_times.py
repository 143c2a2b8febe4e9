"""One kernel of a compiled step by each of the cycle models."""

from __future__ import annotations

from dataclasses import dataclass

from tomat.perf.cost.chip_model import KernelWork
from tomat.perf.cost.roofline import RooflineTime
from tomat.perf.cost.schedule_model import ScheduleTime
from tomat.perf.profile.categories import Category

MODELS = ("compiler", "roofline", "schedule", "estimate")

PALLAS_TARGET = "tpu_custom_call"
"""Custom-call target of a Pallas kernel on a TPU."""


@dataclass(frozen=True)
class OpTimes:
    """One kernel: seconds of one execution by each model, None where a model knows nothing of it."""

    name: str
    category: Category
    executions: float
    compiler: float | None
    roofline: RooflineTime | None
    schedule: ScheduleTime | None
    estimate: float | None
    basis: str
    """What the estimate rests on: what bounds the kernel (`chip_model.BOUNDS`), `unscheduled <bound>` where its bundles
    were not found, `interconnect`, `compiler`, or `beside other kernels`; "" where it has none."""
    work: KernelWork | None = None
    """What the chip's model made the estimate of; None where it knows nothing of the kernel."""
    pallas: bool = False
    """Whether it is a Pallas kernel, of which only those like a timed one are known to be right."""

    def seconds(self, model: str) -> float | None:
        """One execution by one of `MODELS`."""
        if model == "roofline":
            return self.roofline.seconds if self.roofline is not None else None
        if model == "schedule":
            return self.schedule.seconds if self.schedule is not None else None
        return self.compiler if model == "compiler" else self.estimate
