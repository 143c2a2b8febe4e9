"""A figure of a run is one of the devices that its steps ran on."""

import pytest

from tomat.hardware.chips import FoundDevices
from tomat.train.runs.devices import (
    asked_but_not_found,
    devices_details,
    devices_of,
    devices_sentence,
    last_devices,
    ran_steps,
)

V6E_16, V6E_8, CPU = FoundDevices("TPU v6 lite", 16, 4), FoundDevices("TPU v6 lite", 8, 1), FoundDevices("cpu", 2, 1)
ROWS = [{"step": step, "step_seconds": 1.0} for step in range(10)]


def begun(event: str, step: int, found: FoundDevices, configuration: str = "a") -> dict:
    return {"event": event, "step": step, "configuration": configuration, **devices_details(found, "v6e-16")}


def test_a_record_says_both_what_ran_and_what_was_asked_for():
    details = devices_details(V6E_8, "v6e-16")
    assert details == {"devices": "8 x TPU v6 lite", "chips": 8, "hosts": 1, "asked_slice": "v6e-16"}
    assert devices_of(details) == V6E_8
    # As versions before wrote it, and as they did not.
    assert devices_of({"devices": "8 x TPU v6 lite", "hosts": 1}) == V6E_8 and devices_of({}) is None
    assert last_devices([begun("start", 0, V6E_16), begun("resume", 3, CPU), {"event": "stop", "step": 4}]) == CPU
    assert last_devices([]) is None


@pytest.mark.parametrize(
    "found, asked, sentence",
    [
        (V6E_16, "v6e-16", "16 x TPU v6 lite on 4 hosts"),
        (V6E_8, "v6e-16", "8 x TPU v6 lite (asked for: v6e-16)"),
        (CPU, "v6e-16", "2 x cpu (asked for: v6e-16)"),
        (CPU, "h100x8", "2 x cpu (asked for: h100x8)"),
        (CPU, None, "2 x cpu"),
        (None, "v6e-16", "which devices ran is not on record (asked for: v6e-16)"),
        (None, None, "which devices ran is not on record"),
        (V6E_16, "v99-3", "16 x TPU v6 lite on 4 hosts (asked for: v99-3)"),
        (CPU, ["v6e-16"], "2 x cpu (asked for: ['v6e-16'])"),
    ],
)
def test_what_ran_is_said_and_what_was_asked_for_where_it_is_another(found, asked, sentence):
    assert devices_sentence(found, asked) == sentence
    assert asked_but_not_found(found, asked) == ("asked for" in sentence)


@pytest.mark.parametrize(
    "events, steps",
    [
        ([begun("start", 0, V6E_16)], range(10)),
        ([begun("start", 0, V6E_16), begun("resume", 4, V6E_16)], range(10)),
        # Gone on with 8 chips from a checkpoint of step 6, and again with 16 from one of step 4.
        ([begun("start", 0, V6E_16), begun("resume", 7, V6E_8), begun("resume", 5, V6E_16)], range(10)),
        ([begun("start", 0, V6E_16), begun("resume", 8, V6E_16, "another")], range(8, 10)),
        ([begun("start", 5, V6E_8), begun("resume", 2, CPU), begun("resume", 8, V6E_16)], range(8, 10)),
    ],
)
def test_a_figure_is_of_the_steps_of_the_last_devices_and_settings(events, steps):
    ran = ran_steps(ROWS, events, "v6e-16")
    assert [row["step"] for row in ran.rows] == list(steps) and ran.devices == V6E_16
    assert bool(ran.notes) == (len(steps) < 10)


def test_steps_of_other_devices_or_settings_are_left_out_and_a_piece_without_a_step_has_no_figures():
    events = [begun("start", 0, V6E_16), begun("resume", 3, V6E_8), begun("resume", 6, V6E_8)]
    ran = ran_steps(ROWS, events, "v6e-16")
    assert ran.devices == V6E_8 and [row["step"] for row in ran.rows] == [*range(3, 10)]
    asked, left_out = ran.notes
    assert asked == "slice v6e-16 was asked for, and 8 x TPU v6 lite on 1 host ran"
    assert left_out.startswith("the 3 steps before step 3 ran on other devices")
    events = [begun("start", 0, V6E_16), begun("resume", 10, CPU, "another")]
    ran = ran_steps(ROWS, events, "v6e-16")
    assert (ran.rows, ran.devices) == (ROWS, V6E_16) and "of a later start that took no step" in ran.notes[0]
    assert ran_steps([], events, "v6e-16").devices == CPU
