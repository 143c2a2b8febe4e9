"""Which stretch of a device's time is a step: from the trace's marks, checked against what the device did.

A mark may be missing, or be of something else than a step. So marks are taken only where they lie among the operations
and agree with the executions of the step's program; else a step is one execution.
"""

from __future__ import annotations

import numpy as np

from tomat.base.errors import TomatError
from tomat.perf.profile.timeline import inside
from tomat.perf.profile.trace_data import DeviceTrace, HostTrace, ModuleRun, StepMark


class _Unusable(Exception):
    """Why marks cannot tell steps."""


def step_windows(device: DeviceTrace, host: HostTrace, main: str, notes: set[str]) -> np.ndarray:
    """int64 [n, 2]: the steps of a device, each from its beginning to that of the next, ps.

    By the device's `Steps` line, else by the host's step annotations, else by executions of the main program; marks
    that cannot be used are said in `notes`. Annotations of steps that were dispatched while others ran are no steps of
    a device. The last step is left out where three or more are known, since the wait that follows it is not: its window
    would end early.

    Raises:
        TomatError: no marks and no executions that could tell steps.
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
        try:
            if marks is host.host_steps and _dispatched_ahead(marks, runs):
                raise _Unusable("they say when steps were dispatched, which was while others ran")
            found = _windows(marks, device, runs)
        except _Unusable as reason:
            refused.append(f"{name}: {reason}")
            continue
        if said:
            nothing_else = not device.steps and not host.host_steps
            notes.add(f"no step markers: {said}" if marks is executions and nothing_else else said)
        notes |= {f"step marks that are not used: {text}" for text in refused}
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


def _windows(marks: list[StepMark], device: DeviceTrace, runs: list[ModuleRun]) -> np.ndarray:
    """int64 [n, 2]: from each mark to the next."""
    ordered = sorted(marks, key=lambda mark: mark.start_ps)
    starts, ends, numbers = np.array([(m.start_ps, m.end_ps, m.number) for m in ordered], dtype=np.int64).T
    if np.any(np.diff(starts) == 0):
        raise _Unusable(f"several of the {len(marks)} marks begin at one time")
    executed = np.diff(np.searchsorted([run.start_ps for run in runs], starts))
    if len(executed) and executed.min() != executed.max():
        raise _Unusable(f"from {executed.min()} to {executed.max()} executions begin between two marks")
    if len(executed) and executed[0] > 1 and np.diff(numbers).min() > 1:
        raise _Unusable(f"{executed[0]} executions begin between two marks, whose numbers are not those of neighbours")
    windows = np.stack([starts, np.append(starts[1:], ends[-1])], axis=1)
    # The end of the last window is that of its mark: without one, it is no window at all.
    if len(windows) >= 3 or ends[-1] <= starts[-1]:
        windows = windows[:-1]
    if not len(windows) or not np.any(inside(windows, device.ops.start_ps)):
        raise _Unusable(f"none of the {len(device.ops):,} operations lies in the {len(marks)} marked steps")
    return windows
