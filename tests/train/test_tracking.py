"""`metrics.jsonl`: one line a step, also after a kill and a resume."""

import json

from tomat.train.runs.log_lines import read_metrics, truncate_metrics
from tomat.train.tracking import JsonLinesTracker


def write(path, steps):
    tracker = JsonLinesTracker(path)
    for step in steps:
        tracker.log({"a": step}, step=step)
        tracker.log({"b": 2.0 * step}, step=step)
    tracker.finish()


def test_everything_logged_for_a_step_is_one_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(3))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": s, "a": s, "b": 2.0 * s} for s in range(3)
    ]


def test_a_resumed_log_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(10))
    with path.open("a") as file:
        file.write('{"step": 10, "a"')  # cut short by a kill
    assert truncate_metrics(path, 7) == 4
    write(path, range(7, 12))
    assert [row["step"] for row in read_metrics(path)] == list(range(12))


def test_not_a_number_is_null_and_not_broken_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonLinesTracker(path)
    tracker.log({"loss": float("nan")}, step=0)
    tracker.finish()
    assert json.loads(path.read_text()) == {"step": 0, "loss": None}
