"""A trace of real steps as a `Breakdown`."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np

from tomat.profile.breakdown import Breakdown, GapRow, OpRow, Roofs, StepClass
from tomat.profile.categories import (
    MOVEMENT,
    Category,
    Classified,
    Direction,
    Evidence,
    Part,
    classify,
    classify_program,
)
from tomat.profile.hlo import CONTROL_OPCODES, Frame, HloProgram, sound_parts
from tomat.profile.hlo_costs import COLLECTIVES, ELEMENTWISE, TRANSCENDENTAL, base_opcode
from tomat.profile.hlo_kernels import loop_notes
from tomat.profile.program_breakdown import kernel_row
from tomat.profile.steps import step_windows
from tomat.profile.timeline import Attribution, attribute
from tomat.profile.trace_data import DeviceTrace, HostTrace, OpKind, Trace, main_program

PS_PER_SECOND = 1e12
STEADY_BAND = 0.25
"""Steps within this share of the median duration are `steady`, others `slow` or `fast`."""
MAX_GAP_ROWS = 10

# What an `hlo_category` (xprof) says about the opcodes inside, for traces without HLO. Keys are matched in order.
HLO_CATEGORY_OPCODES: tuple[tuple[str, str], ...] = (
    (r"all-reduce", "all-reduce"), (r"all-gather", "all-gather"), (r"reduce-scatter", "reduce-scatter"),
    (r"all-to-all", "all-to-all"), (r"collective", "collective-permute"), (r"convolution|dot|matmul", "dot"),
    (r"data formatting|copy|transpose|broadcast|slice|pad|reshape", "copy"), (r"infeed", "infeed"),
    (r"outfeed", "outfeed"), (r"host send|send", "send"), (r"host recv|recv", "recv"), (r"while", "while"),
    (r"conditional", "conditional"), (r"call", "custom-call"), (r"fusion|elementwise|reduce|sort|rng", "add"),
)  # fmt: skip
# Last resort, for GPU events that carry no HLO: the CUDA kernel's own name.
KERNEL_NAME_OPCODES: tuple[tuple[str, str], ...] = (
    (r"nccl.*allreduce", "all-reduce"), (r"nccl.*allgather", "all-gather"), (r"nccl.*reducescatter", "reduce-scatter"),
    (r"nccl", "collective-permute"), (r"memcpyh2d|memcpyd2h|memcpy.*(htod|dtoh)", "send"), (r"memcpy|memset", "copy"),
    (r"gemm|cutlass|xmma|cublas|nvjet", "dot"),
)  # fmt: skip


def breakdown_from_trace(trace: Trace, *, device_kind: str | None = None) -> Breakdown:
    """The mean step of a trace.

    Args:
        trace: see `load_trace`.
        device_kind: JAX's name of the chip, where the trace does not hold it (Chrome traces).

    Raises:
        TomatError: the trace has neither step markers nor program executions that can be used, so that no step can be
            told from another.
    """
    devices = trace.devices
    main = main_program(devices)
    main_name = main[0] if main else ""
    # By program and name of an operation: its exclusive seconds, hidden seconds and occurrences in the mean step, and
    # what is known of one execution, from HLO or else from the trace's own stats.
    sums: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(3))
    known: dict[tuple[str, str], tuple[OpRow, bool]] = {}
    verdicts: dict[int, dict[str, Classified]] = {}
    between_seconds = waiting_seconds = 0.0
    step_times: list[float] = []
    device_steps: list[float] = []
    most_idle_ps, gaps = -1.0, []
    notes: set[str] = set()
    for host, device in [(one, device) for one in trace.hosts for device in one.devices]:
        table = [_known(kind, trace, verdicts) for kind in device.kinds]
        steps = step_windows(device, host, main_name, notes)
        collective = np.array([row.category == Category.COLLECTIVES_EXPOSED for row, _ in table], dtype=bool)
        executions = np.array([(m.start_ps, m.end_ps) for m in device.modules], dtype=np.int64).reshape(-1, 2)
        result = attribute(device.ops, device.async_ops, collective, steps.windows, executions)
        n_summed = steps.n_steps * len(devices)
        seconds = 1.0 / (n_summed * PS_PER_SECOND)
        for (row, from_hlo), exclusive_ps, hidden_ps, occurrences in zip(
            table, result.exclusive_ps, result.hidden_ps, result.occurrences, strict=True
        ):
            key = (row.program, row.name)
            known.setdefault(key, (row, from_hlo))
            sums[key] += (exclusive_ps * seconds, hidden_ps * seconds, occurrences / n_summed)
        between_seconds += result.between_ps * seconds
        waiting_seconds += result.waiting_ps * seconds
        device_steps.append(result.total_ps / steps.n_steps / PS_PER_SECOND)
        step_times += [float(d) / PS_PER_SECOND for d in steps.durations_ps]
        idle_ps = result.between_ps + result.waiting_ps
        if idle_ps > most_idle_ps:
            most_idle_ps, gaps = idle_ps, _gap_rows(result, device, host, steps.n_steps)
    ops = [
        known[key][0].of_step(float(seconds), float(hidden), float(occurrences))
        for key, (seconds, hidden, occurrences) in sorted(sums.items())
        if seconds or occurrences
    ]
    if between_seconds > 0:
        ops.append(_bare_row("(no program running)", Category.IDLE, between_seconds))
    # Sums of float64 picoseconds leave a remainder of either sign around 1e-9 of the step; it belongs here too.
    if waiting_seconds != 0:
        ops.append(_bare_row("(program running, no operation)", Category.UNATTRIBUTED, waiting_seconds))
    # 0 where the events of the main program carry no id.
    main_id = next((k.program_id for d in devices for k in d.kinds if k.program == main_name and k.program_id), 0)
    program = trace.program(main_id, main_name) if main else None
    blind_seconds = sum(o.seconds for o in ops if o.program and not known[o.program, o.name][1])
    quality = _quality_notes(ops, blind_seconds, device_steps, program)
    kind_of_chip = device_kind or next((d.device_kind for d in devices if d.device_kind), "")
    return Breakdown(
        title=main_name or "trace",
        source="trace",
        roofs=Roofs.of_device_kind(kind_of_chip),
        step_seconds=sum(op.seconds for op in ops),
        ops=tuple(ops),
        n_devices=len(devices),
        n_hosts=len(trace.hosts),
        n_steps=round(len(step_times) / len(devices)),
        n_events_left_out=sum(sum(host.left_out.values()) for host in trace.hosts),
        step_times_seconds=tuple(step_times),
        step_classes=step_classes(step_times),
        gaps=tuple(gaps),
        memory_bytes=program.memory_bytes if program else {},
        notes=(*trace.notes, *sorted(notes), *quality),
    )


def step_classes(durations: list[float]) -> tuple[StepClass, ...]:
    """Steps by how far their duration lies from the median: steady, slow, fast; empty classes left out."""
    if not durations:
        return ()
    values = np.sort(np.array(durations))
    median = float(np.median(values))
    groups = {
        "steady": values[np.abs(values - median) <= STEADY_BAND * median],
        "slow": values[values > (1 + STEADY_BAND) * median],
        "fast": values[values < (1 - STEADY_BAND) * median],
    }
    rows = []
    for name, group in groups.items():
        if len(group):
            p10, p50, p90 = (float(np.percentile(group, q)) for q in (10, 50, 90))
            rows.append(StepClass(name, len(group), float(group.mean()), p10, p50, p90))
    return tuple(rows)


def _bare_row(name: str, category: Category, seconds: float) -> OpRow:
    return OpRow(name, "", "", category, Part.OUTSIDE, Direction.NONE, 0.0, seconds)


def _known(kind: OpKind, trace: Trace, cache: dict[int, dict[str, Classified]]) -> tuple[OpRow, bool]:
    """An operation without time, and whether it is known from HLO; `cache` has the verdicts on programs by `id`."""
    program = trace.program(kind.program_id, kind.program)
    if program is not None and kind.name in program.by_name:
        return _known_from_hlo(kind, program, cache), True
    opcode = _opcode(kind)
    frames = (Frame(kind.source.rsplit(":", 1)[0], "", 0),) if kind.source else ()
    evidence = [Evidence(kind.op_name, frames, 1.0)] if kind.op_name or frames else []
    target = kind.name if opcode == "custom-call" else ""
    if opcode:
        verdict = classify(opcode, frozenset({_inner_opcode(kind, opcode)}), evidence, target)
    else:
        verdict = Classified(Category.UNATTRIBUTED, Part.OUTSIDE, Direction.NONE)
    row = OpRow(kind.name, kind.program, opcode, verdict.category, verdict.part, verdict.direction, 0.0, 0.0,
                flops=kind.flops, hbm_bytes=kind.bytes_accessed, op_name=kind.op_name, source=kind.source)  # fmt: skip
    return row, False


def _known_from_hlo(kind: OpKind, program: HloProgram, cache: dict[int, dict[str, Classified]]) -> OpRow:
    with sound_parts(program):
        instruction = program.by_name[kind.name]
        if id(program) not in cache:
            cache[id(program)] = classify_program(program)
        verdict = cache[id(program)].get(kind.name)
        if verdict is None:  # an instruction of a computation that the entry does not reach, such as a host thread's
            evidence = [Evidence(instruction.op_name, program.frames(instruction), 1.0)]
            inner = frozenset(i.opcode for i in program.inner(instruction))
            verdict = classify(instruction.opcode, inner, evidence, instruction.custom_call_target)
        row = kernel_row(program, instruction, verdict)
    # A profiler that knows nothing of a kernel's work writes 0.
    flops = (kind.flops or None) if row.flops is None else row.flops
    return replace(row, flops=flops, op_name=row.op_name or kind.op_name, source=row.source or kind.source)


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
    return _opcode_in_name(kind.name) if kind.program else ""


def _first_match(table: tuple[tuple[str, str], ...], text: str) -> str:
    return next((opcode for pattern, opcode in table if re.search(pattern, text.lower())), "")


def _opcode_in_name(name: str) -> str:
    """XLA names an instruction after its opcode and number (`dot.151`) unless a kernel or a user named it.

    A GPU's kernel is `dot_151`.
    """
    base = re.sub(r"([._]\d+|\.clone|\.remat)+$", "", name).removeprefix("wrapped_")
    if base.endswith("fusion") or base in ELEMENTWISE | TRANSCENDENTAL:
        return "fusion"
    computing = {"dot", "convolution", "custom-call", "reduce", "sort", "scatter"}
    known = MOVEMENT | COLLECTIVES | CONTROL_OPCODES | computing
    return base if base_opcode(base) in known or base in ("copy-start", "copy-done") else ""


def _inner_opcode(kind: OpKind, opcode: str) -> str:
    """For a fusion without HLO, the opcode that its `hlo_category`, its path or the words of its name stand for."""
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
    gaps = result.gaps
    length = gaps.end_ps - gaps.start_ps
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in np.argsort(-length, kind="stable")[:100_000].tolist():
        groups[int(gaps.before[index]), int(gaps.after[index])].append(index)

    def name(k: int) -> str:
        return device.kinds[k].name if k >= 0 else "(start of the trace)"

    rows = []
    for (before, after), members in groups.items():
        longest = max(members, key=lambda i: int(length[i]))
        rows.append((float(length[members].sum()), name(before), name(after), len(members), longest))
    rows.sort(key=lambda r: (-r[0], r[1], r[2]))
    return [
        GapRow(
            before=before,
            after=after,
            occurrences=count / n_steps,
            seconds=total / n_steps / PS_PER_SECOND,
            longest_seconds=float(length[longest]) / PS_PER_SECOND,
            host_activity=_host_activity(host, int(gaps.start_ps[longest]), int(gaps.end_ps[longest])),
        )
        for total, before, after, count, longest in rows[:MAX_GAP_ROWS]
        if total > 0
    ]


def _host_activity(host: HostTrace, start_ps: int, end_ps: int) -> str:
    """The shortest host span that covers at least half of an interval, "" if none does."""
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
    """What a reader should know of the figures.

    Args:
        ops: Of the mean step.
        blind_seconds: Of a step, in operations that the trace has no HLO of.
        device_step_seconds: Mean step of each device.
        program: The main program, where the trace has its HLO.
    """
    notes = []
    total = sum(o.seconds for o in ops)
    if program is None:
        notes.append("the trace holds no HLO (enable_hlo_proto was off): categories come from event stats alone")
    else:
        with sound_parts(program):
            notes += loop_notes(program)
    if program is not None and blind_seconds > 0.001 * total:
        notes.append(f"{100 * blind_seconds / total:.1f} % of the time is in operations without HLO")
    opaque = sorted({o.name for o in ops if o.flops is None and o.program and o.seconds > 0.001 * total})
    if opaque:
        notes.append(f"flops unknown for custom calls: {', '.join(opaque[:6])}{' ...' if len(opaque) > 6 else ''}")
    if len(device_step_seconds) > 1:
        slow, fast = max(device_step_seconds), min(device_step_seconds)
        if slow - fast > 0.01 * slow:
            notes.append(f"mean step over devices: fastest {fast:.6f} s, slowest {slow:.6f} s")
    return notes
