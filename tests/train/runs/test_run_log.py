"""The log of an output folder: lines stay whole, by several processes, in a bucket too; a run that was continued is one
entry, and one whose folder is gone is still known."""

import json
import multiprocessing
import shutil
import time

import fsspec
import pytest

from tomat.base.errors import TomatError
from tomat.base.layout import LOG_FILE
from tomat.train.runs.run_log import END, RESUME, RUN, START, Asked, Entry, append_line, read_lines, read_log


def _append_many(place: str, name: str) -> None:
    for number in range(20):
        append_line(place, RUN, name, START, step=number, purpose="x" * 3000)


def test_lines_of_several_processes_stay_whole(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_append_many, args=(str(tmp_path), name)) for name in "abc"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    lines, damaged = read_lines(str(tmp_path))
    assert damaged == 0 and len(lines) == 60
    for name in "abc":
        assert [line["step"] for line in lines if line["name"] == name] == list(range(20))


def test_a_line_cut_short_costs_itself_alone_and_a_log_that_cannot_be_written_is_one_line(tmp_path):
    append_line(str(tmp_path), RUN, "a", START, step=0)
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes()[:-5])
    append_line(str(tmp_path), RUN, "b", START, step=0, loss=float("nan"))
    lines, damaged = read_lines(str(tmp_path))
    assert [line["name"] for line in lines] == ["b"] and lines[0]["loss"] is None and damaged == 1
    path.unlink()
    path.mkdir()
    with pytest.raises(TomatError, match=r"log\.jsonl cannot be written"):
        append_line(str(tmp_path), RUN, "a", START)


def test_a_bucket_gets_an_object_for_each_line(tmp_path):
    memory = fsspec.filesystem("memory")
    for place in ("memory://bucket/run-log", f"file://{tmp_path}/bucket"):
        append_line(place, RUN, "a", START, step=0)
        append_line(place, RUN, "b", START, step=0)
        assert [line["name"] for line in read_lines(place)[0]] == ["a", "b"]
    assert len(memory.ls("/bucket/run-log/log")) == 2
    memory.rm("/bucket/run-log", recursive=True)
    assert read_lines("memory://bucket/run-log") == ([], 0)


def test_what_differs_from_the_recipe_is_what_the_words_change(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("purpose: a\ntrainer: {seed: 1, num_train_steps: 5}\n")
    words = ["--trainer.seed", "1", "--trainer.num_train_steps", "7", "--run_name", "b", "--data.layout", "v3-p7"]
    asked = Asked.by_words(["train", "--purpose", "two words"], recipe, words)
    assert asked.settings == {"trainer.num_train_steps": 7, "data.layout": "v3-p7"}
    assert asked.command == "tomat train --purpose 'two words'" and asked.recipe == str(recipe)


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


def test_damage_is_counted_and_the_rest_is_read(make_run):
    place = make_run("a").parent
    make_run("b")
    (place / "b" / "config.yaml").write_text("{")
    (place / LOG_FILE).write_text("not JSON\n" + json.dumps({"time": "now", "kind": "run"}) + "\n")
    log = read_log(str(place), time.time())
    assert log.damaged_lines == 2 and [entry.name for entry in log.entries] == ["a"]
    (reason,) = log.unreadable.values()
    assert "is not YAML" in reason
