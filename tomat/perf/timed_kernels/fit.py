"""Fits the model of a chip to kernels and collectives that the chip has run, and gives its error on kernels that were
left out of the fit."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Positive, read_typed, typed
from tomat.hardware.chips import TPU_SLICES
from tomat.perf.cost.chip_model import NAMES, LinkRates, Parameters, WorkTable, bound_of, sustained_share
from tomat.perf.cost.interconnect import HOP_SECONDS, coordinates, entrances_and_hops, link_bandwidth
from tomat.perf.timed_kernels.programs import ProgramWork
from tomat.perf.timed_kernels.timings import OWN, KernelTiming

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
"""How far from `PRIOR` a parameter may plausibly be. A parameter that the kernels do not determine stays at `PRIOR`: a
deviation by this much counts as much as one kernel with an error of `PRIOR_WEIGHT`."""
PRIOR_WEIGHT = 0.01
LOWER = Parameters(0.4, 0.4, 0.0, 0.5, 0.4, 1.5, 0.0, 0.0, 0.0)
UPPER = Parameters(1.0, 1.0, 2.0, 1.1, 1.2, 40.0, 1e-6, 5e-6, 2e-5)
OUTLIER = 0.03
"""Beyond this error a kernel counts linearly, not by its square. Effects that the model has no term for pull less."""
FOLDS = 5


class TimedPrograms:
    """Programs with their measured times. The kernels of all programs are in one table."""

    def __init__(self, programs: Sequence[tuple[KernelTiming, ProgramWork]], bandwidth: float) -> None:
        self.timings = [timing for timing, _ in programs]
        self.works = [kernel for _, work in programs for kernel in work.kernels]
        self.program = np.repeat(np.arange(len(programs)), [len(work.kernels) for _, work in programs])
        self.executions = np.array([times for _, times in self.works])
        self.table = WorkTable([work for work, _ in self.works], bandwidth)
        self.back_to_back = np.array([timing.op.startswith(OWN) for timing in self.timings], bool)
        """`tomat bench chip` times many executions in succession; tokamax times them one by one."""
        self.measured = np.array([timing.seconds for timing in self.timings])

    def parts(self, at: Parameters) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(HBM, core, whole) seconds of one execution of each kernel, sustained as long as its program lasts."""
        short = self._sum(self.table.parts(at, 0.0)[2])
        share = np.maximum(sustained_share(short), self.back_to_back)
        return self.table.parts(at, share[self.program])

    def _sum(self, kernel_seconds: np.ndarray) -> np.ndarray:
        return np.bincount(self.program, kernel_seconds * self.executions, len(self.timings))

    def seconds(self, at: Parameters) -> np.ndarray:
        return self._sum(self.parts(at)[2])

    def errors(self, at: Parameters) -> np.ndarray:
        """Estimate divided by measurement, minus one."""
        return self.seconds(at) / self.measured - 1.0

    def bounds(self, at: Parameters) -> list[str]:
        """What takes most of each program's time: a key of `chip_model.BOUNDS`."""
        hbm, core, whole = self.parts(at)
        totals: list[dict[str, float]] = [{} for _ in self.timings]
        for number, (work, times) in enumerate(self.works):
            bound = bound_of(work, hbm[number], core[number], at)
            of_program = totals[self.program[number]]
            of_program[bound] = of_program.get(bound, 0.0) + times * whole[number]
        return [max(total, key=lambda name: total[name]) if total else "latency" for total in totals]


@dataclass(frozen=True)
class Fit:
    """The parameters that explain a chip's kernels best."""

    parameters: Parameters
    deviations: Mapping[str, float]
    """Standard error of each, from the kernels' scatter; if undetermined, `SPREAD` times scatter / `PRIOR_WEIGHT`."""
    held_out_errors: np.ndarray
    """The error of each program, with parameters fitted to the other folds. Programs of one shape are in one fold."""


def fit(programs: TimedPrograms) -> Fit:
    """Fit a chip's parameters to at least `FOLDS` programs, and cross-validate by shape."""
    everyone = np.arange(len(programs.timings))
    best = _fit(programs, everyone, np.array(astuple(PRIOR)))
    shapes = sorted({timing.shape_key for timing in programs.timings})  # hashes: their order is arbitrary
    fold_of = {shape: number % FOLDS for number, shape in enumerate(shapes)}
    fold = np.array([fold_of[timing.shape_key] for timing in programs.timings])
    held_out = np.zeros(len(everyone))
    for number in range(FOLDS):
        inside = everyone[fold != number]
        if len(inside) < len(everyone):
            at = Parameters(*_fit(programs, inside, best.x).x.tolist())
            held_out[fold == number] = programs.errors(at)[fold == number]
    spread = np.array(astuple(SPREAD))
    scaled = best.jac * spread  # the parameters have different units
    scatter = 2 * best.cost / max(1, len(everyone) - len(NAMES))
    deviations = np.sqrt(np.diag(np.linalg.inv(scaled.T @ scaled)) * scatter) * spread
    return Fit(Parameters(*best.x.tolist()), dict(zip(NAMES, map(float, deviations), strict=True)), held_out)


def _fit(programs: TimedPrograms, counted: np.ndarray, start: np.ndarray):
    """The result of `scipy.optimize.least_squares` on the logarithms of estimate over measurement."""
    from scipy.optimize import least_squares

    prior, spread, lower, upper = (np.array(astuple(one)) for one in (PRIOR, SPREAD, LOWER, UPPER))

    def residuals(vector: np.ndarray) -> np.ndarray:
        logs = np.log(programs.seconds(Parameters(*vector.tolist())) / programs.measured)[counted]
        return np.concatenate([logs, PRIOR_WEIGHT * (vector - prior) / spread])

    return least_squares(
        residuals, np.clip(start, lower, upper), bounds=(lower, upper), x_scale=spread, loss="soft_l1", f_scale=OUTLIER
    )


PASSES = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}
"""Kinds that go round a ring, and how many times: an all-reduce scatters, then gathers."""
PERMUTE = "collective-permute"
"""Between neighbours: one hop."""


@dataclass(frozen=True)
class _Line:
    start_seconds: Amount
    bytes_per_second: Amount | None


@dataclass(frozen=True)
class _Report:
    chip: str
    n_devices: Positive
    collective_fits: dict[str, _Line]
    timed_with: Any


def measured_rates(timings: Path) -> tuple[str, dict[str, Any]] | None:
    """The chip and its rates of collectives, from the JSON that `tomat bench chip` writes beside its file of timings;
    None if there is no such file, or it has no collectives (it is of one device).

    The fits in it say `seconds = start + bytes moved / rate` for each kind. The planner's model
    (`perf/cost/interconnect.py`) separates hops from the start, and has the rate as a share of the links' bandwidth in
    a ring over the whole slice.
    """
    path = timings.with_suffix(".json")
    if not path.is_file():
        return None
    how = "Restore it, or move it away from beside the CSV."
    report = read_typed(path, _Report, how)
    chip, n_devices, fits = report.chip, report.n_devices, report.collective_fits
    rings = {kind: fits[kind] for kind in PASSES if kind in fits}
    if not rings:
        return None
    slices = [each for each in TPU_SLICES.values() if each.chip.name == chip and each.n_devices == n_devices]
    if not slices:
        raise TomatError(f"{path}: no TPU slice of {n_devices} devices of {chip} is known.")
    places = [coordinates(device, slices[0]) for device in range(n_devices)]
    entrances, across = entrances_and_hops(places, slices[0])
    hops = {kind: passes * across for kind, passes in PASSES.items()} | {PERMUTE: 1}
    starts = [fits[kind].start_seconds - hops[kind] * HOP_SECONDS for kind in hops if kind in fits]
    nominal = entrances * link_bandwidth(slices[0])
    shares = [fit.bytes_per_second / nominal for fit in rings.values() if fit.bytes_per_second]
    found = {"start_seconds": max(0.0, float(np.median(starts))), "ring_efficiency": float(np.median(shares or [0.0]))}
    rates = typed(found, LinkRates, path, how)
    return chip, asdict(rates) | {"slice": slices[0].name, "timed_with": str(report.timed_with)}
