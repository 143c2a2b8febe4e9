"""Figures of a run, and the parts of its time."""

import pytest

from tomat.train.runs.figures import run_figures, step_breakdown
from tomat.train.runs.record import RunRecord
from tomat.train.runs.summary import summarise


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
    events = [
        {"event": event, "step": step, "devices": devices, "hosts": 1}
        for event, step, devices in (("start", 0, "4 x TPU v6 lite"), ("resume", 8, "8 x TPU v6 lite"))
    ]
    record = RunRecord("here", {"slice": "v6e-4"}, rows, (), events, None)
    figures = run_figures(rows, {}, record.ran.rows)
    assert figures["step_seconds_median"] == 1.0 and figures["first_loss"] == 5.0
    assert figures["wall_seconds"] == 16 * 3.0
    summary = summarise(record, None, 0, 0.0)
    assert summary.devices == summary.to_dict()["devices"] == "8 x TPU v6 lite (asked for: v6e-4)"


def test_losses_that_are_no_numbers_are_left_out():
    rows = [row(0), {**row(1), "train/loss": None, "eval/validation/loss": 4.0}, row(2) | {"eval/validation/loss": 4.5}]
    figures = run_figures(rows, {"over_materials": {"teacher_forced_nmae_median": {"mean": 0.05}}})
    assert figures["last_loss"] == pytest.approx(4.0) and figures["held_out_nmae_median"] == 0.05
    assert (figures["validation_loss"], figures["validation_loss_best"]) == (4.5, 4.0)
    assert run_figures([], {}) == {"wall_seconds": 0, "tokens": 0}
