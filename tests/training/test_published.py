"""The files of a run travel to its bucket and back to the machine that takes it over."""

import fsspec
import pytest

from tomat.training.published import fetch, is_remote, publish


@pytest.fixture
def bucket():
    memory = fsspec.filesystem("memory")
    yield "memory://bucket/runs/a"
    memory.rm("/bucket", recursive=True)


def test_only_urls_are_buckets():
    assert is_remote("gs://bucket/runs") and not is_remote("runs") and not is_remote("/tmp/runs")


def test_a_machine_that_takes_over_finds_log_and_configuration(bucket, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "metrics.jsonl").write_text('{"step": 0}\n')
    (first / "config.yaml").write_text("run_name: a\n")
    (first / "checkpoints").mkdir()
    assert publish(bucket, first) == ["config.yaml", "metrics.jsonl"]
    assert fetch(bucket, second) == ["config.yaml", "metrics.jsonl"]
    assert (second / "metrics.jsonl").read_text() == '{"step": 0}\n'


def test_what_is_on_the_machine_already_is_kept(bucket, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("older\n")
    publish(bucket, tmp_path)
    (tmp_path / "metrics.jsonl").write_text("newer\n")
    assert fetch(bucket, tmp_path) == []
    assert (tmp_path / "metrics.jsonl").read_text() == "newer\n"
