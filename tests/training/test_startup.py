"""The name of Levanter's log, and the allocator. Flags and trackers: test_every_key.py and test_run.py."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tomat.settings.config import load_config
from tomat.training import startup
from tomat.training.startup import connect, rename_log


@pytest.fixture
def log(tmp_path) -> Iterator[logging.FileHandler]:
    """A handler of the root logger that writes `run.log.log`, as Levanter opens it."""
    handler = logging.FileHandler(tmp_path / "run.log.log", mode="a")
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root = logging.getLogger()
    before = list(root.handlers)
    root.addHandler(handler)
    yield handler
    for added in [each for each in root.handlers if each not in before]:
        root.removeHandler(added)
        added.close()


def files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_log_goes_on_under_its_right_name(tmp_path, log):
    (tmp_path / "run.log").write_text("of an earlier start\n")
    logging.getLogger().error("before")
    rename_log(tmp_path, "run")
    logging.getLogger().error("after")
    assert files(tmp_path) == {"run.log": "of an earlier start\nERROR before\nERROR after\n"}


def test_a_log_that_another_host_took_is_not_missed(tmp_path, log):
    (tmp_path / "run.log").write_text("ERROR of both\n")
    Path(log.baseFilename).unlink()
    rename_log(tmp_path, "run")
    logging.getLogger().error("after")
    assert files(tmp_path) == {"run.log": "ERROR of both\nERROR after\n"}


def test_other_logs_stay(tmp_path, log):
    other = tmp_path / "other.log.log"
    other.write_text("theirs\n")
    rename_log(tmp_path, "run")
    assert other.read_text() == "theirs\n" and set(files(tmp_path)) == {"other.log.log", "run.log"}


def test_what_cannot_be_written_is_not_swallowed(tmp_path, log):
    (tmp_path / "run.log").mkdir()
    with pytest.raises(OSError):
        rename_log(tmp_path, "run")


def test_the_allocator_is_told_where_the_run_asks_for_it(monkeypatch):
    told = []
    monkeypatch.setattr(startup, "keep_freed_memory", lambda: told.append(True))
    connect(load_config("demo"))
    assert not told
    connect(load_config("demo", ["--keep_freed_memory", "true"]))
    assert told == [True]
