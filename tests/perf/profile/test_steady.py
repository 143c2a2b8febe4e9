"""The step of a trace is that of the undisturbed windows, whatever else ran, on every kind of device."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.app.cli import main as tomat
from tomat.base.errors import TomatError
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.steady import (
    HOST_GAP,
    WindowKind,
    busy_time,
    judged_windows,
    step_windows,
    what_else_ran,
    window_classes,
)
from tomat.perf.profile.trace import merge_hosts
from tomat.perf.profile.trace_breakdown import breakdown_from_trace
from tomat.perf.profile.trace_data import DeviceTrace, Events, HostTrace, ModuleRun, OpKind, StepMark, Trace
from tomat.perf.profile.two_breakdowns import compare_breakdowns

MS = 10**9
"""Picoseconds."""
STEP_MS, BUSY_MS, WAIT_MS = 4, 3, 0.05
EVAL, LOG = "jit_eval_step", "jit_log"
PROGRAMS = {"jit_step": 1, EVAL: 2, LOG: 3}


def trace_of(
    n_steps: int, after: dict[int, tuple[str, float, int]], marked: str, cut: float = 0.0, cut_marks: bool = True
) -> Trace:
    """Steps of two operations of 1.5 ms each, with more time after some of them.

    Args:
        after: By step: a program, the ms of each of its executions and their number; without a program a host gap.
        marked: Where the steps' marks are: `device`; `each execution`, as libtpu marks where the host annotates no
            steps; `host`, as in a JSON trace, which knows no executions; `nowhere`.
        cut: The trace began after this share of the first execution, whose marks it has from then on, or whole.
    """
    kinds = [OpKind("a", 1, "jit_step"), OpKind("b", 1, "jit_step"), OpKind("e", 2, EVAL), OpKind("l", 3, LOG)]
    rows, runs, now = [], [], 0
    for step in range(n_steps):
        rows += [(0, now, 3 * MS // 2, 0), (1, now + 3 * MS // 2, 3 * MS // 2, 1)]
        runs.append(ModuleRun("jit_step", 1, now, now + BUSY_MS * MS))
        now += BUSY_MS * MS
        program, each_ms, times = after.get(step, ("", 0.0, 0))
        for _ in range(times):
            begin = now + (int(WAIT_MS * MS) if program else 0)
            now = begin + int(each_ms * MS)
            if program:
                rows.append((PROGRAMS[program], begin, now - begin, 2))
                runs.append(ModuleRun(program, PROGRAMS[program], begin, now))
        now += (STEP_MS - BUSY_MS) * MS
    begin = int(cut * BUSY_MS * MS)
    rows = [row for row in rows if row[1] >= begin]
    if cut_marks:
        runs[0] = replace(runs[0], start_ps=begin)
    marks = [StepMark(i, run.start_ps, run.end_ps) for i, run in enumerate(r for r in runs if r.program == "jit_step")]
    each = [StepMark(i, run.start_ps, run.end_ps) for i, run in enumerate(runs)]
    device = DeviceTrace("h", "/host:CPU:0", "cpu", kinds, Events.build(rows), modules=[] if marked == "host" else runs)
    device.steps = {"device": marks, "each execution": each}.get(marked, [])
    return merge_hosts("x", [HostTrace("x", "h", [device], host_steps=marks if marked == "host" else [])])


def step_of(n_steps: int, after: dict[int, tuple[str, float, int]], marked: str = "device", *cut) -> Breakdown:
    return breakdown_from_trace(trace_of(n_steps, after, marked, *cut))


CASES = {
    "an evaluation after each step": (9, {n: (EVAL, 2.0, 1) for n in range(9)}),
    "16 short programs": (4, {1: (EVAL, 1.173, 16)}),
    "short programs after each step": (4, {n: (LOG, 1.173, 5) for n in range(3)}),
    "an evaluation longer than all steps": (4, {1: (EVAL, 40, 1)}),
    "a short host gap": (10, {4: ("", 0.6, 1)}),
    "a cut first execution": (4, {}, 0.5),
    "a cut first execution, marks whole": (4, {}, 0.5, False),
    "all of it": (10, {3: (EVAL, 5, 1), 6: ("", 4, 1)}, 0.3),
}


@pytest.mark.parametrize(
    ("case", "marked"),
    [(case, marked) for case in CASES for marked in ("device", "each execution", "host", "nowhere")
     # Without executions the program with the most time is the step's.
     if marked != "host" or LOG not in str(CASES[case])],
)  # fmt: skip
def test_the_step_stays(case, marked):
    """The mean of all windows was up to three times the step, and 16 % below it with a cut one."""
    n_steps, after, *cut = CASES[case]
    found, plain = step_of(n_steps, after, marked, *cut), step_of(10, {}, marked)
    assert found.title == "jit_step"
    assert found.step_seconds == pytest.approx(STEP_MS * 1e-3, rel=1e-4), what_else_ran(found)
    assert np.mean(found.step_times_seconds) == pytest.approx(found.step_seconds)
    rows, expected = ({row.name: row for row in one.categories} for one in (found, plain))
    assert rows.keys() == expected.keys()
    for name, row in expected.items():
        assert rows[name].seconds == pytest.approx(row.seconds, rel=1e-3, abs=1e-9), name
        assert rows[name].occurrences == pytest.approx(row.occurrences), name
    assert {op.program for op in found.ops} <= {"jit_step", ""}
    others = {row.name: row.seconds * 1e3 for row in found.others}
    inside = [one for step, one in after.items() if step < n_steps - 1]
    for name in {program for program, *_ in inside}:
        total = sum(each * times for program, each, times in inside if program == name)
        assert others[name or HOST_GAP] == pytest.approx(total, rel=1e-6)


def test_what_else_ran_is_named_with_its_time(tmp_path, capsys):
    found = step_of(10, {4: (EVAL, 9.387, 1), 6: ("", 9, 1)})
    rows = {row.name: row for row in found.others}
    assert (rows[EVAL].executions, rows[EVAL].windows) == (1, 1) and rows[HOST_GAP].windows == 1
    assert [row.kind for row in found.windows].count(WindowKind.STEADY) == 7 == found.n_steps
    classes = {row.name: row for row in found.step_classes}
    assert classes[WindowKind.OTHERS].mean_seconds == pytest.approx(found.step_seconds + 9.437e-3)
    assert classes[WindowKind.GAP].count == 1
    assert sum(row.count for row in found.step_classes) == len(found.windows) == 9
    again = Breakdown.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (again.windows, again.others) == (found.windows, found.others)
    notes = compare_breakdowns(found, step_of(10, {})).notes
    assert any("not in the step of A" in note and EVAL in note and "9.387 ms" in note for note in notes)
    path = tmp_path / "b.json"
    path.write_text(json.dumps(found.to_dict()))
    assert tomat(["profile", str(path), "--top", "0"]) == 0
    shown = capsys.readouterr().out
    assert "windows steady: 7, 4.000 ms each" in shown and f"{EVAL}: once, 9.387 ms in 1 of 9 windows" in shown


def test_breakdowns_of_before_have_no_windows():
    content = step_of(4, {}).to_dict()
    del content["windows"], content["others"], content["device"]["stated_by_trace"]
    assert Breakdown.from_dict(content).windows == ()


def test_a_trace_without_marks_and_executions_is_refused():
    trace = trace_of(4, {}, "host")
    trace.hosts[0].host_steps.clear()
    with pytest.raises(TomatError, match="no step markers and no program executions"):
        breakdown_from_trace(trace)


def test_another_program_may_be_asked_for():
    trace = trace_of(6, {n: (EVAL, 2, 1) for n in (0, 1, 2)}, "nowhere")
    found = breakdown_from_trace(trace, program=EVAL)
    assert found.title == EVAL and {op.program for op in found.ops} <= {EVAL, ""}
    assert {op.name for op in found.ops if op.program} == {"e"}
    assert [row.name for row in found.others] == ["jit_step"]
    with pytest.raises(TomatError, match="no program 'jit_other' ran; expected one of jit_step, jit_eval_step"):
        breakdown_from_trace(trace, program="jit_other")


def test_durations():
    """Ordinary, slow and fast steps are told by the median; all are shown."""
    durations = np.array([1.0, 1.0, 1.1, 1.0, 3.0, 0.5]) * MS
    edges = np.concatenate([[0], np.cumsum(durations)]).astype(np.int64)
    windows = np.stack([edges[:-1], edges[1:]], axis=1)
    ops = Events.build([(0, int(a), int(b - a), 0) for a, b in windows])  # busy all the time
    device = DeviceTrace("h", "/device:TPU:0", "", [OpKind("dot", 1, "jit_step")], ops)
    found = judged_windows(device, windows, "jit_step", busy_time([device]))
    assert {c.name: c.count for c in window_classes(found.rows)} == {"steady": 4, "slow": 1, "fast": 1}
    assert {c.name: c.mean_seconds for c in window_classes(found.rows)}["slow"] == pytest.approx(3e-3)
    assert found.n_steps == 4 and found.durations_ps.mean() == pytest.approx(1.025 * MS)
    assert window_classes([]) == ()


STEP_PS, BUSY_PS = 1000, 950


def device_of(steps: list[StepMark], runs: int = 8, runs_per_step: int = 1) -> DeviceTrace:
    """A device that ran a program every `STEP_PS / runs_per_step`, each run one operation."""
    length = STEP_PS // runs_per_step
    modules = [ModuleRun("jit_step", 1, length * i, length * i + BUSY_PS // runs_per_step) for i in range(runs)]
    ops = Events.build([(0, m.start_ps, m.end_ps - m.start_ps, 0) for m in modules])
    return DeviceTrace("h", "/device:TPU:0", "", [OpKind("dot", 1, "jit_step")], ops, Events.build([]), modules, steps)


def marks(*numbers: int, times: int = 1) -> list[StepMark]:
    return [StepMark(n * times, STEP_PS * n, STEP_PS * n + BUSY_PS) for n in numbers]


def steps_of(device: DeviceTrace, host_steps: list[StepMark] | None = None):
    """(duration of each step, what is said)."""
    notes: set[str] = set()
    found = step_windows(device, HostTrace("x", "h", [device], host_steps=host_steps or []), "jit_step", notes)
    return found[:, 1] - found[:, 0], " | ".join(sorted(notes))


def test_whole_marks_say_nothing():
    """Of one execution a step, of two, and with numbers that count something else."""
    two = device_of(marks(*range(8)), runs=16, runs_per_step=2)
    for device in (device_of(marks(*range(8))), two, device_of(marks(*range(8), times=10))):
        found, notes = steps_of(device)
        assert len(found) == 7 and np.all(found == STEP_PS) and notes == ""


@settings(deadline=None)
@given(st.sets(st.integers(0, 7), min_size=3))
def test_whatever_marks_are_left_the_step_stays(kept):
    found, _ = steps_of(device_of(marks(*sorted(kept))))
    assert len(found) and np.all(found == STEP_PS)


def test_annotations_of_steps_that_were_dispatched_while_others_ran_are_no_steps():
    """Two at once, then each as the one before last ends: the host's marks are one step early."""
    early = [StepMark(0, -20, -10), *(StepMark(n, STEP_PS * (n - 1) + 5, STEP_PS * (n - 1) + 15) for n in range(1, 8))]
    before_any_ran = [StepMark(0, -20, -15), StepMark(1, -10, 5)]  # the second ends after the first operation begins
    for host_steps in (early, before_any_ran):
        found, notes = steps_of(device_of([]), host_steps)
        assert len(found) == 7 and np.all(found == STEP_PS)
        assert "dispatched, which was while others ran" in notes and "one execution of jit_step" in notes
    found, notes = steps_of(device_of([]), marks(*range(8)))
    assert len(found) == 7 and notes == "steps are the host's step annotations"


TWICE = [m for mark in marks(*range(6)) for m in (mark, StepMark(mark.number, mark.start_ps + 500, mark.end_ps))]


@pytest.mark.parametrize(
    ("useless", "reason"),
    [
        ([StepMark(i, 0, BUSY_PS) for i in range(4)], "begin at one time"),
        (TWICE, "from 0 to 1 executions begin between two marks"),
        ([StepMark(i, 10**9 + STEP_PS * i, 10**9 + STEP_PS * i + 1) for i in range(4)], "none of the 8 operations"),
        ([StepMark(0, 0, 0)], "none of the 8 operations"),
    ],
)
def test_useless_marks_are_passed_over_and_said(useless, reason):
    found, notes = steps_of(device_of(useless))
    assert len(found) == 7 and np.all(found == STEP_PS)
    assert reason in notes and "a step is one execution of jit_step" in notes
    found, notes = steps_of(device_of(useless), host_steps=marks(*range(8)))
    assert len(found) == 7 and np.all(found == STEP_PS) and "the host's step annotations" in notes
    device = device_of([StepMark(0, 0, 0)])
    device.modules.clear()
    with pytest.raises(TomatError, match="no program executions that can be used"):
        steps_of(device)
