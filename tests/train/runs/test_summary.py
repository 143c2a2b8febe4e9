"""What a run's files say about it, and that they are not made to say more."""

import time

import pytest

from tomat.train.runs.checkpoints import survey
from tomat.train.runs.record import read_record
from tomat.train.runs.summary import RunSummary, summarise

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


@pytest.mark.parametrize(
    ("settings", "state", "detail"),
    [
        ({"steps": 20, "saved": (19,)}, "finished", ""),
        ({"steps": 20, "saved": (9,)}, "open", "last written 3 min ago"),  # the last checkpoint is not there
        ({"events": (START,)}, "open", "last written 3 min ago"),
        (
            {"events": (START, {"event": "preempted", "step": 10, "cause": "SIGTERM"})},
            "preempted",
            "SIGTERM after step 9",
        ),
        (
            {"events": (START, {"event": "preempted", "step": 5}, {"event": "resume", "step": 5})},
            "open",
            "last written 3 min ago",
        ),
        ({"events": (START, {"event": "stop", "step": 5, "reason": "TomatError: no"})}, "stopped", "TomatError: no"),
        (
            {
                "events": (
                    START,
                    {"event": "guard:bad_loss", "step": 5, "action": "stop", "reason": "not finite"},
                    {"event": "stop", "step": 5, "reason": "TomatError: step 5"},
                )
            },
            "guard bad_loss",
            "not finite",
        ),
        (
            {"events": (START, {"event": "guard:bad_loss", "step": 5, "action": "skip"})},
            "open",
            "last written 3 min ago",
        ),
        ({"events": (START, {"event": "guard:hang", "step": 5, "after": "STEP"})}, "guard hang", "STEP"),
    ],
)
def test_the_state_is_what_the_run_wrote_last(make_run, settings, state, detail):
    summary = summary_of(make_run(**settings), ago_seconds=185)
    assert (summary.state, summary.state_detail) == (state, detail)


def test_what_a_run_went_on_after_is_counted(make_run):
    events = [START] + [{"event": "resume", "step": 5, "after": after} for after in ("killed", "preempted", "stop")]
    overrun = {"event": "stop", "step": 5, "reason": "SIGTERM: 25 s of grace are over: no step was left unsaved"}
    events += [overrun, events[-1], overrun]
    summary = summary_of(make_run(events=tuple(events)))
    assert summary.survived == 3
    assert (summary.state, summary.state_detail) == ("preempted", "SIGTERM after step 4")


def test_a_run_that_has_only_begun(make_run):
    run = make_run(steps=0, saved=())
    (run / "metrics.jsonl").unlink()
    summary = summary_of(run)
    assert (summary.state, summary.state_detail) == ("open", "nothing written yet")
    assert summary.last_whole_step is None and summary.first_loss is None and summary.mfu is None
