"""What a run's files say about it, and that they are not made to say more: figures, parts of its time, its line."""

import time

import pytest

from tomat.train.runs.checkpoints import survey
from tomat.train.runs.record import RunRecord, read_record
from tomat.train.runs.summary import RunSummary, run_figures, step_breakdown, summarise

START = {"event": "start", "step": 0}


def summary_of(run, ago_seconds: float = 0.0) -> RunSummary:
    record = read_record(str(run))
    whole, partial = survey(str(run), record.temporary_url)
    return summarise(record, whole, len(partial), (record.written_utc or time.time()) + ago_seconds)


def test_the_figures_are_those_of_the_log(make_run):
    summary = summary_of(make_run(steps=80, total=100, saved=(4, 60), partial=(70, 75)))
    assert (summary.steps_done, summary.steps_total, summary.last_whole_step) == (80, 100, 60)
    assert summary.partial_checkpoints == 2
    assert summary.first_loss == 4.0 and summary.validation_loss == 3.25
    assert summary.last_loss == pytest.approx(4.0 - sum(range(70, 80)) / 100)
    assert summary.mfu == pytest.approx(0.01 * (30 + 79) / 2)  # the median of the last 50


def event(name: str, **details: str) -> dict:
    return {"event": name, "step": 5, **details}


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], ("open", "last written 3 min ago")),
        ([event("preempted", cause="notice")], ("preempted", "notice after step 4")),
        ([{"event": "preempted", "step": 0, "cause": "SIGTERM"}], ("preempted", "SIGTERM before the first step")),
        ([event("preempted"), event("resume")], ("open", "last written 3 min ago")),
        ([event("stop", reason="TomatError: no")], ("stopped", "TomatError: no")),
        ([event("guard:bad_loss", action="stop", reason="NaN"), event("stop", reason="x")], ("guard bad_loss", "NaN")),
        ([event("guard:bad_loss", action="skip")], ("open", "last written 3 min ago")),
        ([event("guard:hang", after="STEP")], ("guard hang", "STEP")),
        ([event("preempted"), event("guard:hang", after="startup")], ("guard hang", "startup")),
        (
            [event("guard:hang", after="STEP"), event("resume"), event("preempted")],
            ("preempted", "SIGTERM after step 4"),
        ),
    ],
)
def test_the_state_is_what_the_run_wrote_last(make_run, events, state):
    summary = summary_of(make_run(events=(START, *events)), ago_seconds=185)
    assert (summary.state, summary.state_detail) == state


def test_what_a_run_went_on_after_is_counted(make_run):
    events = [START] + [{"event": "resume", "step": 5, "after": after} for after in ("killed", "preempted", "stop")]
    overrun = {"event": "stop", "step": 5, "reason": "SIGTERM: 25 s of grace are over: no step was left unsaved"}
    events += [overrun, events[-1], overrun]
    summary = summary_of(make_run(events=tuple(events)))
    assert summary.survived == 3
    assert (summary.state, summary.state_detail) == ("preempted", "SIGTERM after step 4")


def test_a_run_that_has_only_begun_and_one_that_is_through(make_run):
    run = make_run(steps=0, saved=())
    (run / "metrics.jsonl").unlink()
    summary = summary_of(run)
    assert (summary.state, summary.state_detail) == ("open", "nothing written yet")
    assert summary.last_whole_step is None and summary.first_loss is None and summary.mfu is None
    # Finished once its last checkpoint is there.
    for name, saved, state in (("b", 19, "finished"), ("c", 9, "open")):
        assert summary_of(make_run(name, steps=20, saved=(saved,))).state == state


def row(step: int, **figures: float) -> dict:
    times = {"step_seconds": 2.0, "wall_seconds": 3.0, "eval_seconds": 0.5, "checkpoint_seconds": 0.25}
    return {"step": step, "train/loss": 5.0 - step, "tokens_per_second": 100.0, **times, **figures}


def test_the_parts_add_up_to_the_wall_clock():
    rows = [row(step, compile_seconds=1.0 * (step == 0)) | {"throughput/loading_time": 0.1} for step in range(4)]
    parts = step_breakdown(rows)
    assert sum(parts[name] for name in ("steps", "evaluation", "checkpoints", "profiler", "other")) == parts["wall"]
    assert (parts["wall"], parts["steps"], parts["evaluation"], parts["compiling"]) == (12.0, 8.0, 2.0, 1.0)
    assert parts["waiting_for_data"] == pytest.approx(0.4)


def test_speeds_are_those_of_steps_that_did_not_compile():
    rows = [row(0, step_seconds=90.0), row(1), row(2), row(3, step_seconds=4.0), row(4, step_seconds=4.0)]
    rows.append(row(5, step_seconds=70.0, compile_seconds=60.0))
    figures = run_figures(rows, {})
    assert figures["step_seconds_median"] == 4.0
    assert figures["first_loss"] == 5.0 and figures["last_loss"] == pytest.approx(2.5)
    assert figures["tokens"] == 100 * (90 + 2 + 2 + 4 + 4 + 70)
    assert "validation_loss" not in figures and "mfu_full_median" not in figures


def test_speeds_are_those_of_the_devices_that_ran_last():
    rows = [row(step, step_seconds=9.0 if step < 8 else 1.0) for step in range(16)]
    begun = ("start", 0, "4 x TPU v6 lite"), ("resume", 8, "8 x TPU v6 lite")
    events = [{"event": event, "step": step, "devices": devices, "hosts": 1} for event, step, devices in begun]
    record = RunRecord("here", {"slice": "v6e-4"}, rows, (), events, None)
    figures = run_figures(rows, {}, record.ran.rows)
    assert figures["step_seconds_median"] == 1.0 and figures["first_loss"] == 5.0
    assert figures["wall_seconds"] == 16 * 3.0
    assert summarise(record, None, 0, 0.0).devices == "8 x TPU v6 lite (asked for: v6e-4)"


def test_errors_of_an_evaluation_before_the_last_step_are_left_out():
    means = {"free_running_nmae": {"mean": 0.02}, "teacher_forced_nmae_median": {"mean": 0.05}}
    both = [{"settings": {"step": step}, "over_materials": means} for step in (1, 2)]
    figures = run_figures([row(0), row(1), row(2)], {**both[0], "free_running": both[1]})
    assert figures["free_running_nmae"] == 0.02 and "held_out_nmae_median" not in figures


def test_the_best_validation_loss_is_of_as_many_sequences_as_the_newest():
    losses = ((0.1, 8.0), (0.7, 64.0), (0.5, 64.0), (0.6, 64.0))
    rows = [
        row(step, **{"eval/validation/loss": loss, "eval/validation/sequences": count})
        for step, (loss, count) in enumerate(losses)
    ]
    figures = run_figures(rows, {})
    assert (figures["validation_loss"], figures["validation_loss_best"]) == (0.6, 0.5)


def test_losses_that_are_no_numbers_are_left_out():
    rows = [row(0), {**row(1), "train/loss": None, "eval/validation/loss": 4.0}, row(2) | {"eval/validation/loss": 4.5}]
    figures = run_figures(rows, {"over_materials": {"teacher_forced_nmae_median": {"mean": 0.05}}})
    assert figures["last_loss"] == pytest.approx(4.0) and figures["held_out_nmae_median"] == 0.05
    assert (figures["validation_loss"], figures["validation_loss_best"]) == (4.5, 4.0)
    assert run_figures([], {}) == {"wall_seconds": 0, "tokens": 0}
    for huge in (1.7e308, 10**308):  # as damage makes them
        damaged = {key: huge for key in rows[0] if key != "step"}
        assert run_figures([{"step": step, **damaged} for step in range(20)] + [row(20)], {})["last_loss"] == -15.0
