"""Entries of a log: a run that was continued is one, and one whose folder is gone is still known."""

import json
import shutil
import time

import pytest

from tomat.base.errors import TomatError
from tomat.base.layout import LOG_FILE
from tomat.train.runs.entries import Entry, read_log
from tomat.train.runs.run_log import END, LAB, RESUME, ROW, RUN, START, append_line


def entries_of(place) -> dict[str, Entry]:
    return {entry.name: entry for entry in read_log(str(place), time.time()).entries}


def test_a_run_that_was_continued_is_one_entry_with_its_pieces(make_run):
    place = make_run("a", steps=20, saved=(19,)).parent
    append_line(str(place), RUN, "a", START, step=0, command="tomat train", commit="abc", settings={"x": 1})
    append_line(str(place), RUN, "a", END, step=8, status="preempted")
    append_line(str(place), RUN, "a", RESUME, step=8, command="tomat train", commit="def")
    entry = entries_of(place)["a"]
    assert [piece.step for piece in entry.pieces] == [0, 8]
    assert (entry.about("commit"), entry.about("settings"), entry.about("purpose")) == ("def", {"x": 1}, "for a test")
    # The folder says what came of it, not the log.
    assert entry.status == "finished" and entry.folder and entry.figures["steps_done"] == 20
    assert entry.figures["validation_loss"] == 3.25


def test_a_run_whose_folder_is_gone_has_the_figures_of_its_end(make_run):
    place = make_run("a").parent
    append_line(str(place), RUN, "a", START, step=0)
    append_line(str(place), RUN, "a", END, status="finished", figures={"last_loss": 2.0})
    append_line(str(place), RUN, "b", START, step=0)
    append_line(str(place), RUN, "a", START, step=0)
    shutil.rmtree(place / "a")
    first, lost, second = read_log(str(place), time.time()).entries
    assert (first.name, first.status, first.figures, first.folder) == ("a", "finished", {"last_loss": 2.0}, False)
    assert [(entry.name, entry.status) for entry in (lost, second)] == [("b", "lost"), ("a", "lost")]


def test_runs_of_earlier_versions_are_in_the_log(make_run):
    start = {"time": "2026-01-01T00:00:00", "event": "start", "step": 0, "devices": "1 x cpu"}
    place = make_run("old", events=(start,)).parent
    entry = entries_of(place)["old"]
    assert entry.about("devices") == "1 x cpu" and entry.about("command") is None
    # And stay one when this version goes on with them.
    append_line(str(place), RUN, "old", RESUME, step=5, command="tomat train")
    entry = entries_of(place)["old"]
    assert [piece.step for piece in entry.pieces] == [0, 5] and entry.began == "2026-01-01T00:00:00"


def test_the_newest_line_of_a_row_counts(tmp_path):
    for rate in (100.0, 120.0):
        figures = {"tokens_per_second_median": rate}
        append_line(str(tmp_path), LAB, "b8", ROW, sweep="s", key="k", status="measured", figures=figures)
    append_line(str(tmp_path), LAB, "b8", ROW, sweep="s", key="other", status="out of memory", reason="used 9 GiB")
    first, second = read_log(str(tmp_path), time.time()).entries
    assert first.figures == {"tokens_per_second_median": 120.0} and len(first.pieces) == 2
    assert (second.status, second.detail, second.sweep) == ("out of memory", "used 9 GiB", "s")


def test_damage_is_counted_and_the_rest_is_read(make_run):
    place = make_run("a").parent
    make_run("b")
    (place / "b" / "config.yaml").write_text("{")
    (place / LOG_FILE).write_text("not JSON\n" + json.dumps({"time": "now", "kind": "run"}) + "\n")
    log = read_log(str(place), time.time())
    assert log.damaged_lines == 2 and [entry.name for entry in log.entries] == ["a"]
    (reason,) = log.unreadable.values()
    assert "is not YAML" in reason


def test_a_place_without_runs_is_refused(tmp_path):
    with pytest.raises(TomatError, match="holds no run"):
        read_log(str(tmp_path), time.time())
    with pytest.raises(TomatError, match="does not exist"):
        read_log(str(tmp_path / "nothing"), time.time())
