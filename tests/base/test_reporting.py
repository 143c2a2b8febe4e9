"""Files that appear whole or not at all, and numbers as JSON has them."""

import json
import math
import os

import numpy as np
import pytest

from tomat.base.reporting import dump_json, readable_bytes, replacing, write_text


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
    target = tmp_path / "report.json.gz"
    target.write_text("old")
    with replacing(target) as temporary:
        assert temporary.name == target.name  # the suffix decides on a format
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert os.listdir(tmp_path) == [target.name]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path):
    target = tmp_path / "report"
    target.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(target) as temporary:
        temporary.write_text("a part")
        raise KeyboardInterrupt
    assert target.read_text() == "old" and os.listdir(tmp_path) == [target.name]


def test_a_written_file_is_as_readable_as_any_other_whatever_its_letters(tmp_path):
    written, other = tmp_path / "new" / "report", tmp_path / "other"
    write_text(written, "half of a surrogate pair: \ud800")
    other.write_text("text")
    assert written.stat().st_mode == other.stat().st_mode and written.read_text().endswith(": \\ud800")


def test_json_is_the_same_for_the_same_content():
    value = {"b": np.float32(0.5), "a": [np.int64(1), math.nan, (1, 2)], "c": np.arange(3)}
    text = dump_json(value)
    assert text == dump_json(dict(reversed(value.items())))
    assert json.loads(text) == {"a": [1, None, [1, 2]], "b": 0.5, "c": [0, 1, 2]}


def test_bytes_have_three_digits_and_no_exponent():
    shown = {0: "0 bytes", 1: "1 byte", 999: "999 bytes", 1010: "1,010 bytes", 1024: "1 KiB", 1500: "1.46 KiB",
             1010 * 2**20: "1,010 MiB", 33_543_694_581: "31.2 GiB", 2**60: "1,048,576 TiB"}  # fmt: skip
    assert {size: readable_bytes(size) for size in shown} == shown
