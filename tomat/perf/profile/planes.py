"""Reads the devices, steps and threads of one host's trace from its planes.

Planes and lines have the names of JAX and xprof: ``/device:TPU:N`` with lines ``XLA Ops``, ``Async XLA Ops``,
``XLA Modules`` and ``Steps``; ``/device:GPU:N`` with one line per CUDA stream; on a CPU the operations are events of
the threads in ``/host:CPU`` that carry an ``hlo_op`` stat.

A GPU's trace does not mark the executions of programs. XLA annotates the host's thread while it launches the kernels of
an execution: `[ordinal] GpuExecutable::ExecuteThunks` (jaxlib 0.11.2), the same without ordinal (0.8),
`PROGRAM:XLA GPU module` (both, and before). A launch and all its kernels share a `correlation_id`. NVIDIA's tracing
library puts the launch on the thread's line. AMD's puts it on a separate line, which does not name the thread: the
thread is then the one whose annotations enclose the launches.
"""

import math
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tomat.perf.profile.trace_data import (
    LONGEST_TRACE_PS,
    DeviceTrace,
    Events,
    HostTrace,
    ModuleRun,
    OpKind,
    StepMark,
    damaged,
    program_name_and_id,
    with_program_of_run,
)

LAUNCHES = re.compile(r"(\[\d+\] )?GpuExecutable::ExecuteThunks|.+:XLA GPU module")


class GpuExecutions:
    """The launches of one host's threads. `of_kernels` groups a device's kernels into executions."""

    def __init__(self) -> None:
        self._spans: dict[int, list[tuple[int, int]]] = {}
        self._launches: dict[int, list[tuple[int, int]]] = {}
        """By line: (start_ps, correlation_id)."""

    def add(self, line: int, label: str, correlation_id: int, start_ps: int, end_ps: int) -> None:
        """Record an event on a line of the host; `correlation_id` is 0 if it has none."""
        if LAUNCHES.fullmatch(label):
            self._spans.setdefault(line, []).append((start_ps, end_ps))
        elif correlation_id:
            self._launches.setdefault(line, []).append((start_ps, correlation_id))

    def of_kernels(self, kernels: list[tuple[int, str, int, int, int]]) -> list[ModuleRun]:
        """Executions in order of their start. `kernels` holds (correlation_id, program, program_id, start_ps, end_ps)
        of a device's kernels."""
        wanted = {kernel[0] for kernel in kernels}
        spans = {line: _outermost(found) for line, found in self._spans.items()}
        apart = not spans.keys() & self._launches.keys()
        # For each correlation id, the execution that launched it, as (line, number) of its annotation.
        execution: dict[int, tuple[int, int]] = {}
        for line, launches in self._launches.items():
            mine = [launch for launch in launches if launch[1] in wanted]
            starts = np.array([start for start, _ in mine], dtype=np.int64)
            # If launches have separate lines, the thread is the one whose annotations enclose the most of them.
            candidates = spans.keys() if apart else spans.keys() & {line}
            places: dict[int, np.ndarray] = {}
            for candidate in candidates:
                span = spans[candidate]
                # The last annotation that begins before each launch; -1 if it has ended, or there is none.
                last = np.searchsorted(span[:, 0], starts, side="right") - 1
                running = (last >= 0) & (starts <= span[np.maximum(last, 0), 1])
                places[candidate] = np.where(running, last, -1)
            thread = max(places, key=lambda one: (int((places[one] >= 0).sum()), -one), default=None)
            if thread is not None:
                for (_, correlation_id), place in zip(mine, places[thread].tolist(), strict=True):
                    if place >= 0:
                        execution[correlation_id] = (thread, place)
        runs: dict[tuple[tuple[int, int], str, int], list[int]] = {}
        for correlation_id, program, program_id, start, end in kernels:
            if program and correlation_id in execution:
                run = runs.setdefault((execution[correlation_id], program, program_id), [start, end])
                run[0], run[1] = min(run[0], start), max(run[1], end)
        found = [ModuleRun(program, program_id, *run) for (_, program, program_id), run in runs.items()]
        return sorted(found, key=lambda run: run.start_ps)


def _outermost(spans: list[tuple[int, int]]) -> np.ndarray:
    """int64 [n, 2]: the spans that lie in no other span, in order of their start."""
    kept: list[tuple[int, int]] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if not kept or end > kept[-1][1]:
            kept.append((start, end))
    return np.array(kept, dtype=np.int64).reshape(-1, 2)


DEVICE_PLANE = re.compile(r"^/device:(TPU|GPU):\d+$")
SPARSE_CORE_PLANE = re.compile(r"^/device:TPU:\d+ SparseCore")
HOST_PLANE = "/host:CPU"
OPS_LINE, ASYNC_LINE, MODULES_LINE, STEPS_LINE, STREAM = "XLA Ops", "Async XLA Ops", "XLA Modules", "Steps", "Stream"
COMMAND_BUFFER = "command_buffer"
"""Prefix of the `hlo_op` of kernels that XLA launches as a CUDA graph. No instruction has that name."""
NO_SCOPE = "XlaModule"
"""The `tf_op` of a GPU kernel whose place in the model is unknown."""


class Plane:
    """An XPlane of a host's trace. A Chrome trace is converted to the same messages."""

    def __init__(self, host: HostTrace, proto: Any, origin_ns: int = 0, from_json: bool = False) -> None:
        """`origin_ns` is the `timestamp_ns` of lines that counts as time 0."""
        self.host, self.proto, self.origin_ns = host, proto, origin_ns
        self.stat_names: dict[int, str] = {key: value.name for key, value in proto.stat_metadata.items()}
        self.name, self.stats = proto.name, self._named(proto.stats)
        self.lines = [(line.display_name or line.name, line) for line in proto.lines]
        # On a TPU the kind of an operation depends on its metadata alone.
        self._kind_by_metadata = not from_json and not self.name.startswith("/device:GPU")
        self._labels = {key: value.name or value.display_name for key, value in proto.event_metadata.items()}
        self._metadata_stats: dict[int, dict[str, Any]] = {}
        self._roles: dict[int, str] = {}

    def _named(self, stats: Iterable[Any]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for stat in stats:
            kind = stat.WhichOneof("value")
            value: Any = None if kind is None else getattr(stat, kind)
            if kind == "ref_value":
                value = self.stat_names.get(value, "")
            named[self.stat_names.get(stat.metadata_id, "")] = value
        return named

    def label(self, event: Any) -> str:
        return self._labels[event.metadata_id]

    def event_stats(self, event: Any) -> dict[str, Any]:
        """The stats of an event: those of its metadata, and its own where the metadata have none."""
        key = event.metadata_id
        if key not in self._metadata_stats:
            self._metadata_stats[key] = self._named(self.proto.event_metadata[key].stats)
        return {**self._named(event.stats), **self._metadata_stats[key]}

    def role(self, event: Any) -> str:
        """What an event of a host's thread is: `op`, `step` or `span`. The first event with its metadata decides."""
        if event.metadata_id not in self._roles:
            stats = self.event_stats(event)
            role = "op" if "hlo_op" in stats else "step" if "step_num" in stats else "span"
            self._roles[event.metadata_id] = role
        return self._roles[event.metadata_id]

    def placed(self, line: Any) -> Iterator[tuple[Any, int, int]]:
        """(event, start_ps, duration_ps) of each event of a line."""
        starts, durations, _ = self._columns(line)
        return zip(line.events, starts.tolist(), durations.tolist(), strict=True)

    def _columns(self, line: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """int64 [n] each: start_ps, duration_ps and metadata id of a line's events."""
        events = line.events

        def column(values: Iterable[int]) -> np.ndarray:
            return np.fromiter(values, dtype=np.int64, count=len(events))

        metadata_ids = column(e.metadata_id for e in events)
        offsets, durations = column(e.offset_ps for e in events), column(e.duration_ps for e in events)
        shift = (line.timestamp_ns - self.origin_ns) * 1000 if events else 0  # an empty line may have any time
        place = f"{self.host.origin}, {self.name}"
        if np.isin(metadata_ids, list(self._labels), invert=True).any():
            other = "the profiler may have another schema than that of jax 0.11.1"
            raise damaged(place, f"events have name metadata that the file does not hold; {other}")
        # Offsets are checked before they are added, because a damaged one may overflow 64 bits.
        far = (offsets > LONGEST_TRACE_PS) | (offsets < -LONGEST_TRACE_PS) | (abs(shift) > LONGEST_TRACE_PS)
        if np.any(far | (durations < 0) | (durations > LONGEST_TRACE_PS)):
            raise damaged(place, "events have a negative duration, or lie or last more than a day from the others")
        # A sum over many events has no time.
        if any(e.num_occurrences for e in events):
            raise damaged(place, "events are sums over many and have no time")
        return offsets + shift, durations, metadata_ids

    def kind(self, event: Any) -> OpKind:
        stats = self.event_stats(event)
        shown = self.proto.event_metadata[event.metadata_id].display_name
        name = str(stats.get("hlo_op") or shown or self.label(event))
        if name.startswith("%"):  # the whole instruction: `%fusion.3 = bf16[8,128]{1,0} fusion(...)`
            name = name[1:].split(" ", 1)[0]
        program, program_id = program_name_and_id(str(stats.get("hlo_module") or ""))
        program_id = as_integer(stats.get("program_id")) or program_id
        module = self.host.programs.get(program_id)
        if "hlo_op" in stats and (name.startswith(COMMAND_BUFFER) or (module and name not in module.by_name)):
            # A CUDA graph launches many kernels, which only their own names tell apart. AMD's names end in `.kd`.
            kernel = self.label(event).removesuffix(".kd")
            name = module.by_kernel_name.get(kernel, kernel) if module else kernel
        op_name = str(stats.get("tf_op") or "").removesuffix(":")
        return OpKind(
            name=name,
            program_id=program_id,
            program=program or (program_name_and_id(module.name)[0] if module else ""),
            long_name=str(stats.get("long_name") or self.label(event)),
            hlo_category=str(stats.get("hlo_category") or ""),
            op_name="" if op_name == NO_SCOPE else op_name,
            source=str(stats.get("source") or ""),
            flops=_amount(stats, "flops", "model_flops"),
            bytes_accessed=_amount(stats, "bytes_accessed", "raw_bytes_accessed"),
        )

    def operations(self, line: Any, index: int, kinds: "Kinds") -> np.ndarray:
        """int64 [n, 4] of (kind, start_ps, duration_ps, `index`) of a line's events. New kinds are added to `kinds`."""
        if self._kind_by_metadata:
            starts, durations, metadata_ids = self._columns(line)
            ids, first, inverse = np.unique(metadata_ids, return_index=True, return_inverse=True)
            found = zip(ids.tolist(), first.tolist(), strict=True)
            numbers = np.array([kinds.number_of(self, line.events[at], key) for key, at in found], dtype=np.int64)
            return np.stack([numbers[inverse], starts, durations, np.full(len(starts), index)], axis=1)
        rows = []
        for event, start, duration in self.placed(line):
            number = kinds.number_of(self, event)
            rows.append((number, start, duration, index))
            if correlation_id := as_integer(self.event_stats(event).get("correlation_id")):
                kind = kinds.kinds[number]
                kinds.kernels.append((correlation_id, kind.program, kind.program_id, start, start + duration))
        return np.array(rows, dtype=np.int64).reshape(-1, 4)


class Kinds:
    def __init__(self) -> None:
        self.kinds: list[OpKind] = []
        self.kernels: list[tuple[int, str, int, int, int]] = []
        """A GPU's kernels, as `GpuExecutions.of_kernels` takes them."""
        self._numbers: dict[Hashable, int] = {}

    def number_of(self, plane: Plane, event: Any, key: Hashable = None) -> int:
        """The number of an event's kind. Events with one `key` share a kind; the default key is name and program."""
        if key is None:
            # One CUDA kernel serves many HLO operations, so the kind depends on the event's own stats.
            stats = plane.event_stats(event)
            key = (plane.label(event), *(str(stats.get(name, "")) for name in ("hlo_op", "hlo_module", "program_id")))
        number = self._numbers.setdefault(key, len(self.kinds))
        if number == len(self.kinds):
            self.kinds.append(plane.kind(event))
        return number


def read_planes(host: HostTrace, planes: Sequence[Plane]) -> HostTrace:
    """`host` with the devices, steps and activity of its planes."""
    unmarked: list[tuple[DeviceTrace, Kinds]] = []
    for plane in planes:
        if DEVICE_PLANE.match(plane.name):
            device, kinds = _read_device(plane)
            host.devices.append(device)
            if kinds.kernels and not device.modules:
                unmarked.append((device, kinds))
        elif SPARSE_CORE_PLANE.match(plane.name):
            host.warnings.append(f"{plane.name} is not part of the breakdown (it runs beside the TensorCore)")
    launched = GpuExecutions() if unmarked else None
    threads = [plane for plane in planes if plane.name.startswith(HOST_PLANE)]
    _read_threads(threads, host, launched)
    if launched is not None:
        for device, kinds in unmarked:
            device.modules = launched.of_kernels(kinds.kernels)
            device.kinds = with_program_of_run(device.kinds, device.ops, device.modules)
    host.devices = [device for device in host.devices if len(device.ops)]
    return host


def _read_device(plane: Plane) -> tuple[DeviceTrace, Kinds]:
    """A device and its kinds. A GPU's `Stream` lines are read; xprof derives lines with a TPU's names from them."""
    operations, transfers = [np.empty((0, 4), np.int64)], [np.empty((0, 4), np.int64)]
    modules: list[ModuleRun] = []
    steps: list[StepMark] = []
    kinds = Kinds()
    streams = any(name.startswith(STREAM) for name, _ in plane.lines)
    for index, (name, line) in enumerate(plane.lines):
        if name == MODULES_LINE:
            for event, start, duration in plane.placed(line):
                modules.append(ModuleRun(*program_name_and_id(plane.label(event)), start, start + duration))
        elif name == STEPS_LINE:
            for event, start, duration in plane.placed(line):
                steps.append(_step_mark(plane, event, len(steps), start, duration))
        elif name.startswith(STREAM) if streams else name == OPS_LINE:
            operations.append(plane.operations(line, index, kinds))
        elif name == ASYNC_LINE and not streams:
            transfers.append(plane.operations(line, index, kinds))
    ops = Events.build(np.concatenate(operations))
    modules.sort(key=lambda run: run.start_ps)
    # A TPU states its peaks in 1e12 and 1e9 (libtpu writes 1028.75 and 3686.16 for a core of TPU7x). NVIDIA states the
    # bandwidth in bytes. AMD's is not used: an MI300X states 2,662 GB/s, half of its data sheet.
    stats = plane.stats
    flops, hbm = _amount(stats, "peak_teraflops_per_second"), _amount(stats, "peak_hbm_bw_gigabytes_per_second")
    nvidia = _amount(stats, "memory_bandwidth") if stats.get("device_vendor") == "Nvidia" else None
    device = DeviceTrace(
        host=plane.host.host,
        name=plane.name,
        device_kind=_device_kind(stats),
        peak_flops_per_second=1e12 * flops if flops else None,
        peak_hbm_bytes_per_second=1e9 * hbm if hbm else nvidia or None,
        kinds=with_program_of_run(kinds.kinds, ops, modules),
        ops=ops,
        async_ops=Events.build(np.concatenate(transfers)),
        modules=modules,
        steps=sorted(steps, key=lambda mark: mark.start_ps),
    )
    return device, kinds


def _device_kind(stats: Mapping[str, Any]) -> str:
    """The name that a plane gives its device. For an AMD GPU it has only a vendor and a version."""
    for stat in ("device_type_string", "device_type", "gpu_device_name", "device_name"):
        if stats.get(stat):
            return str(stats[stat])
    if "compute_cap_major" not in stats:
        return ""
    version = f"{stats['compute_cap_major']}.{stats.get('compute_cap_minor', 0)}"
    return f"{stats.get('device_vendor', '')} GPU, compute capability {version}".strip()


def _read_threads(planes: Sequence[Plane], host: HostTrace, launched: GpuExecutions | None) -> None:
    """Read the host's threads: steps and activity, and if there is no other device, the CPU's HLO operations. Every
    event is added to `launched`."""
    as_device = not host.devices
    kinds = Kinds()
    rows: dict[int, list[tuple[int, int, int, int]]] = {}
    runs: dict[tuple[int, int, int], list[int]] = {}
    names: dict[str, int] = {}
    spans: list[tuple[int, int, int]] = []
    lines = [(plane, line) for plane in planes for _, line in plane.lines]
    for index, (plane, line) in enumerate(lines):
        for event, start, duration in plane.placed(line):
            role = plane.role(event)
            if launched is not None:
                correlation_id = as_integer(plane.event_stats(event).get("correlation_id"))
                launched.add(index, plane.label(event), correlation_id, start, start + duration)
            if role == "span":
                if duration > 0:
                    spans.append((names.setdefault(plane.label(event), len(names)), start, start + duration))
            elif role == "step":
                host.host_steps.append(_step_mark(plane, event, len(host.host_steps), start, duration))
            elif as_device:
                stats, kind = plane.event_stats(event), kinds.number_of(plane, event)
                ordinal = as_integer(stats.get("device_ordinal"))
                rows.setdefault(ordinal, []).append((kind, start, duration, index))
                if "run_id" in stats:  # a JSON trace has none: its executions cannot be told apart
                    run = (ordinal, kinds.kinds[kind].program_id, as_integer(stats["run_id"]))
                    span = runs.setdefault(run, [start, start + duration, kind])
                    span[0], span[1] = min(span[0], start), max(span[1], start + duration)
    host.host_steps.sort(key=lambda mark: mark.start_ps)
    host.span_names, host.spans = list(names), np.array(spans, dtype=np.int64).reshape(-1, 3)
    for ordinal in sorted(rows):
        modules = [
            ModuleRun(kinds.kinds[kind].program, program_id, start, end)
            for (device, program_id, _), (start, end, kind) in runs.items()
            if device == ordinal
        ]
        modules.sort(key=lambda run: run.start_ps)
        ops = Events.build(rows[ordinal])
        host.devices.append(DeviceTrace(host.host, f"{HOST_PLANE}:{ordinal}", "cpu", kinds.kinds, ops, modules=modules))


def _step_mark(plane: Plane, event: Any, index: int, start: int, duration: int) -> StepMark:
    """A step with the number in its annotation or its name, or else its place in the line."""
    found = re.search(r"\d{1,18}", str(plane.event_stats(event).get("step_num", plane.label(event))), re.ASCII)
    number = int(found.group()) if found else index
    return StepMark(number, start, start + duration)


def as_integer(value: Any) -> int:
    """A stat's value as an unsigned 64-bit integer, 0 if absent. Writers store one id as int64, uint64 or text."""
    # never through a float: a TPU's program id is a 64-bit fingerprint
    try:
        return int(value or 0) % 2**64
    except (TypeError, ValueError, OverflowError):
        return 0


def number_or_none(value: Any) -> float | int | None:
    """A finite number, from a number or text, exact if the value is an int; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _amount(stats: Mapping[str, Any], name: str, else_name: str = "") -> float | None:
    """A count that the profiler wrote; None if it wrote none, or an impossible one."""
    number = number_or_none(stats.get(name, stats.get(else_name)))
    return float(number) if number is not None and 0 <= number < 1e300 else None
