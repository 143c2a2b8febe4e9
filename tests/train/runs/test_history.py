"""The run's own record: appended to, whole lines only, readable from a bucket."""

import json

import fsspec
import pytest

from tomat.base.errors import RetryableError
from tomat.base.layout import HISTORY_FILE
from tomat.train.runs.history import append_event, read_events


def test_events_are_kept_in_order_with_their_details(tmp_path):
    append_event(tmp_path / "run", "start", 0, devices="2 x cpu")
    append_event(tmp_path / "run", "stop", 7, reason="complete", loss=float("nan"))
    events = read_events(tmp_path / "run")
    assert [(event["event"], event["step"]) for event in events] == [("start", 0), ("stop", 7)]
    assert events[0]["devices"] == "2 x cpu" and events[1]["loss"] is None
    assert events[0]["time"] <= events[1]["time"] and events[0]["time"].endswith("+00:00")


def test_a_line_cut_short_by_a_kill_costs_itself_alone(tmp_path):
    append_event(tmp_path, "start", 0)
    append_event(tmp_path, "stop", 3)
    path = tmp_path / HISTORY_FILE
    path.write_bytes(path.read_bytes()[:-20])
    append_event(tmp_path, "resume", 2)
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "resume"]
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "resume"


def test_a_run_without_history_and_one_in_a_bucket(tmp_path):
    assert read_events(tmp_path) == []
    memory = fsspec.filesystem("memory")
    append_event(tmp_path, "start", 0)
    memory.pipe_file("/bucket/history/run/history.jsonl", (tmp_path / HISTORY_FILE).read_bytes())
    assert [event["event"] for event in read_events("memory://bucket/history/run")] == ["start"]
    memory.rm("/bucket/history", recursive=True)


def test_a_history_that_cannot_be_read_just_now_is_one_error_to_try_again(monkeypatch):
    memory = fsspec.filesystem("memory")

    def fails(self: object, path: str) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(memory), "cat_file", fails)
    with pytest.raises(RetryableError, match="memory://bucket/run/history.jsonl cannot be read: no answer"):
        read_events("memory://bucket/run")
