"""Where the cycles of one training step went: the table that a trace and a compiled program both become.

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
"""Keys that breakdowns of this version have not always had: older ones left nothing out and took every window."""
LATENCY_FRACTION = 0.1
"""An operation that reaches less than a tenth of both roofs is bound by neither: it waits, starts up or is too small.
(A choice, not a measurement: large v6e matmuls and copies reach 0.8-0.9 of theirs.)"""


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
    """Peaks of one device; None where unknown (a CPU, or a chip that neither the table nor the trace tells of)."""

    device_kind: str
    """JAX's name of the chip where it is in the table, else what the trace calls it."""
    peak_flops_per_second: Amount | None = None
    peak_hbm_bytes_per_second: Amount | None = None
    clock_hz: Amount | None = None
    hbm_bytes: Count | None = None
    stated_by_trace: bool = False
    """The peaks are what the trace states of its device: the chip is not in the table."""

    @staticmethod
    def of_device_kind(device_kind: str, stated: "Roofs | None" = None) -> "Roofs":
        """The peaks of one JAX device. `stated` is what to take where the chip is not in the table."""
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
        """The peak for products of such operands; `peak_flops_per_second` is that of bf16."""
        if not self.peak_flops_per_second or operands == "bf16":
            return self.peak_flops_per_second
        chip = chip_for_device_kind(self.device_kind)
        return chip.peak_of(operands) if chip is not None else self.peak_flops_per_second


@dataclass(frozen=True)
class OpRow:
    """One operation: an HLO kernel, or a row for time without one."""

    name: str
    program: str
    opcode: str
    category: Category
    part: Part
    direction: Direction
    occurrences: Amount
    seconds: float
    """Exclusive time; sums to the step over all rows. The row of waits takes the rounding of all others and may be as
    little as -1e-9 of a step."""
    hidden_seconds: Amount = 0.0
    """Collectives: time in flight beside compute, not part of the sum."""
    flops: Amount | None = None
    hbm_bytes: Amount | None = None
    op_name: str = ""
    source: str = ""
    operands: Operand = "bf16"

    def of_step(self, seconds: float, hidden_seconds: float, occurrences: float) -> "OpRow":
        """The row of a step out of that of one execution, whose flops and bytes are taken `occurrences` times."""
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
    """Of what is known, if that takes `KNOWN_SHARE` of the time; `hbm_bytes` too."""
    hbm_bytes: float | None
    flops_fraction: float | None
    """Achieved flops over the device's peak, during this row's time."""
    bandwidth_fraction: float | None
    bound: Bound
    flops_at_least: bool = False
    """Whether there is more work in it, of kernels whose flops are not known (`of_unknown_flops`)."""


@dataclass(frozen=True)
class WindowRow:
    """One window of a trace's device: from the beginning of a step to that of the next."""

    device: str
    start_seconds: Amount
    """Since the first window's."""
    seconds: Amount
    step_seconds: Amount
    """Of each step in it, without other programs."""
    steps: Count
    """1; breakdowns of before have more where marks between were missing."""
    kind: str
    """`steady`, or why the step's figures leave it out (`steady.WindowKind`)."""


@dataclass(frozen=True)
class OtherRow:
    """What else ran in the windows of a trace, on one device; in no other figure."""

    name: str
    """A program, or that the host left the device without work."""
    executions: Amount
    """In all windows of one device; 0 where the trace does not mark executions. The mean over devices, as below."""
    seconds: Amount
    windows: Amount
    host_activity: str = ""
    """What the host did in the longest gap; "" for programs, and where nothing is known."""


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
    """The host span that covered most of the longest one; "" where none did."""


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
    """Of each device, of which the figures are the mean."""
    step_times_seconds: tuple[Amount, ...] = ()
    """These steps, of all devices."""
    step_classes: tuple[StepClass, ...] = ()
    windows: tuple[WindowRow, ...] = ()
    others: tuple[OtherRow, ...] = ()
    gaps: tuple[GapRow, ...] = ()
    memory_bytes: Mapping[str, Count] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    n_events_left_out: Count = 0
    """Of breakdowns of before: damaged events of the trace. A trace that has one is refused now."""

    @property
    def categories(self) -> tuple[GroupRow, ...]:
        """One row a category that occurs, in the order of `Category`; hidden collectives as a row of share 0."""
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
        """One row a (part, direction) that occurs, largest first."""
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
        # Each operation against the peak for what it multiplies; older breakdowns do not say, and are held to bf16's.
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
        """JSON with units in the keys; `from_dict` reads it back, the derived tables are for other readers."""
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
"""Of a group's time, what operations of known flops must take for the group to have any; the same of bytes."""


def of_unknown_flops(ops: Iterable[OpRow], step_seconds: float) -> list[str]:
    """The names of kernels whose flops nobody states, such as custom calls, and that take a thousandth of the step."""
    return sorted({o.name for o in ops if o.flops is None and o.program and o.seconds > 0.001 * step_seconds})


def _bound(kinds: set[Category], compute: float | None, memory: float | None) -> Bound:
    """What limits operations of these categories together: the roof they come closest to, if they come close to one."""
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
    """The sum of (amount, seconds), None where the amounts of too much of the time are not known.

    cuBLAS's kernels were 99 % of *matmul* in a step on an H200: the rest would have stood for all.
    """
    seconds = sum((s for _, s in rows), 0.0)
    known = sum((s for amount, s in rows if amount is not None), 0.0)
    return _sum_known(amount for amount, _ in rows) if known >= KNOWN_SHARE * seconds else None


def _fraction(amount: float | None, seconds: float, peak: float | None) -> float | None:
    if amount is None or not peak or seconds <= 0:
        return None
    return amount / seconds / peak
