"""The kernels of a timed program: the work of each, as `perf/cost/chip_model.py` takes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tomat.hardware.chips import Slice
from tomat.perf.cost.chip_model import NAMES, ChipModel, KernelWork, Parameters, WorkTable, bound_of, sustained_share
from tomat.perf.cost.estimate import PALLAS_TARGET, estimate_step
from tomat.perf.cost.llo import kept_schedules
from tomat.perf.profile.hlo_files import load_program
from tomat.perf.timed_kernels.child import OWN, PROGRAM_FILE, SCHEDULE_FILE
from tomat.perf.timed_kernels.timings import KernelTiming


@dataclass(frozen=True)
class ProgramWork:
    kernels: tuple[tuple[KernelWork, float], ...]
    pallas: bool
    unscheduled_pallas: tuple[str, ...]


def kept_work(folder: Path, slice_: Slice) -> ProgramWork:
    schedules = kept_schedules(folder / SCHEDULE_FILE, f"Delete {folder} and calibrate again.")
    program = load_program(folder / PROGRAM_FILE)
    # For the work alone: no parameters of the chip are needed, and there may be none yet.
    model = ChipModel(slice_.chip.name, Parameters(), borrowed=True)
    step = estimate_step(program, schedules, slice_, title="kernel", model=model)
    ops = step.ops.values()
    pallas = [op for op in ops if program.by_name[op.name].custom_call_target == PALLAS_TARGET]
    return ProgramWork(
        kernels=tuple((op.work, op.executions) for op in ops if op.work is not None and op.executions),
        pallas=bool(pallas),
        unscheduled_pallas=tuple(op.name for op in pallas if op.schedule is None),
    )


PRIOR = Parameters()
SPREAD = Parameters(
    hbm_read_efficiency=0.05,
    hbm_write_efficiency=0.05,
    sustained_slowdown=0.1,
    mxu_efficiency=0.05,
    bundle_efficiency=0.1,
    overlap_power=3.0,
    copy_seconds=1e-7,
    step_seconds=3e-7,
    kernel_seconds=1e-6,
)
"""How far from `PRIOR` a parameter may plausibly be. One that the kernels at hand do not decide stays there: being off
by this much counts as much as one kernel that is off by `PRIOR_WEIGHT`."""
PRIOR_WEIGHT = 0.01
LOWER = Parameters(0.4, 0.4, 0.0, 0.5, 0.4, 1.5, 0.0, 0.0, 0.0)
UPPER = Parameters(1.0, 1.0, 2.0, 1.1, 1.2, 40.0, 1e-6, 5e-6, 2e-5)
OUTLIER = 0.03
"""Beyond this error a kernel counts linearly, not by its square: what the model has no term for pulls less."""
FOLDS = 5


def _vector(parameters: Parameters) -> np.ndarray:
    return np.array([getattr(parameters, name) for name in NAMES])


def _parameters(vector: Sequence[float] | np.ndarray) -> Parameters:
    return Parameters(**dict(zip(NAMES, map(float, vector), strict=True)))


class TimedPrograms:
    """Programs with their measured times, all kernels of all of them in one table."""

    def __init__(self, programs: Sequence[tuple[KernelTiming, ProgramWork]], bandwidth: float) -> None:
        self.timings = [timing for timing, _ in programs]
        self.works = [kernel for _, work in programs for kernel in work.kernels]
        self.program = np.repeat(np.arange(len(programs)), [len(work.kernels) for _, work in programs])
        self.executions = np.array([times for _, times in self.works])
        self.table = WorkTable([work for work, _ in self.works], bandwidth)
        self.back_to_back = np.array([timing.op.startswith(OWN) for timing in self.timings], bool)
        """Rows of `tomat bench chip` are timed in a row of executions that lasts; tokamax's one by one."""
        self.measured = np.array([timing.seconds for timing in self.timings])

    def parts(self, at: Parameters) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(HBM, core, whole) seconds of one execution of each kernel, as long as its program lasts."""
        short = self._sum(self.table.parts(at, 0.0)[2])
        share = np.maximum(sustained_share(short), self.back_to_back)
        return self.table.parts(at, share[self.program])

    def _sum(self, kernel_seconds: np.ndarray) -> np.ndarray:
        return np.bincount(self.program, kernel_seconds * self.executions, len(self.timings))

    def seconds(self, at: Parameters) -> np.ndarray:
        return self._sum(self.parts(at)[2])

    def errors(self, at: Parameters) -> np.ndarray:
        """Estimate over measurement, minus one."""
        return self.seconds(at) / self.measured - 1.0

    def bounds(self, at: Parameters) -> list[str]:
        """What takes most of each program: a key of `chip_model.BOUNDS`."""
        hbm, core, whole = self.parts(at)
        totals: list[dict[str, float]] = [{} for _ in self.timings]
        for number, (work, times) in enumerate(self.works):
            bound = bound_of(work, (hbm[number], core[number], whole[number]), at)
            of_program = totals[self.program[number]]
            of_program[bound] = of_program.get(bound, 0.0) + times * whole[number]
        return [max(total, key=lambda name: total[name]) if total else "latency" for total in totals]


@dataclass(frozen=True)
class Fit:
    """The parameters that explain a chip's kernels best."""

    parameters: Parameters
    deviations: Mapping[str, float]
    """Standard error of each, from the kernels' scatter; the prior's spread where they say nothing of it."""
    held_out_errors: np.ndarray
    """Of each program, with parameters fitted to the others: those of its shape are left out with it."""


def fit(programs: TimedPrograms) -> Fit:
    """Fit a chip's parameters, and cross-validate by shape. Of at least as many programs as there are folds."""
    everyone = np.arange(len(programs.timings))
    best = _fit(programs, everyone, _vector(PRIOR))
    shapes = sorted({timing.shape_key for timing in programs.timings})  # hashes: their order is arbitrary
    fold_of = {shape: number % FOLDS for number, shape in enumerate(shapes)}
    fold = np.array([fold_of[timing.shape_key] for timing in programs.timings])
    held_out = np.zeros(len(everyone))
    for number in range(FOLDS):
        inside = everyone[fold != number]
        if len(inside) < len(everyone):
            at = _parameters(_fit(programs, inside, best.x).x)
            held_out[fold == number] = programs.errors(at)[fold == number]
    scaled = best.jac * _vector(SPREAD)  # the parameters have different units
    scatter = 2 * best.cost / max(1, len(everyone) - len(NAMES))
    deviations = np.sqrt(np.diag(np.linalg.inv(scaled.T @ scaled)) * scatter) * _vector(SPREAD)
    return Fit(_parameters(best.x), dict(zip(NAMES, map(float, deviations), strict=True)), held_out)


def _fit(programs: TimedPrograms, counted: np.ndarray, start: np.ndarray):
    """The result of `scipy.optimize.least_squares` on the logarithms of the errors."""
    from scipy.optimize import least_squares

    prior, spread = _vector(PRIOR), _vector(SPREAD)

    def residuals(vector: np.ndarray) -> np.ndarray:
        logs = np.log(programs.seconds(_parameters(vector)) / programs.measured)[counted]
        return np.concatenate([logs, PRIOR_WEIGHT * (vector - prior) / spread])

    lower, upper = _vector(LOWER), _vector(UPPER)
    return least_squares(
        residuals,
        np.clip(start, lower, upper),
        bounds=(lower, upper),
        x_scale=spread,
        loss="soft_l1",
        f_scale=OUTLIER,
    )
