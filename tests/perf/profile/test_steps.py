"""Which stretch of time is a step: marks that are whole, missing, repeated, useless."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.perf.profile.steady import step_windows
from tomat.perf.profile.trace_data import DeviceTrace, Events, HostTrace, ModuleRun, OpKind, StepMark

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
