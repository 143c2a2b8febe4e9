"""The log of an output folder: appended to whole, by several processes, and in a bucket an object a line."""

import json
import multiprocessing

import fsspec
import pytest

from tomat.base.errors import TomatError
from tomat.base.layout import LOG_FILE
from tomat.train.runs.run_log import RUN, START, Asked, append_line, read_lines


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


def test_a_line_cut_short_costs_itself_alone(tmp_path):
    append_line(str(tmp_path), RUN, "a", START, step=0)
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes()[:-5])
    append_line(str(tmp_path), RUN, "b", START, step=0, loss=float("nan"))
    lines, damaged = read_lines(str(tmp_path))
    assert [line["name"] for line in lines] == ["b"] and lines[0]["loss"] is None and damaged == 1


def test_a_bucket_gets_an_object_for_each_line(tmp_path):
    for place in ("memory://bucket/run-log", f"file://{tmp_path}/bucket"):
        append_line(place, RUN, "a", START, step=0)
        append_line(place, RUN, "b", START, step=0)
        assert [line["name"] for line in read_lines(place)[0]] == ["a", "b"]
    memory = fsspec.filesystem("memory")
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


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / LOG_FILE).mkdir()
    with pytest.raises(TomatError, match=r"log\.jsonl cannot be written"):
        append_line(str(tmp_path), RUN, "a", START)
    (tmp_path / "file").write_text(json.dumps({}))
    with pytest.raises(TomatError, match="cannot be written"):
        append_line(str(tmp_path / "file"), RUN, "a", START)
