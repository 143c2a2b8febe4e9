"""A trace of real steps as a `Breakdown`."""

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np

from tomat.base.report.formats import quantity
from tomat.perf.profile.breakdown import Breakdown, GapRow, OpRow, OtherRow, Roofs, WindowRow, of_unknown_flops
from tomat.perf.profile.categories import MOVEMENT, Category, Classified, Direction, Evidence, Part, classify
from tomat.perf.profile.cuda_graphs import with_library_kernels
from tomat.perf.profile.directions import settled
from tomat.perf.profile.hlo import CONTROL_OPCODES, Frame, HloProgram, sound_parts
from tomat.perf.profile.hlo_costs import COLLECTIVES, ELEMENTWISE, TRANSCENDENTAL, base_opcode
from tomat.perf.profile.program_breakdown import kernel_row
from tomat.perf.profile.steady import (
    HOST_GAP,
    PS_PER_SECOND,
    JudgedWindows,
    busy_time,
    judged_windows,
    of_step,
    step_windows,
    window_classes,
)
from tomat.perf.profile.timeline import Attribution, attribute
from tomat.perf.profile.trace_data import DeviceTrace, HostTrace, OpKind, Trace, main_program

MAX_GAP_ROWS = 10

# The opcode that stands for an `hlo_category` (xprof), for traces without HLO. Patterns are matched in order.
HLO_CATEGORY_OPCODES: tuple[tuple[str, str], ...] = (
    (r"all-reduce", "all-reduce"), (r"all-gather", "all-gather"), (r"reduce-scatter", "reduce-scatter"),
    (r"all-to-all", "all-to-all"), (r"collective", "collective-permute"), (r"convolution|dot|matmul", "dot"),
    (r"data formatting|copy|transpose|broadcast|slice|pad|reshape", "copy"), (r"infeed", "infeed"),
    (r"outfeed", "outfeed"), (r"host send|send", "send"), (r"host recv|recv", "recv"), (r"while", "while"),
    (r"conditional", "conditional"), (r"call", "custom-call"), (r"fusion|elementwise|reduce|sort|rng", "add"),
)  # fmt: skip
# Last resort, for GPU events that carry no HLO: the kernel's own name.
KERNEL_NAME_OPCODES: tuple[tuple[str, str], ...] = (
    (r"nccl.*allreduce", "all-reduce"), (r"nccl.*allgather", "all-gather"), (r"nccl.*reducescatter", "reduce-scatter"),
    (r"nccl", "collective-permute"),
    (r"memcpyh2d|memcpyd2h|memcpy.*(htod|dtoh)|copy(hosttodevice|devicetohost)", "send"),
    (r"memcpy|memset|copydevicetodevice|amd_rocclr_(copy|fill)buffer", "copy"),
    (r"gemm|cutlass|xmma|cublas|nvjet|cijk_", "dot"),  # the last are those of AMD's Tensile
    (r"cudnn.*(sdpa|fusion)|fmha", "custom-call"),
)  # fmt: skip


def breakdown_from_trace(trace: Trace, *, device_kind: str | None = None, program: str | None = None) -> Breakdown:
    """The mean of the undisturbed steps of a trace. `device_kind` is JAX's name of the chip, if the trace does not hold
    it (Chrome traces). `program` names the program of the step; default: see `main_program`."""
    main_name = main_program(trace.devices, program)
    ran = [(host, one) for host in trace.hosts for one in host.devices if main_name in {k.program for k in one.kinds}]
    devices = [device for _, device in ran]
    # For each operation: its exclusive seconds, hidden seconds and occurrences in all steps; and its row for one
    # execution, with whether that is from HLO (or else from the trace's own stats).
    sums: dict[OpRow, np.ndarray] = defaultdict(lambda: np.zeros(3))
    known: dict[OpRow, tuple[OpRow, bool]] = {}
    verdicts: dict[int, tuple[dict[str, Classified], list[str]]] = {}
    between_seconds = waiting_seconds = 0.0
    step_times: list[float] = []
    windows: list[WindowRow] = []
    others: dict[str, OtherRow] = {}
    device_steps: list[float] = []
    most_idle_ps, gaps = -1.0, []
    notes: set[str] = set()
    if len(devices) < len(trace.devices):
        notes.add(f"{len(trace.devices) - len(devices)} device(s) ran nothing of {main_name} and are left out")
    busy = {host.origin: busy_time(host.devices) for host in trace.hosts}
    n_devices = len(devices)
    for host, device in ran:
        main_run = next((run for run in device.modules if run.program == main_name), None)
        if main_run is not None and (hlo := trace.program(main_run.program_id, main_name)) is not None:
            with sound_parts(hlo):
                device = with_library_kernels(device, hlo)
        table = [_known(kind, trace, verdicts) for kind in device.kinds]
        steps = step_windows(device, host, main_name, notes)
        collective = np.array([row.category == Category.COLLECTIVES_EXPOSED for row, _ in table], dtype=bool)
        executions = np.array([(m.start_ps, m.end_ps) for m in device.modules], dtype=np.int64).reshape(-1, 2)
        judged = judged_windows(device, steps, main_name, busy[host.origin])
        is_step = np.array([row.program in (main_name, "") for row, _ in table], dtype=bool)
        ops, transfers = of_step(device.ops, is_step), of_step(device.async_ops, is_step)
        result = attribute(ops, transfers, collective, judged.intervals, executions)
        # If an instruction has several kernels (a library's, and a memset before it), only the longest counts as an
        # execution. Operations with one name are kept apart if they differ in work, as those of two compiles do.
        alike = [replace(row, op_name="", source="") for row, _ in table]
        longest: dict[OpRow, tuple[int, str]] = {}
        for one, kind, spent in zip(alike, device.kinds, result.exclusive_ps.tolist(), strict=True):
            longest[one] = max(longest.get(one, (0, "")), (spent, kind.long_name))
        counted = np.array([longest[a][1] == k.long_name for a, k in zip(alike, device.kinds, strict=True)], dtype=bool)
        figures = np.stack([result.exclusive_ps, result.hidden_ps, result.occurrences * counted], axis=1)
        for one, found, figure in zip(alike, table, figures / (PS_PER_SECOND, PS_PER_SECOND, 1), strict=True):
            known.setdefault(one, found)
            sums[one] += figure
        between_seconds += result.between_ps / PS_PER_SECOND
        waiting_seconds += result.waiting_ps / PS_PER_SECOND
        device_steps.append(result.total_ps / judged.n_steps / PS_PER_SECOND)
        step_times += [float(d) / PS_PER_SECOND for d in judged.durations_ps]
        windows += judged.rows
        _add_others(others, judged, host, n_devices)
        idle_ps = result.between_ps + result.waiting_ps
        if idle_ps > most_idle_ps:
            most_idle_ps, gaps = idle_ps, _gap_rows(result, device, host, judged.n_steps)
    n_steps = len(step_times)
    ops = [
        known[key][0].of_step(float(seconds) / n_steps, float(hidden) / n_steps, float(occurrences) / n_steps)
        for key, (seconds, hidden, occurrences) in sorted(sums.items(), key=lambda one: (one[0].program, one[0].name))
        if seconds or occurrences
    ]
    for name, category, seconds in (
        ("(no program running)", Category.IDLE, between_seconds),
        # Sums of float64 picoseconds leave a remainder of either sign, around 1e-9 of the step. It is included here.
        ("(program running, no operation)", Category.UNATTRIBUTED, waiting_seconds),
    ):
        if seconds:
            ops.append(OpRow(name, "", "", category, Part.OUTSIDE, Direction.NONE, 0.0, seconds / n_steps))
    # 0 if the events of the main program carry no id.
    main_id = next((k.program_id for d in devices for k in d.kinds if k.program == main_name and k.program_id), 0)
    hlo = trace.program(main_id, main_name) if main_name else None
    blind_seconds = sum(sums[key][0] for key, (_, from_hlo) in known.items() if key.program and not from_hlo) / n_steps
    quality = _quality_notes(ops, blind_seconds, device_steps, hlo)
    if id(hlo) in verdicts:
        quality += verdicts[id(hlo)][1]
    first = next((d for d in devices if d.device_kind), devices[0])
    stated = None
    if not device_kind and (first.peak_flops_per_second or first.peak_hbm_bytes_per_second):
        stated = Roofs("", first.peak_flops_per_second, first.peak_hbm_bytes_per_second)
    roofs = Roofs.of_device_kind(device_kind or first.device_kind, stated)
    if roofs.stated_by_trace:
        flops, hbm = quantity(roofs.peak_flops_per_second, "FLOP/s"), quantity(roofs.peak_hbm_bytes_per_second, "B/s")
        quality.append(
            f"{roofs.device_kind or 'the device'} is not in the table of chips: its peaks, {flops} and {hbm}, are "
            "those that the trace states"
        )
    return Breakdown(
        title=main_name or "trace",
        source="trace",
        roofs=roofs,
        step_seconds=sum(op.seconds for op in ops),
        ops=tuple(ops),
        n_devices=n_devices,
        n_hosts=len({host.origin for host, _ in ran}),
        n_steps=round(n_steps / n_devices),
        step_times_seconds=tuple(step_times),
        step_classes=window_classes(windows),
        windows=tuple(windows),
        others=tuple(sorted(others.values(), key=lambda row: (-row.seconds, row.name))),
        gaps=tuple(gaps),
        memory_bytes=hlo.memory_bytes if hlo else {},
        notes=(*trace.notes, *sorted(notes), *quality),
    )


def _add_others(others: dict[str, OtherRow], judged: JudgedWindows, host: HostTrace, n_devices: int) -> None:
    """Add to `others` what else ran on one device, divided by the number of devices."""
    for row in judged.others:
        before = others.get(row.name, OtherRow(row.name, 0.0, 0.0, 0.0))
        activity = before.host_activity
        if row.name == HOST_GAP and judged.longest_gap and not activity:
            activity = _host_activity(host, *judged.longest_gap)
        others[row.name] = OtherRow(
            row.name,
            before.executions + row.executions / n_devices,
            before.seconds + row.seconds / n_devices,
            before.windows + row.windows / n_devices,
            activity,
        )


def _known(kind: OpKind, trace: Trace, cache: dict[int, tuple[dict[str, Classified], list[str]]]) -> tuple[OpRow, bool]:
    """An operation's row without time, and whether it is from HLO. `cache` holds the verdicts on programs by `id`."""
    program = trace.program(kind.program_id, kind.program)
    if program is None or kind.name not in program.by_name:
        opcode = _opcode(kind)
        frames = (Frame(kind.source.rsplit(":", 1)[0], "", 0),) if kind.source else ()
        evidence = [Evidence(kind.op_name, frames, 1.0)] if kind.op_name or frames else []
        verdict = Classified(Category.UNATTRIBUTED, Part.OUTSIDE, Direction.NONE)
        if opcode:
            target = kind.name if opcode == "custom-call" else ""
            verdict = classify(opcode, frozenset({_inner_opcode(kind, opcode)}), evidence, target)
        row = OpRow(
            kind.name, kind.program, opcode, verdict.category, verdict.part, verdict.direction, 0.0, 0.0,
            flops=0.0 if opcode == "copy" else kind.flops, hbm_bytes=kind.bytes_accessed,
            op_name=kind.op_name, source=kind.source,
        )  # fmt: skip
        return row, False
    with sound_parts(program):
        instruction = program.by_name[kind.name]
        if id(program) not in cache:
            cache[id(program)] = settled(program)
        verdict = cache[id(program)][0].get(kind.name)
        if verdict is None:  # its computation is not reached from the entry, such as a host thread's
            evidence = [Evidence(instruction.op_name, program.frames(instruction), 1.0)]
            inner = frozenset(i.opcode for i in program.inner(instruction))
            verdict = classify(instruction.opcode, inner, evidence, instruction.custom_call_target)
        row = kernel_row(program, instruction, verdict)
    # A profiler that does not know a kernel's work writes 0.
    flops = (kind.flops or None) if row.flops is None else row.flops
    return replace(row, flops=flops, op_name=row.op_name or kind.op_name, source=row.source or kind.source), True


def _opcode(kind: OpKind) -> str:
    """The opcode of an operation without HLO: from its printed instruction, its category, its kernel's name."""
    match = re.search(r"= .*?[\])}] ([a-z][a-z0-9\-]*)\(", kind.long_name)
    if match:
        return match.group(1)
    by_name = _first_match(KERNEL_NAME_OPCODES, kind.name + kind.long_name)
    if found := _first_match(HLO_CATEGORY_OPCODES, kind.hlo_category) or by_name:
        return found
    if kind.op_name:
        return "fusion"
    if not kind.program:
        return ""
    # XLA names an instruction by its opcode and a number (`dot.151`, a GPU's kernel `dot_151`), unless a kernel or a
    # user named it.
    base = re.sub(r"([._]\d+|\.clone|\.remat)+$", "", kind.name).removeprefix("wrapped_")
    if base.endswith("fusion") or base in ELEMENTWISE | TRANSCENDENTAL:
        return "fusion"
    computing = {"dot", "convolution", "custom-call", "reduce", "sort", "scatter"}
    known = MOVEMENT | COLLECTIVES | CONTROL_OPCODES | computing
    return base if base_opcode(base) in known or base in ("copy-start", "copy-done") else ""


def _first_match(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((opcode for pattern, opcode in table if re.search(pattern, text.lower())), "")


def _inner_opcode(kind: OpKind, opcode: str) -> str:
    """For a fusion without HLO, the opcode that its `hlo_category`, its path or the words of its name suggest."""
    if opcode != "fusion":
        return opcode
    if inner := _first_match(HLO_CATEGORY_OPCODES, kind.hlo_category):
        return inner
    words = set(re.sub(r"(\.\d+|\.clone)+$", "", kind.name).replace("_fusion", "").split("_"))
    if "dot_general" in kind.op_name or words & {"dot", "convolution"}:
        return "dot"
    return "copy" if words and words <= MOVEMENT else "add"


def _gap_rows(result: Attribution, device: DeviceTrace, host: HostTrace, n_steps: int) -> list[GapRow]:
    """Waits grouped by the operations around them, longest sum first."""
    length = result.gaps[:, 1] - result.gaps[:, 0]
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in np.argsort(-length, kind="stable")[:100_000].tolist():
        _, _, before, after = result.gaps[index].tolist()
        groups[before, after].append(index)

    def name(k: int) -> str:
        return device.kinds[k].name if k >= 0 else "(start of the trace)"

    rows = [
        (float(length[members].sum()), name(before), name(after), members)
        for (before, after), members in groups.items()
    ]
    rows.sort(key=lambda row: (-row[0], row[1], row[2]))
    found = []
    for total, before, after, members in rows[:MAX_GAP_ROWS]:
        longest = members[0]  # by the order above
        if total > 0:
            found.append(
                GapRow(
                    before=before,
                    after=after,
                    occurrences=len(members) / n_steps,
                    seconds=total / n_steps / PS_PER_SECOND,
                    longest_seconds=float(length[longest]) / PS_PER_SECOND,
                    host_activity=_host_activity(host, *result.gaps[longest, :2].tolist()),
                )
            )
    return found


def _host_activity(host: HostTrace, start_ps: int, end_ps: int) -> str:
    """The shortest host span that covers at least half of an interval; "" if none does."""
    name, starts, ends = host.spans.T
    overlap = np.minimum(ends, end_ps) - np.maximum(starts, start_ps)
    covering = np.flatnonzero(overlap * 2 >= end_ps - start_ps)
    if not len(covering):
        return ""
    shortest = covering[np.argmin((ends - starts)[covering])]
    return host.span_names[name[shortest]]


def _quality_notes(
    ops: list[OpRow], blind_seconds: float, device_step_seconds: list[float], program: HloProgram | None
) -> list[str]:
    """Notes on the quality of the figures. `blind_seconds` is the time in operations without HLO."""
    notes = []
    total = sum(o.seconds for o in ops)
    if program is None:
        notes.append("the trace holds no HLO (enable_hlo_proto was off): categories come from event stats alone")
    elif blind_seconds > 0.001 * total:
        notes.append(f"{100 * blind_seconds / total:.1f} % of the time is in operations without HLO")
    if opaque := of_unknown_flops(ops, total):
        notes.append(f"flops unknown for custom calls: {', '.join(opaque[:6])}{' ...' if len(opaque) > 6 else ''}")
    if len(device_step_seconds) > 1:
        slow, fast = max(device_step_seconds), min(device_step_seconds)
        if slow - fast > 0.01 * slow:
            notes.append(f"mean step over devices: fastest {fast:.6f} s, slowest {slow:.6f} s")
    return notes
