import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.train.runs.log_lines import MAX_STEP, parse_events, parse_metrics, read_metrics

BAD = ["", "{", "[1]", "7", '{"step": "1"}', '{"step": true}', '{"step": 1.5}', '{"step": -1}', '{"step": Infinity}',
       '{"step": 1000000000000}', "{}", "[" * 100_000]  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_a_damaged_line_is_named_and_a_torn_last_one_left_out(tmp_path, line):
    rows = [{"step": 0}, {"step": 1, "train/loss": 3.0}]
    text = f"{json.dumps(rows[0])}\n{line}\n{json.dumps(rows[1])}\n"
    assert parse_metrics(text) == (rows, (2,))
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(TomatError, match="metrics.jsonl: line 2 is no JSON object with a step .1 such in all"):
        read_metrics(path)
    path.write_text(f"{json.dumps(rows[0])}\n{json.dumps(rows[1])}\n{line}")
    assert read_metrics(path) == rows


VALUES = st.floats() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.booleans() | st.none() | st.just("\ud800")


@given(st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=4))
def test_a_line_reads_as_what_python_wrote(values):
    line = json.dumps(values | {"step": 3})
    [row], unreadable = parse_metrics(line)
    assert unreadable == () and json.dumps(row) == line  # of text, since NaN is not itself


def test_a_log_that_is_no_text_or_no_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\xfe\n{"step": 0}\n')
    with pytest.raises(TomatError, match="line 1"):
        read_metrics(path)
    with pytest.raises(TomatError, match="cannot be read"):
        read_metrics(tmp_path)


def test_events():
    good = {"event": "start", "step": MAX_STEP}
    text = "\n".join([json.dumps(good), '{"event": 7}', '{"event": "stop", "step": "x"}', "{"])
    assert parse_events(text) == ([good], (2, 3, 4))
