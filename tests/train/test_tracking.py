"""`metrics.jsonl`: one line a step, also after a kill and a resume."""

import json

from tomat.train.runs.history import read_metrics, truncate_metrics
from tomat.train.tracking import JsonLinesTracker, TrainingProgress


def write(path, steps):
    tracker = JsonLinesTracker(path)
    for step in steps:
        tracker.log({"a": step}, step=step)
        tracker.log({"b": 2.0 * step, "c": float("nan")}, step=step)
    tracker.finish()


def test_everything_logged_for_a_step_is_one_line_also_after_a_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(10))
    expected = [{"step": s, "a": s, "b": 2.0 * s, "c": None} for s in range(12)]
    assert [json.loads(line) for line in path.read_text().splitlines()] == expected[:10]
    with path.open("a") as file:
        file.write('{"step": 10, "a"')  # cut short by a kill
    assert truncate_metrics(path, 7) == 4
    write(path, range(7, 12))
    assert read_metrics(path) == expected
    path.write_text(path.read_text()[:-1])  # cut short by its newline alone
    assert truncate_metrics(path, 12) == 0
    write(path, range(12, 13))
    assert read_metrics(path)[:12] == expected and len(read_metrics(path)) == 13


def test_what_is_left_is_of_the_steps_after_the_compile():
    progress = TrainingProgress(total_steps=110, first_step=10)
    assert progress.left_seconds(11, 1000.0) is None  # a compile of 1,000 s
    assert progress.left_seconds(12, 1002.0) == 98 * 2
    assert progress.left_seconds(61, 1050.0) == 49
    assert progress.left_seconds(110, 1100.0) == 0
