"""Finds the windows of a device that hold an undisturbed step, and what else ran in the windows.

A window goes from the beginning of one step to the beginning of the next. The trace's step marks are used only if they
lie among the operations and agree with the executions of the step's program. Without usable marks, a step is one
execution.

Other programs may run in a window, the host may leave the device without work, and the trace may begin or end inside a
window. The figures of a step are the mean over windows of ordinary duration in which none of this happened. If other
programs ran in most windows, these windows count too, without the other programs and the wait before each. One wait
then remains, as between any two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median_low

import numpy as np

from tomat.base.errors import TomatError
from tomat.base.report.formats import count, seconds
from tomat.perf.profile.breakdown import Breakdown, OtherRow, StepClass, WindowRow
from tomat.perf.profile.timeline import inside
from tomat.perf.profile.trace_data import DeviceTrace, Events, HostTrace, ModuleRun, StepMark


def step_windows(device: DeviceTrace, host: HostTrace, main: str, notes: set[str]) -> np.ndarray:
    """int64 [n, 2]: the steps of a device, each from its beginning to the beginning of the next, ps.

    They are from the device's `Steps` line, else from the host's step annotations, else from executions of the main
    program. Unusable marks are named in `notes`. If there are three or more steps, the last is left out, because its
    window would end early: the wait after it is unknown.
    """
    runs = sorted((m for m in device.modules if m.program == main), key=lambda r: r.start_ps)
    executions = [StepMark(i, r.start_ps, r.end_ps) for i, r in enumerate(runs)]
    refused: list[str] = []
    for marks, name, said in (
        (device.steps, f"the `Steps` line of {device.name}", ""),
        (host.host_steps, "the host's step annotations", "steps are the host's step annotations"),
        (executions, f"the executions of {main}", f"a step is one execution of {main}"),
    ):
        if not marks:
            continue
        if marks is host.host_steps and _dispatched_ahead(marks, runs):
            found = "they say when steps were dispatched, which was while others ran"
        else:
            found = _windows(marks, device, runs)
        if isinstance(found, str):
            refused.append(f"{name}: {found}")
            continue
        if said:
            nothing_else = not device.steps and not host.host_steps
            notes.add(f"no step markers: {said}" if marks is executions and nothing_else else said)
        notes |= {f"step marks that are not used: {text}" for text in refused}
        return found
    unusable = f" that can be used ({'; '.join(refused)})" if refused else ""
    raise TomatError(
        f"{host.origin}: {device.name} has no step markers and no program executions{unusable}. Expected a `Steps` or "
        "`XLA Modules` line, or jax.profiler.StepTraceAnnotation around the step on the host."
    )


def _dispatched_ahead(marks: list[StepMark], runs: list[ModuleRun]) -> bool:
    """Whether a mark begins inside an execution (`runs`, by their start), or several executions follow the last mark,
    as for a device that begins late."""
    marked = sorted(mark.start_ps for mark in marks)
    begun = np.searchsorted([run.start_ps for run in runs], marked)
    if any(i > 0 and start < runs[i - 1].end_ps for i, start in zip(begun.tolist(), marked, strict=True)):
        return True
    executed = np.diff([*begun, len(runs)])
    return len(marks) > 1 and bool(executed[-1] > max(1, *executed[:-1]))


def _windows(marks: list[StepMark], device: DeviceTrace, runs: list[ModuleRun]) -> np.ndarray | str:
    """int64 [n, 2]: the windows from each mark to the next; or the reason why the marks are no steps."""
    ordered = sorted(marks, key=lambda mark: mark.start_ps)
    starts, ends, numbers = np.array([(m.start_ps, m.end_ps, m.number) for m in ordered], dtype=np.int64).T
    if np.any(np.diff(starts) == 0):
        return f"several of the {len(marks)} marks begin at one time"
    executed = np.diff(np.searchsorted([run.start_ps for run in runs], starts))
    if len(executed) and executed.min() != executed.max():
        return f"from {executed.min()} to {executed.max()} executions begin between two marks"
    if len(executed) and executed[0] > 1 and np.diff(numbers).min() > 1:
        return f"{executed[0]} executions begin between two marks, whose numbers are not consecutive"
    windows = np.stack([starts, np.append(starts[1:], ends[-1])], axis=1)
    # The last window ends with its mark. If the mark has no end, it is no window at all.
    if len(windows) >= 3 or ends[-1] <= starts[-1]:
        windows = windows[:-1]
    if not len(windows) or not np.any(inside(windows, device.ops.start_ps)):
        return f"none of the {len(device.ops):,} operations lies in the {len(marks)} marked steps"
    return windows


PS_PER_SECOND = 1e12
STEADY_BAND = 0.25
"""Steps within this share of the median are `steady`, others `slow` or `fast`."""
GAP_SHARE = 0.1
"""A window has a host gap if both the window, and the time in it in which no device of the host runs anything, are
longer than the median by more than this share of a step."""
CUT_SHARE = 0.01
"""The first or last window is cut off by the trace's begin or end if it lacks more than this share of the operations
of every other window."""
ENOUGH_SHARE = 0.5
"""The disturbed windows are left out if at least this share of the whole windows is undisturbed."""
HOST_GAP = "(nothing: a host gap)"


class WindowKind(StrEnum):
    """The kind of a window: a step of ordinary duration, or the reason why it is none."""

    STEADY = "steady"
    SLOW = "slow"
    FAST = "fast"
    OTHERS = "with another program"
    GAP = "with a host gap"
    CUT = "cut off"
    """The first or the last window, with fewer operations than every other: the trace began or ended in it."""
    EMPTY = "without the program"


@dataclass(frozen=True)
class JudgedWindows:
    intervals: np.ndarray
    """int64 [n, 2]: disjoint stretches that make up the steady steps, ps."""
    durations_ps: np.ndarray
    """float64 [n_steps]: duration of each steady step."""
    rows: tuple[WindowRow, ...]
    others: tuple[OtherRow, ...]
    """Other programs in all windows, and how long the host left the device without work."""
    longest_gap: tuple[int, int] | None
    """The longest stretch in which nothing ran, in the windows with a host gap, ps."""

    @property
    def n_steps(self) -> int:
        return len(self.durations_ps)


def busy_time(devices: Sequence[DeviceTrace]) -> np.ndarray:
    """int64 [n, 2]: disjoint stretches, in order, in which any of the devices ran a program or an operation, ps."""
    return _merged(*(_merged(_runs(device, None), _operations(device, None)) for device in devices))


def judged_windows(device: DeviceTrace, spans: np.ndarray, main: str, host_busy: np.ndarray) -> JudgedWindows:
    """Judge the windows of a device by what happened in them. `host_busy` is `busy_time` of all devices of its host,
    because a device that waits for another device is no gap of the host."""
    busy = busy_time([device])
    names = {kind.program for kind in device.kinds} | {run.program for run in device.modules}
    others = {name: _merged(_runs(device, name), _operations(device, name)) for name in sorted(names - {main, ""})}
    foreign = _merged(*others.values())
    ours = _runs(device, main) if any(run.program == main for run in device.modules) else _operations(device, main)
    cut = _without(_with_the_wait_before(foreign, busy, spans), _merged(ours))
    net = (spans[:, 1] - spans[:, 0] - _covered(cut, spans)).astype(np.float64)
    idle = (spans[:, 1] - spans[:, 0] - _covered(host_busy, spans)).astype(np.float64)
    starts = np.sort(_operations(device, main)[:, 0])
    begun = np.searchsorted(starts, spans[:, 1]) - np.searchsorted(starts, spans[:, 0])
    kinds, extra_idle = _kinds(net, idle, begun, _covered(foreign, spans) > 0)
    steady = kinds == WindowKind.STEADY
    first = int(spans[0, 0])
    gaps = [(int(start), int(end)) for start, end in _without(spans[kinds == WindowKind.GAP], host_busy)]
    rows = tuple(
        WindowRow(
            device=f"{device.host} {device.name}",
            start_seconds=float(start - first) / PS_PER_SECOND,
            seconds=float(end - start) / PS_PER_SECOND,
            step_seconds=float(one_net) / PS_PER_SECOND,
            steps=1,
            kind=str(kind),
        )
        for (start, end), one_net, kind in zip(spans, net, kinds, strict=True)
    )
    other_rows = []
    for program, intervals in others.items():
        covered = _covered(intervals, spans)
        if covered.any():
            runs = [run.start_ps for run in device.modules if run.program == program]
            executions = len([start for start in runs if spans[0, 0] <= start < spans[-1, 1]])
            total = float(covered.sum()) / PS_PER_SECOND
            other_rows.append(OtherRow(program, executions, total, int((covered > 0).sum())))
    if extra_idle.any():
        n_gaps = int((extra_idle > 0).sum())
        other_rows.append(OtherRow(HOST_GAP, n_gaps, float(extra_idle.sum()) / PS_PER_SECOND, n_gaps))
    return JudgedWindows(
        intervals=_without(spans[steady], cut),
        durations_ps=net[steady],
        rows=rows,
        others=tuple(other_rows),
        longest_gap=max(gaps, key=lambda gap: gap[1] - gap[0], default=None),
    )


def window_classes(rows: Sequence[WindowRow]) -> tuple[StepClass, ...]:
    """The windows by kind, in the order of `WindowKind`, with the whole duration of their steps."""
    classes = []
    for kind in WindowKind:
        group = [row.seconds for row in rows if row.kind == kind]
        if group:
            p10, p50, p90 = (float(np.percentile(group, q)) for q in (10, 50, 90))
            classes.append(StepClass(str(kind), len(group), float(np.mean(group)), p10, p50, p90))
    return tuple(classes)


def what_else_ran(breakdown: Breakdown) -> list[str]:
    """What ran in the windows of a trace but is not in its step, in words, one text for each."""
    n_windows = count(len(breakdown.windows) / breakdown.n_devices)
    found = []
    for row in breakdown.others:
        number = count(row.executions)
        times = "" if row.name == HOST_GAP or not row.executions else "once, " if number == "1" else f"{number} times, "
        doing = f"; the host was in {row.host_activity}" if row.host_activity else ""
        found.append(f"{row.name}: {times}{seconds(row.seconds)} in {count(row.windows)} of {n_windows} windows{doing}")
    return found


def of_step(events: Events, is_step: np.ndarray) -> Events:
    """The events of the step's program, and those without a program. `is_step`, bool [kinds], marks their kinds."""
    kept = is_step[events.kind]
    return Events(events.kind[kept], events.start_ps[kept], events.duration_ps[kept], events.line[kept])


def _kinds(
    net: np.ndarray, idle: np.ndarray, counts: np.ndarray, disturbed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The `WindowKind` of each window, and for a gap, by how much its idle time exceeds the median. `net` is a window's
    duration without other programs, ps; `idle` the time in which no device ran anything; `counts` the number of the
    program's operations; `disturbed` whether another program ran in it."""
    kinds = np.full(len(net), WindowKind.OTHERS, dtype=object)
    extra = np.zeros(len(net))
    whole = counts > 0 if (counts > 0).any() else np.ones(len(net), dtype=bool)
    kinds[~whole] = WindowKind.EMPTY
    for edge in (0, -1):
        found = np.flatnonzero(whole)
        if len(found) > 1 and counts[found[edge]] < (1 - CUT_SHARE) * np.delete(counts[found], edge).min():
            whole[found[edge]] = False
            kinds[found[edge]] = WindowKind.CUT
    clean = whole & ~disturbed
    if clean.sum() > 1:
        # The lower median: of two windows, the longer one is taken as disturbed.
        step, beyond = median_low(net[clean]), idle - median_low(idle[clean])
        gap = clean & (np.minimum(beyond, net - step) > GAP_SHARE * step)
        kinds[gap], extra[gap] = WindowKind.GAP, beyond[gap]
        whole, clean = whole & ~gap, clean & ~gap
    usable = clean if clean.sum() >= ENOUGH_SHARE * whole.sum() else whole
    median = median_low(net[usable])
    kinds[usable] = WindowKind.STEADY
    kinds[usable & (net > (1 + STEADY_BAND) * median)] = WindowKind.SLOW
    kinds[usable & (net < (1 - STEADY_BAND) * median)] = WindowKind.FAST
    return kinds, extra


def _runs(device: DeviceTrace, program: str | None) -> np.ndarray:
    """int64 [n, 2]: executions of a program, or of all programs for None."""
    found = [(run.start_ps, run.end_ps) for run in device.modules if program is None or run.program == program]
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def _operations(device: DeviceTrace, program: str | None) -> np.ndarray:
    """int64 [n, 2]: operations of a program, or of all programs for None."""
    ops = device.ops
    if program is not None:
        ops = of_step(ops, np.array([kind.program == program for kind in device.kinds], dtype=bool))
    return np.stack([ops.start_ps, ops.start_ps + ops.duration_ps], axis=1)


def _merged(*several: np.ndarray) -> np.ndarray:
    """int64 [m, 2]: the union of intervals, as disjoint intervals in order. Empty ones are left out."""
    intervals = np.concatenate([np.empty((0, 2), np.int64), *several])
    kept = intervals[intervals[:, 1] > intervals[:, 0]]
    kept = kept[np.argsort(kept[:, 0], kind="stable")]
    if not len(kept):
        return kept
    ends = np.maximum.accumulate(kept[:, 1])
    begins = np.concatenate([[True], kept[1:, 0] > ends[:-1]])
    last = np.append(np.flatnonzero(begins)[1:] - 1, len(kept) - 1)
    return np.stack([kept[begins, 0], ends[last]], axis=1)


def _covered(merged: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """int64 [n]: how much of each span the disjoint intervals `merged` cover."""
    if not len(merged):
        return np.zeros(len(spans), dtype=np.int64)
    before = np.concatenate([[0], np.cumsum(merged[:, 1] - merged[:, 0])])

    def until(times: np.ndarray) -> np.ndarray:
        place = np.searchsorted(merged[:, 0], times, side="right") - 1
        inside = np.minimum(times, merged[place, 1]) - merged[place, 0]
        return np.where(place >= 0, before[place] + inside, 0)

    return until(spans[:, 1]) - until(spans[:, 0])


def _without(intervals: np.ndarray, holes: np.ndarray) -> np.ndarray:
    """int64 [m, 2]: disjoint intervals without disjoint `holes`."""
    if not len(intervals) or not len(holes):
        return intervals
    edges = np.unique(np.concatenate([intervals.ravel(), holes.ravel()]))
    pieces = np.stack([edges[:-1], edges[1:]], axis=1)
    return pieces[(_covered(intervals, pieces) > 0) & (_covered(holes, pieces) == 0)]


def _with_the_wait_before(intervals: np.ndarray, busy: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Each interval, extended back over the wait before it, to what ran before it in its window."""
    if not len(intervals):
        return intervals
    place = np.searchsorted(busy[:, 0], intervals[:, 0], side="right") - 1  # each lies in one of the busy stretches
    begins = (busy[place, 0] == intervals[:, 0]) & (place > 0)
    starts = np.where(begins, busy[np.maximum(place - 1, 0), 1], intervals[:, 0])
    window = np.searchsorted(spans[:, 0], intervals[:, 0], side="right") - 1
    starts = np.where(window >= 0, np.maximum(starts, spans[np.maximum(window, 0), 0]), starts)
    return np.stack([starts, intervals[:, 1]], axis=1)
