"""The lab's record of a sweep: every window of every row, in one JSON file that is complete after each row."""

import hashlib
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from msgspec import Meta

from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, Positive
from tomat.base.reporting import dump_json
from tomat.hardware.mfu import MFU_KEYS
from tomat.measure.lab.messages import MEASURED, Status
from tomat.measure.lab.speedup import Ratio, StartNoise, ratio_of_starts
from tomat.perf.tuning.changes import override_words
from tomat.perf.tuning.sweep_config import SweepRow
from tomat.perf.tuning.sweep_record import Interval, Seconds, SweptRow

LAB_DIR = "lab"
"""Folder of the records in the tracking folder."""

Rate = Annotated[float, Meta(ge=1e-3, le=1e15)]
"""Tokens a second. The bounds are needed because exponentials of ratios and their spread are computed."""


@dataclass(frozen=True)
class Window:
    """Steps that were timed together."""

    round: Count
    step_seconds: Seconds
    tokens_per_second: Rate
    base_tokens_per_second: Rate | None = None
    """Tokens a second of the base's window beside this one; None for a base, or if the base has no such window."""
    waiting_for_data_seconds: Amount = 0.0
    """Time of a step."""
    others_busy_share: Amount = 0.0
    """Share of this machine's processors that other processes used during the window."""
    loss: float | None = None
    step_joules: Amount | None = None
    """Joules of a step, from the devices' own counters; None if they have none."""
    mfu: Mapping[str, Amount] = field(default_factory=dict)
    """MFU by `MFU_KEYS`; empty if the chip's peak is not known."""

    def __post_init__(self) -> None:
        if self.mfu and not set(MFU_KEYS) <= set(self.mfu):
            raise ValueError(f"expected mfu by {', '.join(MFU_KEYS)}")


class Setup(TypedDict, total=False):
    """The keys of `Session.described` that are not in `Start`."""

    config_hash: str
    platform: str
    devices: str
    chips: Count
    hosts: Count | None
    asked_slice: str | None
    batch_sequences: Positive
    sequence_tokens: Positive
    accumulations: Positive
    dispatch_ahead: Count | None
    shuffle_rows: Count | None
    shuffle: str | None
    compute_dtype: str
    optimizer: str
    parameters: Count
    train_rows: Count
    start_memory_bytes: Count
    first_loss: float | None
    warm_loss: float | None
    warm_loss_step: Count
    energy_source: str | None
    memory_source: Literal["device", "process"]


class Start(TypedDict):
    """The keys of `Session.described` about the start of one process: seconds, bytes, counts."""

    compile_seconds: Amount
    compile_saved_seconds: float
    """Negative if reading the cache took longer than the compile had taken."""
    compiled_programs: Count
    peak_memory_bytes: Count
    start_seconds: NotRequired[Amount]
    first_step_seconds: NotRequired[Amount]


SHOWN_SETUP = {"devices", "batch_sequences", "sequence_tokens", "accumulations", "train_rows"}
"""Keys of `Setup` that a measured row must have."""


@dataclass(kw_only=True)
class LabRow(SweptRow):
    key: str
    """Hash of what was asked (`question_key`). Windows with another key are dropped."""
    status: Status | Literal[""] = ""
    """Empty: not finished; else a status of `messages.py`."""
    reason: str = ""
    rounds_done: Count = 0
    windows: list[Window] = field(default_factory=list)
    setup: Setup = field(default_factory=Setup)
    """Setup of the last start; empty if there was no start."""
    starts: list[Start] = field(default_factory=list)
    """Every start; its `peak_memory_bytes` is the peak up to the last window."""
    memory_limit_bytes: Count | None = None
    start_noise: StartNoise | None = None
    """Noise of a start over all rows of the sweep; None: no row was started twice, or the record is older."""

    @property
    def measured(self) -> bool:
        return self.status == MEASURED

    @property
    def speed(self) -> Interval | None:
        rates = [window.tokens_per_second for window in self.windows] if self.measured else []
        return Interval(estimate=statistics.median(rates), low=min(rates), high=max(rates)) if rates else None

    @property
    def memory_bytes(self) -> int:
        return self.peak_memory_bytes or 0

    @property
    def limit_bytes(self) -> int | None:
        return self.memory_limit_bytes

    @property
    def rank(self) -> tuple[bool, float, str]:
        return not self.measured, -(self.tokens_per_second or 0.0), self.name

    @property
    def is_whole(self) -> bool:
        """Whether a measured row has everything that pages show."""
        return not self.measured or bool(self.windows and self.starts and self.setup.keys() >= SHOWN_SETUP)

    # Figures are medians of the windows.

    @property
    def tokens_per_second(self) -> float | None:
        return median(window.tokens_per_second for window in self.windows)

    @property
    def step_seconds(self) -> float | None:
        return median(window.step_seconds for window in self.windows)

    @property
    def compile_cold_seconds(self) -> float | None:
        """Time to lower and compile the programs of the first step without the cache. A program from the cache counts
        with the time that JAX recorded when it was compiled, for this row or for one with the same programs."""
        found = [start["compile_seconds"] + start["compile_saved_seconds"] for start in self.starts]
        return found[0] if found else None

    @property
    def compile_cached_seconds(self) -> float | None:
        """The same time with every program from the cache: the least over such starts; None if there was none."""
        return min((one["compile_seconds"] for one in self.starts if not one["compiled_programs"]), default=None)

    @property
    def peak_memory_bytes(self) -> int | None:
        """Peak memory over the starts that did not compile, where it is the step's; if there are none, over all."""
        cached = [one["peak_memory_bytes"] for one in self.starts if not one["compiled_programs"]]
        return max(cached or [one["peak_memory_bytes"] for one in self.starts], default=None)

    @property
    def step_joules(self) -> float | None:
        """Median of the windows; None if the devices have no counter."""
        return median(window.step_joules for window in self.windows if window.step_joules is not None)

    @property
    def tokens_per_joule(self) -> float | None:
        known = (one for one in self.windows if one.step_joules)
        return median(one.tokens_per_second * one.step_seconds / one.step_joules for one in known if one.step_joules)

    @property
    def mfu(self) -> dict[str, float]:
        known = [window.mfu for window in self.windows if window.mfu]
        return {key: statistics.median(one[key] for one in known) for key in MFU_KEYS} if known else {}

    @property
    def start_ratios(self) -> list[list[float]]:
        """For each start, the ratio of tokens a second to the base's, window by window."""
        starts: dict[int, list[float]] = defaultdict(list)
        for one in self.windows:
            if one.base_tokens_per_second:
                starts[one.round].append(one.tokens_per_second / one.base_tokens_per_second)
        return list(starts.values())

    @property
    def ratio(self) -> Ratio | None:
        return ratio_of_starts(self.start_ratios, self.start_noise)

    def to_dict(self) -> dict[str, Any]:
        """The entry of the record: the row's fields and the figures derived from them."""
        ratio, rates = self.ratio, [one.tokens_per_second for one in self.windows]
        return {
            **asdict(self),
            "tokens_per_second_median": self.tokens_per_second,
            "tokens_per_second_min": min(rates, default=None),
            "tokens_per_second_max": max(rates, default=None),
            "step_seconds_median": self.step_seconds,
            "step_joules_median": self.step_joules,
            "tokens_per_joule_median": self.tokens_per_joule,
            "compile_cold_seconds": self.compile_cold_seconds,
            "compile_cached_seconds": self.compile_cached_seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "against_base": {**asdict(ratio), "verdict": ratio.verdict} if ratio else None,
            **self.mfu,
        }


def median(values: Any) -> float | None:
    """The median; None without values."""
    found = list(values)
    return statistics.median(found) if found else None


def question_key(row: SweepRow) -> str:
    """A hash of what a row measures: the text of its configuration and its overrides."""
    try:
        text = row.config_path.read_bytes()
    except OSError as error:
        raise TomatError(f"config file {row.config_path} cannot be read: {error.strerror or error}.") from None
    words = dump_json({"words": override_words(dict(sorted(row.overrides.items())))})
    return hashlib.sha256(text + words.encode()).hexdigest()[:16]


def record_path(tracking_dir: Path, name: str) -> Path:
    return tracking_dir / LAB_DIR / f"{name}.json"
