"""The step of a trace is that of the undisturbed windows, whatever else ran, on every kind of device."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.app.cli import main as tomat
from tomat.base.errors import TomatError
from tomat.perf.profile.breakdown import Breakdown
from tomat.perf.profile.protos import new_message
from tomat.perf.profile.steady import (
    HOST_GAP,
    WindowKind,
    busy_time,
    judged_windows,
    step_windows,
    what_else_ran,
    window_classes,
)
from tomat.perf.profile.trace import load_trace, merge_hosts
from tomat.perf.profile.trace_breakdown import breakdown_from_trace
from tomat.perf.profile.trace_data import DeviceTrace, Events, HostTrace, ModuleRun, OpKind, StepMark, Trace
from tomat.perf.profile.two_breakdowns import compare_breakdowns

MS = 10**9
"""Picoseconds."""
EVAL = "jit_eval_step"


def edited(data: bytes, *changes) -> bytes:
    """A built TPU trace of one device after each of `changes(plane)`."""
    space = new_message("XSpace")
    space.ParseFromString(data)
    plane = next(p for p in space.planes if p.name.startswith("/device"))
    for change in changes:
        change(plane)
    return space.SerializeToString()


def line_of(plane, name: str):
    return next(line for line in plane.lines if line.name == name)


def later(plane, from_ps: int, by_ps: int) -> None:
    """Everything from a time on happens later."""
    for line in plane.lines:
        for event in line.events:
            if event.offset_ps >= from_ps:
                event.offset_ps += by_ps


def after_step(plane, number: int) -> int:
    """When a step's execution ends."""
    runs = [
        e for e in line_of(plane, "XLA Modules").events if plane.event_metadata[e.metadata_id].name[:8] == "jit_step"
    ]
    run = sorted(runs, key=lambda event: event.offset_ps)[number]
    return run.offset_ps + run.duration_ps


def host_gap(number: int, by_ps: int):
    return lambda plane: later(plane, after_step(plane, number) + 1, by_ps)


def other_program(number: int, each_ps: int, times: int = 1, wait_ps: int = 50 * 10**6, name: str = EVAL):
    """Executions of another program after that of step `number`, each after a wait."""

    def change(plane) -> None:
        ids = []
        for text, program_id in ((f"{name}(77)", None), ("%fusion.9001 = fusion()", 77)):
            identity = max(plane.event_metadata) + 1
            metadata = plane.event_metadata[identity]
            metadata.id, metadata.name = identity, text
            if program_id is not None:
                metadata.display_name = "fusion.9001"
                stat = next(key for key, value in plane.stat_metadata.items() if value.name == "program_id")
                metadata.stats.add(metadata_id=stat, uint64_value=program_id)
            ids.append(identity)
        now = after_step(plane, number)
        later(plane, now + 1, times * (wait_ps + each_ps))
        for _ in range(times):
            now += wait_ps
            for line, identity in (("XLA Modules", ids[0]), ("XLA Ops", ids[1])):
                line_of(plane, line).events.add(metadata_id=identity, offset_ps=now, duration_ps=each_ps)
            now += each_ps

    return change


def cut_first(share: float, keep_marks: bool):
    """The trace began after a share of the first execution, whose marks it holds whole or from then on."""

    def change(plane) -> None:
        run = min(line_of(plane, "XLA Modules").events, key=lambda event: event.offset_ps)
        begin, end = run.offset_ps, run.offset_ps + run.duration_ps
        at = begin + int(share * run.duration_ps)
        for name in ("XLA Ops", "Async XLA Ops"):
            for event in list(line_of(plane, name).events):
                if event.offset_ps < at:
                    line_of(plane, name).events.remove(event)
        for name in () if keep_marks else ("XLA Modules", "Steps"):
            for event in line_of(plane, name).events:
                if event.offset_ps == begin:
                    event.offset_ps, event.duration_ps = at, end - at

    return change


def without_marks(plane) -> None:
    line_of(plane, "Steps").name = "gone"


def all_marked(plane) -> None:
    """Each execution has a mark of its own, as libtpu writes where the host annotates no steps."""
    marks = line_of(plane, "Steps")
    del marks.events[:]
    for number, run in enumerate(sorted(line_of(plane, "XLA Modules").events, key=lambda event: event.offset_ps)):
        identity = max(plane.event_metadata) + 1
        metadata = plane.event_metadata[identity]
        metadata.id, metadata.name = identity, str(number)
        marks.events.add(metadata_id=identity, offset_ps=run.offset_ps, duration_ps=run.duration_ps)


@pytest.fixture(scope="module")
def step_of(tpu_bytes, tmp_path_factory):
    """`step_of(n_steps, *changes)`: the breakdown of a built TPU trace."""

    def read(n_steps: int, *changes) -> Breakdown:
        path = tmp_path_factory.mktemp("steady") / "host.xplane.pb"
        path.write_bytes(edited(tpu_bytes(n_devices=1, n_steps=n_steps), *changes))
        return breakdown_from_trace(load_trace(path))

    return read


@pytest.fixture(scope="module")
def plain(step_of):
    return step_of(10)


EACH_PS = 1173 * 10**6
CASES = {
    "an evaluation among 9": (10, [other_program(4, 9387 * 10**6)]),
    "16 short programs": (4, [other_program(1, EACH_PS, times=16)]),
    "short programs after each step": (4, [other_program(n, EACH_PS, times=5, name="jit_log") for n in range(3)]),
    "an evaluation longer than all steps": (4, [other_program(1, 40 * MS)]),
    "a host gap among 3": (4, [host_gap(1, 9 * MS)]),
    "a short host gap": (10, [host_gap(4, 400 * 10**6)]),
    "a cut first execution": (4, [cut_first(0.5, keep_marks=False)]),
    "a cut first execution, marks whole": (4, [cut_first(0.5, keep_marks=True)]),
    "a cut first execution among 10": (10, [cut_first(0.16, keep_marks=False)]),
    "all of it": (10, [cut_first(0.3, keep_marks=False), other_program(3, 5 * MS), host_gap(6, 4 * MS)]),
}


@pytest.mark.parametrize(
    ("case", "marks"),
    [*((case, None) for case in CASES), ("all of it", without_marks), ("all of it", all_marked)],
)
def test_the_step_stays(case, marks, step_of, plain):
    """The mean of all windows was up to three times the step, and 16 % below it with a cut one."""
    n_steps, changes = CASES[case]
    found = step_of(n_steps, *changes, *([marks] if marks else []))
    assert found.title == "jit_step"
    assert found.step_seconds == pytest.approx(plain.step_seconds, rel=1e-4), what_else_ran(found)
    assert np.mean(found.step_times_seconds) == pytest.approx(found.step_seconds)
    rows, expected = ({row.name: row for row in one.categories} for one in (found, plain))
    assert rows.keys() == expected.keys()
    for name, row in expected.items():
        assert rows[name].seconds == pytest.approx(row.seconds, rel=1e-3, abs=1e-9), name
        assert rows[name].occurrences == pytest.approx(row.occurrences), name
    assert {op.program for op in found.ops} <= {"jit_step", ""}


def test_what_else_ran_is_named_with_its_time(step_of, tmp_path, capsys):
    found = step_of(10, other_program(4, 9387 * 10**6), host_gap(6, 9 * MS))
    rows = {row.name: row for row in found.others}
    assert rows[EVAL].seconds == pytest.approx(9.387e-3) and (rows[EVAL].executions, rows[EVAL].windows) == (1, 1)
    assert rows[HOST_GAP].seconds == pytest.approx(9e-3, rel=1e-6) and rows[HOST_GAP].windows == 1
    assert [row.kind for row in found.windows].count(WindowKind.STEADY) == 7 == found.n_steps
    classes = {row.name: row for row in found.step_classes}
    assert classes[WindowKind.OTHERS].mean_seconds == pytest.approx(found.step_seconds + 9.437e-3)
    assert classes[WindowKind.GAP].count == 1
    assert sum(row.count for row in found.step_classes) == len(found.windows) == 9
    again = Breakdown.from_dict(json.loads(json.dumps(found.to_dict())))
    assert (again.windows, again.others) == (found.windows, found.others)
    notes = compare_breakdowns(found, step_of(10)).notes
    assert any("not in the step of A" in note and EVAL in note and "9.387 ms" in note for note in notes)
    path = tmp_path / "b.json"
    path.write_text(json.dumps(found.to_dict()))
    assert tomat(["profile", str(path), "--top", "0"]) == 0
    shown = capsys.readouterr().out
    assert "windows steady: 7, 3.179 ms each" in shown and f"{EVAL}: once, 9.387 ms in 1 of 9 windows" in shown


def test_breakdowns_of_before_have_no_windows(step_of):
    content = step_of(4).to_dict()
    del content["windows"], content["others"], content["device"]["stated_by_trace"]
    assert Breakdown.from_dict(content).windows == ()


def test_another_program_may_be_asked_for(step_of, tpu_bytes, tmp_path):
    path = tmp_path / "host.xplane.pb"
    changes = [other_program(n, 2 * MS) for n in (0, 1, 2)]
    path.write_bytes(edited(tpu_bytes(n_devices=1, n_steps=6), *changes, without_marks))
    found = breakdown_from_trace(load_trace(path), program=EVAL)
    assert found.title == EVAL and {op.program for op in found.ops} <= {EVAL, ""}
    assert {op.name for op in found.ops if op.program} == {"fusion.9001"}
    assert [row.name for row in found.others] == ["jit_step"]
    with pytest.raises(TomatError, match="no program 'jit_other' ran; expected one of jit_step, jit_eval_step"):
        breakdown_from_trace(load_trace(path), program="jit_other")


STEP_MS, BUSY_MS = 4, 3


def trace_of(kind: str, extra_ms: dict[int, float], n_steps: int = 9, other_each_ms: float = 2.0) -> Trace:
    """Steps of two operations of 1.5 ms each, with so much more time after some of them, half of it another program's.

    Args:
        kind: How the trace knows executions: `run` (TPU, GPU, CPU), or `json` (CPU), which has the host's marks alone.
        extra_ms: By the step after which it comes.
        n_steps: Of the trace.
        other_each_ms: Of another program's operation at the end of the extra time; 0 for a host gap.
    """
    kinds = [OpKind("a", 1, "jit_step"), OpKind("b", 1, "jit_step"), OpKind("e", 2, EVAL)]
    rows, runs, marks, now = [], [], [], 0
    for step in range(n_steps):
        marks.append(StepMark(step, now, now + BUSY_MS * MS))
        rows += [(0, now, 3 * MS // 2, 0), (1, now + 3 * MS // 2, 3 * MS // 2, 1)]
        runs.append(ModuleRun("jit_step", 1, now, now + BUSY_MS * MS))
        now += BUSY_MS * MS
        if extra := int(extra_ms.get(step, 0) * MS):
            if length := int(other_each_ms * MS):
                rows.append((2, now + extra - length, length, 2))
                runs.append(ModuleRun(EVAL, 2, now + extra - length, now + extra))
            now += extra
        now += (STEP_MS - BUSY_MS) * MS
    device = DeviceTrace("h", "/host:CPU:0", "cpu", kinds, Events.build(rows), modules=runs if kind == "run" else [])
    return merge_hosts("x", [HostTrace("x", "h", [device], host_steps=marks if kind == "json" else [])])


@pytest.mark.parametrize("kind", ["run", "json"])
@pytest.mark.parametrize("n_steps", [4, 9])
@pytest.mark.parametrize("extra", [{1: 3.0}, {0: 3.0, 1: 3.0, 2: 3.0}, {n: 3.0 for n in range(9)}])
def test_on_every_kind_of_device(kind, n_steps, extra):
    found = breakdown_from_trace(trace_of(kind, extra, n_steps))
    assert found.step_seconds == pytest.approx(STEP_MS * 1e-3)
    (other,) = found.others
    n_windows = len([step for step in extra if step < n_steps - 1])
    assert (other.name, other.windows) == (EVAL, n_windows) and other.seconds == pytest.approx(2e-3 * n_windows)
    gap = breakdown_from_trace(trace_of(kind, {1: 3.0}, n_steps, other_each_ms=0))
    assert gap.step_seconds == pytest.approx(STEP_MS * 1e-3)
    (other,) = gap.others
    assert other.name == HOST_GAP and other.seconds == pytest.approx(3e-3)


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


def host_of(device: DeviceTrace, steps: list[StepMark] | None = None) -> HostTrace:
    return HostTrace("x", "h", [device], host_steps=steps or [])


def marks(*numbers: int, times: int = 1) -> list[StepMark]:
    return [StepMark(n * times, STEP_PS * n, STEP_PS * n + BUSY_PS) for n in numbers]


def steps_of(device: DeviceTrace, host_steps: list[StepMark] | None = None):
    """(duration of each step, what is said)."""
    notes: set[str] = set()
    found = step_windows(device, host_of(device, host_steps), "jit_step", notes)
    return found[:, 1] - found[:, 0], " | ".join(sorted(notes))


@pytest.mark.parametrize(
    ("device", "n_steps"),
    [
        (device_of(marks(*range(8))), 7),
        (device_of(marks(*range(8)), runs=16, runs_per_step=2), 7),
        (device_of(marks(*range(8), times=10)), 7),
    ],
    ids=["one execution a step", "two executions a step", "numbers that count something else"],
)
def test_whole_marks_say_nothing(device, n_steps):
    found, notes = steps_of(device)
    assert len(found) == n_steps and np.all(found == STEP_PS) and notes == ""


@settings(deadline=None)
@given(st.sets(st.integers(0, 7), min_size=3))
def test_whatever_marks_are_left_the_step_stays(kept):
    found, _ = steps_of(device_of(marks(*sorted(kept))))
    assert np.all(found == STEP_PS)


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
    assert np.all(found == STEP_PS) and "the host's step annotations" in notes
    device = device_of([StepMark(0, 0, 0)])
    device.modules.clear()
    with pytest.raises(TomatError, match="no program executions that can be used"):
        steps_of(device)
