"""Which stretch of a device's time is a step: from the trace's marks, checked against what the device did.

A profiler drops marks, a damaged file moves them, and a counter need not count steps. So marks are taken only where
they lie among the operations; their numbers and the program's executions tell how many steps lie between two of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tomat.base.errors import TomatError
from tomat.perf.profile.timeline import inside
from tomat.perf.profile.trace_data import DeviceTrace, HostTrace, ModuleRun, StepMark

MAX_STEPS_OF_A_WINDOW = 100
"""Numbers of neighbouring marks further apart count something else than steps (tokens, sequences), or are damaged."""
LEAST_SHARE_OF_A_STEP = 0.5
"""A window that holds k steps by its marks' numbers lasts at least k times this share of a typical step."""


@dataclass(frozen=True)
class StepWindows:
    """The steps of one device."""

    windows: np.ndarray
    """int64 [n, 2]: disjoint [start, start of the next), ps."""
    steps: np.ndarray
    """int64 [n]: steps in each window, more than one where marks between are missing."""

    @property
    def n_steps(self) -> int:
        return int(self.steps.sum())

    @property
    def durations_ps(self) -> np.ndarray:
        """float64 [n_steps]; steps that share a window share its time equally."""
        return np.repeat((self.windows[:, 1] - self.windows[:, 0]) / self.steps, self.steps)


class _Unusable(Exception):
    """Why marks cannot tell steps."""


def step_windows(device: DeviceTrace, host: HostTrace, main: str, notes: set[str]) -> StepWindows:
    """The device's `Steps` line, else the host's step annotations, else executions of the main program.

    Annotations of steps that were dispatched while others ran are no steps of a device.
    Marks that cannot be right are passed over, and where one is missing its steps share the time between its
    neighbours; both are said in `notes`. The last step is left out where three or more are known, since the wait that
    follows it is not: its window would end early.

    Raises:
        TomatError: no marks and no executions that could tell steps.
    """
    runs = sorted((m for m in device.modules if m.program == main), key=lambda r: r.start_ps)
    executions = [StepMark(i, r.start_ps, r.end_ps) for i, r in enumerate(runs)]
    run_starts = np.array([r.start_ps for r in runs], dtype=np.int64)
    refused: list[str] = []
    for marks, name, said in (
        (device.steps, f"the `Steps` line of {device.name}", ""),
        (host.host_steps, "the host's step annotations", "steps are the host's step annotations"),
        (executions, f"the executions of {main}", f"a step is one execution of {main}"),
    ):
        if not marks:
            continue
        if marks is host.host_steps and _dispatched_ahead(marks, runs):
            refused.append(f"{name}: they say when steps were dispatched, which was while others ran")
            continue
        found_notes: set[str] = set()
        try:
            found = _windows(marks, name, device, run_starts, executions is not marks, found_notes)
        except _Unusable as reason:
            refused.append(f"{name}: {reason}")
            continue
        if said:
            nothing_else = not device.steps and not host.host_steps
            found_notes.add(f"no step markers: {said}" if marks is executions and nothing_else else said)
        notes |= found_notes | {f"step marks that are not used: {text}" for text in refused}
        return found
    unusable = f" that can be used ({'; '.join(refused)})" if refused else ""
    raise TomatError(
        f"{host.origin}: {device.name} has {len(device.ops):,} operations but no step markers and no program "
        f"executions{unusable}, so its time cannot be given per step. Expected a `Steps` or `XLA Modules` line, "
        "or jax.profiler.StepTraceAnnotation around the step on the host."
    )


def _dispatched_ahead(marks: list[StepMark], runs: list[ModuleRun]) -> bool:
    """Whether a mark begins inside an execution (`runs`, by their start), or several executions after the last mark.

    The latter is a device that begins late: steps were dispatched before the first of them ran.
    """
    marked = sorted(mark.start_ps for mark in marks)
    begun = np.searchsorted([run.start_ps for run in runs], marked)
    if any(i > 0 and start < runs[i - 1].end_ps for i, start in zip(begun.tolist(), marked, strict=True)):
        return True
    executed = np.diff([*begun, len(runs)])
    return len(marks) > 1 and bool(executed[-1] > max(1, *executed[:-1]))


def _windows(
    marks: list[StepMark], name: str, device: DeviceTrace, run_starts: np.ndarray, numbered: bool, notes: set[str]
) -> StepWindows:
    ordered = sorted(marks, key=lambda m: (m.start_ps, m.end_ps))
    distinct = [m for i, m in enumerate(ordered) if i == 0 or m.start_ps > ordered[i - 1].start_ps]
    together = len(ordered) - len(distinct)
    if together and together >= len(distinct):
        raise _Unusable(f"{together + 1} of {len(ordered)} marks begin at one time")
    if together:
        notes.add(f"{name}: {together} of {len(ordered)} marks begin where another does and are left out")
    counts = numbered and len({m.number for m in distinct}) > 1
    if counts:
        distinct = _one_a_number(distinct, name, notes)
    starts = np.array([m.start_ps for m in distinct], dtype=np.int64)
    last_end = distinct[-1].end_ps
    ends = np.append(starts[1:], max(last_end, starts[-1] + 1))
    windows = np.stack([starts, ends], axis=1)
    steps = np.ones(len(windows), dtype=np.int64)
    if numbered and len(windows) > 1:
        inner = windows[:-1]
        executed = np.searchsorted(run_starts, inner[:, 1]) - np.searchsorted(run_starts, inner[:, 0])
        widths = (inner[:, 1] - inner[:, 0]).astype(np.float64)
        if counts:
            steps[:-1] = _steps_by_number([m.number for m in distinct], widths, executed, name, notes)
        if device.steps is marks and np.all(steps == 1):
            steps[:-1] = _steps_by_execution(widths, executed, name, notes)
    # The end of the last window is that of its mark: without one, it is no window at all.
    if len(windows) > 1 and (int(steps.sum()) >= 3 or last_end <= starts[-1]):
        windows, steps = windows[:-1], steps[:-1]
    if windows[-1, 1] - windows[-1, 0] <= 1:
        raise _Unusable(f"{len(marks)} mark(s) without a duration")
    if not np.any(inside(windows, device.ops.start_ps)):
        raise _Unusable(f"none of the {len(device.ops):,} operations lies in the {len(marks)} marked steps")
    return StepWindows(windows, steps)


def _one_a_number(marks: list[StepMark], name: str, notes: set[str]) -> list[StepMark]:
    """Neighbouring marks of one step's number as one mark."""
    merged: list[StepMark] = []
    for mark in marks:
        if merged and merged[-1].number == mark.number:
            merged[-1] = StepMark(mark.number, merged[-1].start_ps, max(merged[-1].end_ps, mark.end_ps))
        else:
            merged.append(mark)
    if len(merged) < len(marks):
        notes.add(f"{name}: {len(marks) - len(merged)} marks repeat the number of the one before; they are one step")
    return merged


def _steps_by_number(
    numbers: list[int], widths: np.ndarray, executed: np.ndarray, name: str, notes: set[str]
) -> np.ndarray:
    """int64 [n]: steps between neighbouring marks, by their numbers where those can be right, else one each."""
    differences = [b - a for a, b in zip(numbers, numbers[1:], strict=False)]
    one_each = np.ones(len(differences), dtype=np.int64)
    if all(d == 1 for d in differences):
        return one_each
    if min(differences) < 1 or max(differences) > MAX_STEPS_OF_A_WINDOW:
        notes.add(f"{name}: the numbers of the marks do not count steps, so every mark is taken as one step")
        return one_each
    steps = np.array(differences, dtype=np.int64)
    single = steps == 1
    if steps.min() == steps.max() and executed.sum() and round(executed.mean()) < 2:
        notes.add(
            f"{name}: the numbers go up by {steps[0]} while the program runs once, so every mark is taken as one step"
        )
        return one_each
    each = widths / steps
    typical = float(np.median(each[single] if single.any() else each))
    contradicted = ~single & (each < LEAST_SHARE_OF_A_STEP * typical)
    if contradicted.any():
        notes.add(f"{name}: {contradicted.sum()} jump(s) in the marks' numbers that the time contradicts are not used")
        steps[contradicted] = 1
    return _shared(steps, name, "numbers", notes)


def _steps_by_execution(widths: np.ndarray, executed: np.ndarray, name: str, notes: set[str]) -> np.ndarray:
    """int64 [n]: a window with a multiple of the usual executions, and as much more time, lacks marks inside."""
    usual = max(1, int(np.median(executed)))
    times = executed // usual
    typical = float(np.median(widths[executed == usual])) if np.any(executed == usual) else 0.0
    lacking = (times > 1) & (executed % usual == 0) & (times <= MAX_STEPS_OF_A_WINDOW)
    lacking &= widths >= LEAST_SHARE_OF_A_STEP * times * typical
    return _shared(np.where(lacking, times, 1).astype(np.int64), name, "executions of the program", notes)


def _shared(steps: np.ndarray, name: str, evidence: str, notes: set[str]) -> np.ndarray:
    missing = int((steps - 1).sum())
    if missing:
        notes.add(
            f"{name}: {missing} mark(s) are missing, by the {evidence}; the steps between two marks share their time"
        )
    return steps
