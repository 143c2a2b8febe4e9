"""Which stretch of time is a step: marks that are whole, missing, repeated, useless."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.perf.profile.steps import step_windows
from tomat.perf.profile.trace_data import DeviceTrace, Events, HostTrace, ModuleRun, OpKind, StepMark

STEP_PS, BUSY_PS = 1000, 950


def device_of(steps: list[StepMark], runs: int = 8, runs_per_step: int = 1) -> DeviceTrace:
    """A device that ran a program every `STEP_PS / runs_per_step`, each run one operation."""
    length = STEP_PS // runs_per_step
    modules = [ModuleRun("jit_step", 1, length * i, length * i + BUSY_PS // runs_per_step) for i in range(runs)]
    ops = Events.build([(0, m.start_ps, m.end_ps - m.start_ps, 0) for m in modules])
    return DeviceTrace("h", "/device:TPU:0", "", [OpKind("dot", 1, "jit_step")], ops, Events.build([]), modules, steps)


def host_of(device: DeviceTrace, steps: list[StepMark] | None = None) -> HostTrace:
    return HostTrace("x", "h", [device], host_steps=steps or [], event_count=8)


def marks(*numbers: int, times: int = 1) -> list[StepMark]:
    return [StepMark(n * times, STEP_PS * n, STEP_PS * n + BUSY_PS) for n in numbers]


def steps_of(device: DeviceTrace, host_steps: list[StepMark] | None = None):
    notes: set[str] = set()
    return step_windows(device, host_of(device, host_steps), "jit_step", notes), " | ".join(sorted(notes))


def test_whole_marks_say_nothing():
    found, notes = steps_of(device_of(marks(*range(8))))
    assert found.n_steps == 7 and np.all(found.durations_ps == STEP_PS) and notes == ""


@settings(deadline=None)
@given(st.sets(st.integers(0, 7), min_size=2))
def test_whatever_marks_are_left_the_step_stays(kept):
    """Every step but a last one, the wait after which is not known, lasts as long as in the whole trace."""
    found, notes = steps_of(device_of(marks(*sorted(kept))))
    if found.n_steps > 1 or max(kept) - min(kept) > 1:
        assert np.allclose(found.durations_ps[:-1], STEP_PS)
    missing = max(kept) - min(kept) + 1 - len(kept)
    assert (f"{missing} mark(s) are missing" in notes) == bool(missing)


def test_marks_without_numbers_are_told_by_the_executions():
    renumbered = [StepMark(i, m.start_ps, m.end_ps) for i, m in enumerate(marks(0, 1, 2, 4, 5, 6, 7))]
    found, notes = steps_of(device_of(renumbered))
    assert np.all(found.durations_ps == STEP_PS) and "1 mark(s) are missing, by the executions" in notes


def test_two_executions_a_step_are_no_missing_mark():
    found, notes = steps_of(device_of(marks(*range(8)), runs=16, runs_per_step=2))
    assert np.all(found.durations_ps == STEP_PS) and notes == ""


def test_annotations_of_steps_that_were_dispatched_while_others_ran_are_no_steps():
    """Two at once, then each as the one before last ends: the host's marks are one step early."""
    early = [StepMark(0, -20, -10), *(StepMark(n, STEP_PS * (n - 1) + 5, STEP_PS * (n - 1) + 15) for n in range(1, 8))]
    found, notes = steps_of(device_of([]), early)
    assert found.n_steps == 7 and np.all(found.durations_ps == STEP_PS)
    assert "dispatched, which was while others ran" in notes and "one execution of jit_step" in notes
    before_any_ran = [StepMark(0, -20, -15), StepMark(1, -10, 5)]  # the second ends after the first operation begins
    found, notes = steps_of(device_of([]), before_any_ran)
    assert found.n_steps == 7 and "one execution of jit_step" in notes
    found, notes = steps_of(device_of([]), marks(*range(8)))
    assert found.n_steps == 7 and notes == "steps are the host's step annotations"


def test_numbers_that_count_something_else():
    found, notes = steps_of(device_of(marks(*range(8), times=10)))
    assert np.all(found.durations_ps == STEP_PS) and "go up by 10 while the program runs once" in notes
    found, notes = steps_of(device_of(marks(*range(8), times=10**12)))
    assert np.all(found.durations_ps == STEP_PS) and "do not count steps" in notes
    shuffled = [StepMark(n, m.start_ps, m.end_ps) for n, m in zip((3, 1, 2, 0), marks(0, 1, 2, 3), strict=True)]
    found, notes = steps_of(device_of(shuffled))
    assert found.n_steps == 3 and np.all(found.durations_ps == STEP_PS) and "do not count steps" in notes


def test_a_damaged_number_at_the_end():
    """Numbers 0, 1, 2, 3, 60: the time says that there was no gap of 57 steps."""
    ordered = marks(0, 1, 2, 3, 4)
    found, notes = steps_of(device_of([*ordered[:4], StepMark(60, ordered[4].start_ps, ordered[4].end_ps)]))
    assert np.all(found.durations_ps == STEP_PS) and "that the time contradicts" in notes


def test_repeated_marks_are_one_step():
    twice = [m for mark in marks(*range(6)) for m in (mark, StepMark(mark.number, mark.start_ps + 500, mark.end_ps))]
    found, notes = steps_of(device_of(twice))
    assert np.all(found.durations_ps == STEP_PS) and "6 marks repeat the number" in notes
    found, notes = steps_of(device_of([*marks(*range(6)), marks(2)[0]]))
    assert np.all(found.durations_ps == STEP_PS) and "1 of 7 marks begin where another does" in notes


@pytest.mark.parametrize(
    ("useless", "reason"),
    [
        ([StepMark(i, 0, BUSY_PS) for i in range(4)], "4 of 4 marks begin at one time"),
        ([StepMark(i, 10**9 + STEP_PS * i, 10**9 + STEP_PS * i + 1) for i in range(4)], "none of the 8 operations"),
        ([StepMark(0, 0, 0)], "without a duration"),
    ],
)
def test_useless_marks_are_passed_over_and_said(useless, reason):
    found, notes = steps_of(device_of(useless))
    assert np.all(found.durations_ps == STEP_PS) and found.n_steps == 7
    assert reason in notes and "a step is one execution of jit_step" in notes
    found, notes = steps_of(device_of(useless), host_steps=marks(*range(8)))
    assert np.all(found.durations_ps == STEP_PS) and "the host's step annotations" in notes
    device = device_of(useless)
    device.modules.clear()
    with pytest.raises(TomatError, match=f"no program executions that can be used .*{reason}"):
        steps_of(device)
