"""Seconds of a kernel on a chip: the time of its schedule and its copies at the chip's nominal rates, corrected by the
measured share of these rates that the chip reaches.

The parameters are few and physical, and fitted to kernels that TPUs have run (`tomat/perf/timed_kernels`;
`docs/tracking/kernels.md` has the errors). HBM and core run side by side: a kernel takes about the longer of the two.

    hbm  = sum over copies of times * (bytes / (efficiency * bandwidth) * (1 + sustained) + copy)
    core = mxu / mxu_efficiency + (bundles - mxu) / bundle_efficiency
    kernel = max((hbm^p + core^p)^(1/p), steps * step) + fixed
"""

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from tomat.base.records import Amount, Count, read_typed
from tomat.base.report.formats import percent
from tomat.hardware.chip_table import Chip

if TYPE_CHECKING:  # a plan from the cache reads no program
    from tomat.perf.cost.llo import Transfer

RING_EFFICIENCY = 236 / 400
"""Share of the links' nominal bandwidth that ring collectives reach: an all-reduce over 16 x 16 v6e reports 236 GB/s of
bus bandwidth, of 400 on its four links (AI-Hypercomputer/tpu-recipes, microbenchmarks). No other figure is at hand."""
START_SECONDS = 20e-6
"""Time that the step waits for each collective, however much runs beside it: its start, and the barrier between chips
that are not in step. Windowed einsums show it: collectives take 5.5 % of the 200M pod's step, 36 us for each of its
3,174, and 2.1 % of the 1B pod's, 12 us for each of its 10,087 (`docs/tracking/calibration.yaml`)."""
MODELS = ("compiler", "roofline", "schedule", "estimate")

RECORD_FILE = "kernels.json"
PACKAGED_FILE = Path(__file__).with_name(RECORD_FILE)
"""The release's record in an installed tomat (`pyproject.toml` puts it there). A checkout has it in `docs`."""
CHECKOUT_FILE = Path(__file__).parents[3] / "docs" / "tracking" / RECORD_FILE

SUSTAINED_FROM_SECONDS, SUSTAINED_SECONDS = 0.01, 0.03
"""HBM is slower in programs that keep it busy for long: it has its full rate in programs up to the first of these
times, the sustained rate from the second on, and a logarithmic interpolation in between. For 281 kernels of a v6e
(timings of openxla/tokamax) this halves the scatter, from 6.3 to 3.3 % (root mean square of kernels left out of the
fit). The program's memory, and the sizes and pieces of arrays, explain less, and nothing in addition. HBM-bound fusions
of an 8B's step reach 0.75 to 0.77 of the nominal rate (vlasenkoalexey/tpu_performance_autoresearch_wiki)."""


@dataclass(frozen=True)
class LinkRates:
    """Rates of a chip's collectives. `tomat bench chip` measures both."""

    start_seconds: float = START_SECONDS
    """Time that the step waits for each collective."""
    ring_efficiency: float = RING_EFFICIENCY
    """Share of the links' nominal bandwidth that ring collectives reach."""

    def __post_init__(self) -> None:
        if not 0 <= self.start_seconds < 1:
            raise ValueError(f"a collective starts in {self.start_seconds:g} s; expected 0 to 1")
        if not 0 < self.ring_efficiency <= 1:
            raise ValueError(f"rings reach {self.ring_efficiency:g} of the links' bandwidth; expected up to 1")


ASSUMED_RATES = LinkRates()
"""Rates of chips that `tomat bench chip` has not measured."""


@dataclass(frozen=True)
class Parameters:
    """The measured rates of a chip, relative to its nominal rates."""

    hbm_read_efficiency: float = 0.93
    """Share of the nominal bandwidth at which HBM is read."""
    hbm_write_efficiency: float = 0.95
    """Share of the nominal bandwidth at which HBM is written."""
    sustained_slowdown: float = 0.25
    """Relative extra time of bytes in a program of `SUSTAINED_SECONDS` or more, such as a training step."""
    mxu_efficiency: float = 0.97
    """Planned / measured cycles in which a matrix unit is busy."""
    bundle_efficiency: float = 0.85
    """Planned / measured other cycles. It is below 1 because bundles wait for what they load."""
    overlap_power: float = 5.0
    """p of the module's formula: 1 if HBM and core take turns, infinite if the shorter is fully hidden."""
    copy_seconds: float = 1e-7
    """Time of the core or of the queue for each copy that is started."""
    step_seconds: float = 3e-7
    """Least time of a grid step: the latency of the copy that it waits for."""
    kernel_seconds: float = 5e-7


NAMES = tuple(Parameters.__dataclass_fields__)


@dataclass(frozen=True)
class KernelWork:
    """One execution of a kernel on one core, before the chip's efficiencies are applied."""

    core_seconds: float
    """Bundles of its schedule, one per cycle; without a schedule, products and vector operations at their peaks."""
    mxu_seconds: float
    """The part of these in which the busiest matrix unit works."""
    copies: "tuple[tuple[Transfer, float], ...]"
    """Copies between HBM and the core, and how often each is started."""
    steps: float = 1.0
    """Active steps of its grid; 1 without a grid."""
    scheduled: bool = True
    """Whether the compiler's schedule was found."""


def core_bandwidth(chip: Chip) -> float:
    """Nominal HBM bytes/s of one TensorCore. If a chip's cores are one device, a kernel is compiled once, and each core
    runs its part of the grid."""
    return (chip.hbm_bytes_per_second or 0.0) / (chip.n_cores or 1)


def sustained_share(program_seconds: np.ndarray) -> np.ndarray:
    """How far programs have reached HBM's sustained rate: 0 for short programs, 1 for long ones. `program_seconds` is
    the time of each at HBM's full rate."""
    last = np.log(SUSTAINED_SECONDS / SUSTAINED_FROM_SECONDS)
    return np.clip(np.log(np.maximum(program_seconds, 1e-9) / SUSTAINED_FROM_SECONDS) / last, 0.0, 1.0)


class WorkTable:
    """Kernels as arrays, so that a fit computes the times of thousands at once."""

    def __init__(self, works: Sequence[KernelWork], bandwidth: float) -> None:
        """The kernels keep their order. `bandwidth` is that of `core_bandwidth`."""
        self.n = len(works)
        rows = [
            (number, copy.written, copy.size_bytes, times)
            for number, work in enumerate(works)
            for copy, times in work.copies
        ]
        columns = np.array(rows, np.float64).reshape(-1, 4).T
        self.kernel, self.written = columns[0].astype(int), columns[1] > 0
        size, times = columns[2:]
        self.seconds = size * times / bandwidth
        self.copies = np.bincount(self.kernel, times, self.n)
        self.mxu = np.array([work.mxu_seconds for work in works])
        self.core = np.array([work.core_seconds for work in works])
        self.steps = np.array([work.steps for work in works])
        self.launched = np.array([float(work.scheduled) for work in works])
        """1 for kernels with a schedule. A kernel without bundles is a scalar, or a copy within another kernel."""

    def parts(self, at: Parameters, sustained: float | np.ndarray = 1.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(HBM, core, whole) seconds of each kernel. `sustained` is the `sustained_share` of each kernel's program: 0
        for short programs, 1 for long ones."""
        rate = np.where(self.written, at.hbm_write_efficiency, at.hbm_read_efficiency)
        slower = 1 + at.sustained_slowdown * np.broadcast_to(sustained, self.n)
        hbm = slower * np.bincount(self.kernel, self.seconds / rate, self.n) + at.copy_seconds * self.copies
        core = self.mxu / at.mxu_efficiency + np.maximum(0.0, self.core - self.mxu) / at.bundle_efficiency
        longer = np.maximum(np.maximum(hbm, core), 1e-18)
        shorter = np.minimum(hbm, core) / longer
        both = longer * (1 + shorter**at.overlap_power) ** (1 / at.overlap_power)
        stepped = np.where(self.steps > 1, self.steps * at.step_seconds, 0.0)
        return hbm, core, np.maximum(both, stepped) + at.kernel_seconds * self.launched


BOUNDS = {"hbm": "HBM", "mxu": "matrix unit", "bundles": "other bundles", "latency": "steps of the grid"}
"""What bounds a kernel -> its name on a page."""


def bound_of(work: KernelWork, hbm: float, core: float, at: Parameters) -> str:
    """Which of `BOUNDS` takes the longest, by the seconds of HBM and core."""
    if work.steps > 1 and work.steps * at.step_seconds > max(hbm, core):
        return "latency"
    if hbm >= core:
        return "hbm"
    return "mxu" if work.mxu_seconds / at.mxu_efficiency > core / 2 else "bundles"


@dataclass(frozen=True)
class ParameterOnRecord:
    value: float
    deviation: Amount | None = None


class ErrorsOnRecord(TypedDict):
    """Absolute errors, as fractions, for kernels of one kind that were left out of the fit."""

    kernels: Count
    absolute_error_median: Amount
    absolute_error_p90: Amount


@dataclass(frozen=True)
class ChipOnRecord:
    """The part of a chip's record in `kernels.json` that plans use."""

    fitted: bool
    parameters: dict[str, ParameterOnRecord]
    all: ErrorsOnRecord
    bounds: dict[str, ErrorsOnRecord]
    collectives: LinkRates | None = None
    operations: dict[str, ErrorsOnRecord] = field(default_factory=dict)
    """Empty in older records."""

    def __post_init__(self) -> None:
        if missing := sorted(set(NAMES) - set(self.parameters)):
            raise ValueError(f"expected the parameter {missing[0]}")


@dataclass(frozen=True)
class _Record:
    chips: dict[str, ChipOnRecord]


def record_files(tracking_dir: Path | None = None) -> tuple[Path, ...]:
    """The `kernels.json` of `tracking_dir` and that of the release, if they exist."""
    own = [tracking_dir / RECORD_FILE] if tracking_dir is not None else []
    release = [place for place in (PACKAGED_FILE, CHECKOUT_FILE) if place.is_file()]
    return tuple(path for path in (*own, *release[:1]) if path.is_file())


def record_digest(tracking_dir: Path | None = None) -> str:
    """A hash of the content of `record_files`, for caches of estimates that use it."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in record_files(tracking_dir))).hexdigest()


@dataclass(frozen=True)
class ChipModel:
    """The parameters of a chip, and how well they fit it."""

    chip: str
    parameters: Parameters
    errors: Mapping[str, ErrorsOnRecord] = field(default_factory=dict)
    """What bounds a kernel (`BOUNDS`, or `all`) -> the model's errors on such kernels."""
    borrowed: bool = False
    """Whether the parameters are those of another chip, because this one has none."""
    links: LinkRates = ASSUMED_RATES
    operations: Mapping[str, Mapping[str, ErrorsOnRecord]] = field(default_factory=dict)
    """Operation of a timed kernel (`kernels.json`) -> chip that has timed it -> the errors of that chip's model."""

    def time(self, work: KernelWork, bandwidth: float) -> tuple[float, str]:
        """Seconds of one execution of a kernel in a long program, such as a training step, and which of `BOUNDS`
        takes them. `bandwidth` is that of `core_bandwidth`."""
        hbm, core, whole = (float(part[0]) for part in WorkTable([work], bandwidth).parts(self.parameters))
        return whole, bound_of(work, hbm, core, self.parameters)

    def notes(self) -> tuple[str, ...]:
        said = []
        if self.borrowed:
            what = "what it reaches of its rates is taken from another chip"
            said.append(f"no kernels of {self.chip} are on record: {what}")
        if self.links != ASSUMED_RATES:
            found = f"{1e6 * self.links.start_seconds:.3g} us to start, rings at {self.links.ring_efficiency:.0%}"
            said.append(f"collectives by `tomat bench chip`: {found} of the links")
        return tuple(said)

    @staticmethod
    def load(tracking_dir: Path | None, chip: Chip) -> "ChipModel":
        """The model of a chip from the first of `record_files` in which the chip is fitted. Otherwise it has the
        parameters of the chip with the most kernels, and is marked `borrowed`."""
        how = "Restore it, or delete it and write it again with tomat plan --calibrate --kernels FILE."
        found = [read_typed(path, _Record, how).chips for path in reversed(record_files(tracking_dir))]
        fitted = {name: one for chips in found for name, one in chips.items() if one.fitted}
        links = {name: one.collectives for chips in found for name, one in chips.items() if one.collectives is not None}
        operations: dict[str, dict[str, ErrorsOnRecord]] = {}
        for name, one in fitted.items():
            for operation, errors in one.operations.items():
                operations.setdefault(operation, {})[name] = errors
        own = fitted.get(chip.name)
        shown = own or max(fitted.values(), key=lambda one: one.all["kernels"], default=None)
        return ChipModel(
            chip.name,
            Parameters(**{key: shown.parameters[key].value for key in NAMES}) if shown else Parameters(),
            {**own.bounds, "all": own.all} if own else {},
            borrowed=own is None,
            links=links.get(chip.name, ASSUMED_RATES),
            operations=operations,
        )


PALLAS = "Pallas: "
"""Prefix of the kind of Pallas kernels that the chip's timings do not cover. The category of their work follows."""


@dataclass(frozen=True)
class Support:
    """A part of the step that rests on one kind of kernel."""

    kind: str
    """As `OpTimes.basis`, or `PALLAS` and the category of the kernels' work."""
    seconds_per_step: float
    step_share: float
    error: float
    """Error, as a fraction, that nine of ten measured kernels of the kind do not exceed; or `ASSUMED_ERROR`."""
    measured_kernels: int
    """Number of kernels of the kind that the chip has timed."""
    chips: tuple[str, ...] = ()
    """If the chip has timed none: the chips from which the error is taken. Empty: the error is assumed."""

    @property
    def name(self) -> str:
        if self.kind.startswith(PALLAS):
            return f"Pallas kernels, {self.kind.removeprefix(PALLAS)}"
        return BOUNDS.get(self.kind) or self.kind or "nothing known"

    @property
    def timed(self) -> str:
        if self.measured_kernels:
            return f"{self.measured_kernels:,}"
        return f"none: error as on {', '.join(self.chips)}" if self.chips else "none: assumed"


def step_error(parts: Iterable[Support]) -> float:
    """The fraction by which a step may be wrong, either way."""
    return math.hypot(*(part.step_share * part.error for part in parts))


def untimed_share(parts: Iterable[Support]) -> float:
    """Share of the step in kernels that are unlike any that the chip has timed."""
    return sum(part.step_share for part in parts if not part.measured_kernels)


def untimed_text(parts: Iterable[Support]) -> str:
    """`30.0 %: Pallas kernels, attention backward 18.5 %, interconnect 6.2 %, ...`."""
    untimed = [part for part in parts if not part.measured_kernels and part.step_share >= 0.0005]
    names = ", ".join(f"{part.name} {percent(part.step_share)}" for part in untimed)
    return percent(untimed_share(untimed)) + (f": {names}" if names else "")
