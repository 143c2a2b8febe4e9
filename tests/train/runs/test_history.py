"""The run's own record, appended to, whole lines only, readable from a bucket; and damaged lines of a log."""

import json

import fsspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import HISTORY_FILE
from tomat.train.runs.history import MAX_STEP, append_event, parse_events, parse_metrics, read_events, read_metrics


def test_events_are_kept_in_order_and_a_line_cut_short_by_a_kill_costs_itself_alone(tmp_path):
    append_event(tmp_path / "run", "start", 0, devices="2 x cpu")
    append_event(tmp_path / "run", "stop", 7, reason="complete", loss=float("nan"))
    first, second = read_events(tmp_path / "run")
    assert (first["event"], first["step"], first["devices"]) == ("start", 0, "2 x cpu")
    assert (second["event"], second["step"], second["loss"]) == ("stop", 7, None)
    assert first["time"] <= second["time"] and first["time"].endswith("+00:00")
    path = tmp_path / "run" / HISTORY_FILE
    path.write_bytes(path.read_bytes()[:-20])
    append_event(tmp_path / "run", "resume", 2)
    assert [event["event"] for event in read_events(tmp_path / "run")] == ["start", "resume"]
    assert json.loads(path.read_text().splitlines()[-1])["event"] == "resume"


def test_a_run_without_history_and_one_in_a_bucket(tmp_path, monkeypatch):
    assert read_events(tmp_path) == []
    memory = fsspec.filesystem("memory")
    append_event(tmp_path, "start", 0)
    memory.pipe_file("/bucket/history/run/history.jsonl", (tmp_path / HISTORY_FILE).read_bytes())
    assert [event["event"] for event in read_events("memory://bucket/history/run")] == ["start"]
    memory.rm("/bucket/history", recursive=True)

    def fails(self: object, path: str) -> bytes:
        raise TimeoutError("no answer")

    monkeypatch.setattr(type(memory), "cat_file", fails)
    with pytest.raises(RetryableError, match="memory://bucket/run/history.jsonl cannot be read: no answer"):
        read_events("memory://bucket/run")


BAD = ["", "{", "[1]", "7", '{"step": "1"}', '{"step": true}', '{"step": 1.5}', '{"step": -1}', '{"step": Infinity}',
       '{"step": 1000000000000}', "{}", "[" * 100_000, "\ufffd"]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_a_damaged_line_is_named_and_a_torn_last_one_left_out(tmp_path, line):
    rows = [{"step": 0}, {"step": 1, "train/loss": 3.0}]
    text = f"{json.dumps(rows[0])}\n{line}\n{json.dumps(rows[1])}\n"
    assert parse_metrics(text) == (rows, (2,))
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(TomatError, match="metrics.jsonl: line 2 is no JSON object with a step .1 such lines in all"):
        read_metrics(path)
    path.write_text(f"{json.dumps(rows[0])}\n{json.dumps(rows[1])}\n{line}")
    assert read_metrics(path) == rows


VALUES = st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.booleans() | st.none() | st.just("\ud800")


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=4))
def test_a_line_reads_as_what_python_wrote(values):
    line = json.dumps(values | {"step": 3})
    [row], unreadable = parse_metrics(line)
    assert unreadable == () and json.dumps(row) == line  # of text, since NaN is not itself


def test_events():
    good = {"event": "start", "step": MAX_STEP}
    text = "\n".join([json.dumps(good), '{"event": 7}', '{"event": "stop", "step": "x"}', "{"])
    assert parse_events(text) == ([good], (2, 3, 4))
