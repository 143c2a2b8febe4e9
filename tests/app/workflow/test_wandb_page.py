"""The pages of a run are one artifact of its W&B run, written without a network; what fails is a warning."""

import json
import threading

import pytest
import wandb
from forked import Forked
from tiny_run import DEMO, tiny_run

from tomat.app.workflow.wandb_page import KEPT, keep_pages
from tomat.train.settings.config import load_config

WANDB = "--trackers.wandb"


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    for name in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR", "ARTIFACT_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name.lower()))
        (tmp_path / name.lower()).mkdir()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    folder = tmp_path / "runs" / "tiny"
    folder.mkdir(parents=True)
    for name in (*KEPT[:4], "metrics.jsonl"):
        (folder / name).write_text(f"what is in {name}")
    return folder


def config(run_dir, *words):
    return load_config(DEMO, [*tiny_run(1, 1), "--run_name", "tiny", "--output_dir", str(run_dir.parent), *words])


def test_pages_are_one_artifact_of_the_run(run_dir, tmp_path):
    words = (WANDB, json.dumps({"project": "densities", "mode": "offline", "save_code": False}))
    assert keep_pages(config(run_dir, *words), run_dir)
    [folder] = (tmp_path / "dir").rglob("offline-run-*")
    assert folder.name.endswith("-tiny")  # the id of the run whose curves are there
    logged = (folder / "run-tiny.wandb").read_bytes()
    assert b"tiny-page" in logged and all(name.encode() in logged for name in KEPT[:4])
    assert b"metrics.jsonl" not in logged
    staged = [path.read_text() for path in (tmp_path / "data_dir").rglob("*") if path.is_file()]
    assert {f"what is in {name}" for name in KEPT[:4]} <= set(staged)


def test_a_process_that_used_wandb_ends_without_a_word(run_dir):
    """Levanter's own end of W&B is a thread at the interpreter's exit, which Python 3.12 refuses to start."""
    code = """
import sys
from levanter.tracker.wandb import WandbConfig
from tomat.train.tracking import end_wandb
settings = WandbConfig(project="densities", mode="offline", save_code=False)
tracker = settings.init("tiny")
tracker.finish()
end_wandb(settings)
sys.exit()
"""
    ended = Forked(before=code, cwd=run_dir)
    assert "Error" not in ended.communicate(60)[0] and ended.returncode == 0
    assert list(run_dir.parents[1].rglob("run-tiny.wandb"))


def test_what_fails_is_a_warning(run_dir, monkeypatch, capsys):
    given = config(run_dir, WANDB, "{project: a, mode: offline, background_finish_timeout: 0.2}")

    def refuse(**settings):
        raise OSError("disk full")

    monkeypatch.setattr(wandb, "init", refuse)
    for words in ((), (WANDB, "{project: a, mode: disabled}")):  # nothing is done without W&B
        assert not keep_pages(config(run_dir, *words), run_dir) and not capsys.readouterr().out
    assert not keep_pages(given, run_dir)
    told = capsys.readouterr().out
    assert "are not in W&B (OSError: disk full)" in told and "--name a/tiny-page" in told
    answered = threading.Event()
    monkeypatch.setattr(wandb, "init", lambda **settings: answered.wait(20))
    assert not keep_pages(given, run_dir)
    answered.set()
    assert "no answer in 0.2 s" in capsys.readouterr().out
