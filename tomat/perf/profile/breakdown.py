"""Where the cycles of one training step went: one form of table for both traces and compiled programs.

All figures are per step and per device: the mean over the undisturbed steps (`steady.py`) and the devices of a trace,
or one run of one device's program for a compiled step. The rows of `Breakdown.categories` and of `Breakdown.parts` each
sum to `step_seconds`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from tomat.base.documents import mapping
from tomat.base.errors import TomatError
from tomat.base.records import Amount, Count, Positive, typed
from tomat.hardware.chip_table import Operand
from tomat.hardware.chips import chip_for_device_kind, known_chip

FORMAT_VERSION = 1
SINCE_THE_FIRST = frozenset({"n_events_left_out", "windows", "others"})
"""Keys that older breakdowns of this version lack. Those left nothing out and used every window."""
LATENCY_FRACTION = 0.1
"""An operation that reaches less than a tenth of both roofs is bound by neither: it waits, starts up or is too small.
(A choice, not a measurement: large v6e matmuls and copies reach 0.8-0.9 of their roofs.)"""


class Category(StrEnum):
    """The rows of a breakdown; their shares sum to the step. `COLLECTIVES_HIDDEN` overlaps others and has share 0."""

    ATTENTION_FORWARD = "attention forward"
    ATTENTION_BACKWARD = "attention backward"
    MATMUL = "matmul"
    LOSS = "loss"
    ELEMENTWISE = "elementwise fusion"
    NORM_ROTARY = "normalisation and rotary"
    EMBEDDING = "embedding"
    OPTIMIZER = "optimizer"
    COPIES = "copies and relayout"
    COLLECTIVES_EXPOSED = "collectives, exposed"
    COLLECTIVES_HIDDEN = "collectives, hidden"
    CUSTOM_KERNELS = "custom kernels"
    CONTROL = "loop control"
    HOST = "host"
    IDLE = "idle between steps"
    UNATTRIBUTED = "unattributed"


class Part(StrEnum):
    EMBEDDING = "embedding"
    ATTENTION_PROJECTIONS = "layer: attention projections"
    ATTENTION_CORE = "layer: attention core"
    NORM_ROTARY = "layer: normalisation and rotary"
    MLP = "layer: MLP"
    LAYER_OTHER = "layer: residual and carries"
    LOSS = "head and loss"
    OPTIMIZER = "optimizer"
    OUTSIDE = "outside the model"


class Direction(StrEnum):
    """Forward pass, backward pass, forward recomputed in the backward pass, or neither."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    NONE = ""


class Bound(StrEnum):
    COMPUTE = "compute"
    MEMORY = "memory"
    COMMUNICATION = "communication"
    LATENCY = "latency"
    UNKNOWN = ""


@dataclass(frozen=True)
class Roofs:
    """Peaks of one device; None where unknown (a CPU, or a chip that neither the table nor the trace has peaks for)."""

    device_kind: str
    """JAX's name of the chip if it is in the table, else the trace's name."""
    peak_flops_per_second: Amount | None = None
    peak_hbm_bytes_per_second: Amount | None = None
    clock_hz: Amount | None = None
    hbm_bytes: Count | None = None
    stated_by_trace: bool = False
    """Whether the peaks are those that the trace states, because the chip is not in the table."""

    @staticmethod
    def of_device_kind(device_kind: str, stated: "Roofs | None" = None) -> "Roofs":
        """The peaks of one JAX device. `stated` is used if the chip is not in the table."""
        chip = known_chip(device_kind)
        if chip is None and stated is not None:
            return replace(stated, device_kind=device_kind or stated.device_kind, stated_by_trace=True)
        if chip is None:
            if device_kind:
                chip_for_device_kind(device_kind)  # warns
            return Roofs(device_kind)
        shared = chip.jax_devices_per_chip
        return Roofs(
            device_kind=chip.device_kinds[0],
            peak_flops_per_second=chip.peak_of("bf16"),
            peak_hbm_bytes_per_second=chip.hbm_bytes_per_second / shared if chip.hbm_bytes_per_second else None,
            clock_hz=chip.clock_hz,
            hbm_bytes=chip.hbm_bytes_usable // shared if chip.hbm_bytes_usable else None,
        )

    def peak_of(self, operands: Operand) -> float | None:
        """The peak for products of such operands. `peak_flops_per_second` is the peak for bf16."""
        if not self.peak_flops_per_second or operands == "bf16":
            return self.peak_flops_per_second
        chip = chip_for_device_kind(self.device_kind)
        return chip.peak_of(operands) if chip is not None else self.peak_flops_per_second


@dataclass(frozen=True)
class OpRow:
    """One operation: an HLO kernel, or a row for time in which no kernel runs."""

    name: str
    program: str
    opcode: str
    category: Category
    part: Part
    direction: Direction
    occurrences: Amount
    seconds: float
    """Exclusive time; sums to the step over all rows. The row of waits absorbs the rounding of all others, and may be
    negative, down to -1e-9 of a step."""
    hidden_seconds: Amount = 0.0
    """For collectives: time in flight beside compute, which is not part of the sum."""
    flops: Amount | None = None
    hbm_bytes: Amount | None = None
    op_name: str = ""
    source: str = ""
    operands: Operand = "bf16"

    def of_step(self, seconds: float, hidden_seconds: float, occurrences: float) -> "OpRow":
        """The row of a step from this row of one execution. Flops and bytes are multiplied by `occurrences`."""
        return replace(
            self,
            occurrences=occurrences,
            seconds=seconds,
            hidden_seconds=hidden_seconds,
            flops=self.flops * occurrences if self.flops is not None else None,
            hbm_bytes=self.hbm_bytes * occurrences if self.hbm_bytes is not None else None,
        )


@dataclass(frozen=True)
class GroupRow:
    """A category, or a part of the model in one direction."""

    name: str
    occurrences: float
    seconds: float
    share: float
    hidden_seconds: float
    cycles: float | None
    flops: float | None
    """Sum over operations of known flops; None if they take less than `KNOWN_SHARE` of the time. `hbm_bytes` alike."""
    hbm_bytes: float | None
    flops_fraction: float | None
    """Achieved flops/s during this row's time, divided by the device's peak."""
    bandwidth_fraction: float | None
    bound: Bound
    flops_at_least: bool = False
    """Whether it has more work, in kernels whose flops are not known (`of_unknown_flops`)."""


@dataclass(frozen=True)
class WindowRow:
    """One window of a device in a trace: from the beginning of a step to the beginning of the next."""

    device: str
    start_seconds: Amount
    """Time since the start of the first window."""
    seconds: Amount
    step_seconds: Amount
    """Duration of each step in it, without other programs."""
    steps: Count
    """1; older breakdowns have more where marks in between were missing."""
    kind: str
    """`steady`, or why the step's figures leave it out (`steady.WindowKind`)."""


@dataclass(frozen=True)
class OtherRow:
    """Something other than the step that ran in the windows of a trace, per device. No other figure includes it."""

    name: str
    """A program, or the statement that the host left the device without work."""
    executions: Amount
    """Executions in all windows of a device; 0 if the trace does not mark them. A mean over devices, as those below."""
    seconds: Amount
    windows: Amount
    host_activity: str = ""
    """What the host did in the longest gap; "" for programs, and if it is not known."""


@dataclass(frozen=True)
class StepClass:
    """Windows of one kind, and the whole duration of a step in them."""

    name: str
    count: Count
    mean_seconds: Amount
    p10_seconds: Amount
    p50_seconds: Amount
    p90_seconds: Amount


@dataclass(frozen=True)
class GapRow:
    """Waits of the device between the same two operations."""

    before: str
    after: str
    occurrences: Amount
    seconds: Amount
    longest_seconds: Amount
    host_activity: str
    """The shortest host span that covered at least half of the longest wait; "" if none did."""


@dataclass(frozen=True)
class Breakdown:
    title: str
    source: str
    """`trace` (measured) or `compiled` (predicted)."""
    roofs: Roofs
    step_seconds: Amount
    ops: tuple[OpRow, ...]
    n_devices: Positive = 1
    n_hosts: Positive = 1
    n_steps: Positive = 1
    """Steps of each device over which the figures are the mean."""
    step_times_seconds: tuple[Amount, ...] = ()
    """The times of these steps, on all devices."""
    step_classes: tuple[StepClass, ...] = ()
    windows: tuple[WindowRow, ...] = ()
    others: tuple[OtherRow, ...] = ()
    gaps: tuple[GapRow, ...] = ()
    memory_bytes: Mapping[str, Count] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    n_events_left_out: Count = 0
    """Damaged events of the trace, in older breakdowns. Now a trace with a damaged event is refused."""

    @property
    def categories(self) -> tuple[GroupRow, ...]:
        """One row for each category that occurs, in the order of `Category`. Hidden collectives have share 0."""
        groups: dict[str, list[OpRow]] = defaultdict(list)
        for op in self.ops:
            groups[op.category].append(op)
        hidden = sum(op.hidden_seconds for op in self.ops)
        rows = []
        for name in Category:
            if name in groups:
                rows.append(self.group(name, groups[name]))
            if name == Category.COLLECTIVES_HIDDEN and hidden > 0:
                rows.append(GroupRow(name, 0, 0.0, 0.0, hidden, None, None, None, None, None, Bound.COMMUNICATION))
        return tuple(rows)

    @property
    def parts(self) -> tuple[GroupRow, ...]:
        """One row for each (part, direction) that occurs, largest first."""
        groups: dict[str, list[OpRow]] = defaultdict(list)
        for op in self.ops:
            name = f"{op.part}, {op.direction}" if op.direction else str(op.part)
            if op.category in (Category.IDLE, Category.UNATTRIBUTED, Category.HOST):
                name = str(op.category)
            groups[name].append(op)
        rows = [self.group(name, ops) for name, ops in groups.items()]
        return tuple(sorted(rows, key=lambda r: (-r.seconds, r.name)))

    def top(self, count: int) -> tuple[OpRow, ...]:
        return tuple(sorted(self.ops, key=lambda o: (-o.seconds, o.program, o.name))[:count])

    def group(self, name: str, rows: Sequence[OpRow]) -> GroupRow:
        seconds = sum((o.seconds for o in rows), 0.0)
        flops = _sum_if_known([(o.flops, o.seconds) for o in rows])
        hbm_bytes = _sum_if_known([(o.hbm_bytes, o.seconds) for o in rows])
        # Each operation is compared with the peak for its operands. Older breakdowns do not have them: bf16 is assumed.
        at_peak = [(o.flops, self.roofs.peak_of(o.operands)) for o in rows]
        least = _sum_known(done / peak for done, peak in at_peak if done is not None and peak)
        flops_fraction = _fraction(least, seconds, 1.0) if flops is not None else None
        bandwidth_fraction = _fraction(hbm_bytes, seconds, self.roofs.peak_hbm_bytes_per_second)
        return GroupRow(
            name=str(name),
            occurrences=sum(o.occurrences for o in rows),
            seconds=seconds,
            share=seconds / self.step_seconds if self.step_seconds else 0.0,
            hidden_seconds=sum(o.hidden_seconds for o in rows),
            cycles=seconds * self.roofs.clock_hz if self.roofs.clock_hz else None,
            flops=flops,
            hbm_bytes=hbm_bytes,
            flops_fraction=flops_fraction,
            bandwidth_fraction=bandwidth_fraction,
            bound=_bound({o.category for o in rows}, flops_fraction, bandwidth_fraction),
            flops_at_least=bool(of_unknown_flops(rows, self.step_seconds)),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON with units in the keys. `from_dict` reads it back; the derived tables are for other readers."""
        content = asdict(replace(self, ops=self.top(len(self.ops))))
        return {
            "format_version": FORMAT_VERSION,
            "device": content.pop("roofs"),
            **{key: list(value) if isinstance(value, tuple) else value for key, value in content.items()},
            "flops_per_step_per_device": _sum_known(o.flops for o in self.ops),
            "hbm_bytes_per_step_per_device": _sum_known(o.hbm_bytes for o in self.ops),
            "categories": [asdict(r) for r in self.categories],
            "parts": [asdict(r) for r in self.parts],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any], origin: str = "breakdown") -> "Breakdown":
        remedy = "Write it with `tomat profile TRACE --json FILE`."
        content = mapping(data)
        if (version := content.get("format_version")) != FORMAT_VERSION:
            what = "it has no format_version" if version is None else f"found {version!r}"
            raise TomatError(f"{origin}: not a breakdown of format {FORMAT_VERSION} ({what}). {remedy}")
        known = {one.name for one in fields(Breakdown)} - {"roofs"}
        if missing := sorted(known - set(content) - SINCE_THE_FIRST):
            raise TomatError(f"{origin} is damaged: a breakdown without the key {missing[0]}. {remedy}")
        values = {key: content[key] for key in known & set(content)} | {"roofs": content.get("device")}
        found = typed(values, Breakdown, origin, remedy, extra_keys=False)
        if {one.name for one in fields(Roofs)} - set(content["device"]) - {"stated_by_trace"}:  # older ones lack it
            raise TomatError(f"{origin} is damaged: its device has {sorted(content['device'])}. {remedy}")
        total = sum(op.seconds for op in found.ops)
        if not math.isclose(total, found.step_seconds, rel_tol=1e-6, abs_tol=1e-12):
            takes = f"its operations take {total} s and the step {found.step_seconds} s"
            raise TomatError(f"{origin} is damaged: {takes}. {remedy}")
        return found


KNOWN_SHARE = 0.9
"""A group has flops only if operations of known flops take at least this share of its time; bytes likewise."""


def of_unknown_flops(ops: Iterable[OpRow], step_seconds: float) -> list[str]:
    """The names of kernels that take over a thousandth of the step and have no known flops, such as custom calls."""
    return sorted({o.name for o in ops if o.flops is None and o.program and o.seconds > 0.001 * step_seconds})


def _bound(kinds: set[Category], compute: float | None, memory: float | None) -> Bound:
    """What limits operations of these categories together: the roof that they come closest to, if close to any."""
    if kinds and kinds <= {Category.COLLECTIVES_EXPOSED, Category.COLLECTIVES_HIDDEN}:
        return Bound.COMMUNICATION
    if kinds and kinds <= {Category.IDLE, Category.HOST, Category.UNATTRIBUTED, Category.CONTROL}:
        return Bound.LATENCY
    if compute is None or memory is None:
        return Bound.UNKNOWN
    if max(compute, memory) < LATENCY_FRACTION:
        return Bound.LATENCY
    return Bound.COMPUTE if compute >= memory else Bound.MEMORY


def _sum_known(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _sum_if_known(rows: Sequence[tuple[float | None, float]]) -> float | None:
    """The sum of the amounts in (amount, seconds); None if they are unknown for too much of the time.

    Kernels of cuBLAS, without flops, were 99 % of *matmul* in a step on an H200: the rest would have stood for all.
    """
    seconds = sum((s for _, s in rows), 0.0)
    known = sum((s for amount, s in rows if amount is not None), 0.0)
    return _sum_known(amount for amount, _ in rows) if known >= KNOWN_SHARE * seconds else None


def _fraction(amount: float | None, seconds: float, peak: float | None) -> float | None:
    if amount is None or not peak or seconds <= 0:
        return None
    return amount / seconds / peak
