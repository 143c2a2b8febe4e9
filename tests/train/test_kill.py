"""A process that is killed, really: what is lost, and that the run goes on as if nothing had happened.

About a minute: two processes of their own, and one run in this one to compare with.
"""

import os
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from forked import Forked
from tiny_run import DEMO, tiny_run

from tomat.predict.inference.trained import load_trained
from tomat.train.hooks import Evaluation
from tomat.train.run import train
from tomat.train.runs.checkpoints import examine, list_checkpoints, newest_whole
from tomat.train.runs.history import read_events
from tomat.train.runs.log_lines import read_metrics
from tomat.train.settings.config import TrainConfig, load_config

STEPS = 24
TINY = tiny_run(STEPS, 3, "--trainer.steps_per_eval", "8", "--trainer.max_eval_batches", "1", atoms=True)


def tiny(output_dir: Path, *words: str) -> TrainConfig:
    return load_config(DEMO, [*TINY, "--output_dir", str(output_dir), *words])


def words(output_dir: Path) -> list[object]:
    return ["train", "--config_path", DEMO, "--output_dir", output_dir, *TINY]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    return train(tiny(tmp_path_factory.mktemp("unbroken"))).run_dir


def assert_equal_runs(one: Path, other: Path) -> None:
    rows, expected = (read_metrics(run / "metrics.jsonl") for run in (one, other))
    assert [row["step"] for row in rows] == list(range(STEPS))
    for key in ("train/loss", "eval/validation/loss"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected]
    leaves = [jax.tree.leaves(load_trained(run).model) for run in (one, other)]
    for ours, theirs in zip(*leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def stop_in_a_commit(process: Forked, run: Path) -> int | None:
    """Hold the process between the first and the last file of a checkpoint; the step of it, or None if it ended."""
    deadline = time.monotonic() + 600
    seen: set[str] = set()
    while process.poll() is None and time.monotonic() < deadline:
        # Imports and compilation need the processor; a commit is some 50 ms long.
        time.sleep(0.001 if (run / "checkpoints").exists() else 0.05)
        for path in (run / "checkpoints").glob("step-*"):
            if path.name in seen or (path / "metadata.json").exists():
                seen.add(path.name)
                continue
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.05)
            if (path / "manifest.json").exists() and not (path / "metadata.json").exists():
                return int(path.name.removeprefix("step-"))
            process.send_signal(signal.SIGCONT)
    return None


def test_killed_in_a_commit_the_run_goes_on_from_the_checkpoint_before(unbroken, tmp_path):
    run = tmp_path / "demo"
    process = Forked(*words(tmp_path))
    try:
        step = stop_in_a_commit(process, run)
    finally:
        process.kill()
    output, _ = process.communicate()
    assert step is not None, f"no commit could be caught:\n{output[-3000:]}"
    assert process.returncode == -signal.SIGKILL
    partial = examine(str(run / "checkpoints" / f"step-{step}"), step)
    assert not partial.whole and "never completed" in partial.reason
    newest = newest_whole(str(run))
    assert (newest.step if newest else 0) == step - 3

    result = train(tiny(tmp_path))
    assert result.first_step == (newest.step + 1 if newest else 0)
    assert_equal_runs(run, unbroken)
    assert all(found.whole for found in list_checkpoints(str(run)))
    events = {event["event"]: event for event in read_events(run)}
    assert events["partial_checkpoint"]["path"].endswith(f"step-{step}")
    assert events["resume"]["after"] == "killed" and events["resume"]["step"] == result.first_step


def test_told_to_stop_while_it_compiles_it_leaves_nothing_half_done(unbroken, tmp_path):
    # What other tests have compiled would be loaded within a second.
    uncached = "import jax; jax.config.update('jax_enable_compilation_cache', False)"
    said = tmp_path / "output"
    with said.open("w") as file:
        process = Forked(*words(tmp_path), before=uncached, output=file)
    while "\nrun demo" not in f"\n{said.read_text()}":
        assert process.poll() is None, said.read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    status, output = process.wait(timeout=60), said.read_text()
    assert status == 143, output
    # Either the compilation was left, or its step was done and saved.
    assert all(found.whole for found in list_checkpoints(str(tmp_path / "demo"))), output
    events = read_events(tmp_path / "demo")
    assert [event["event"] for event in events] == ["data", "start", "preempted"] and events[-1]["step"] <= 1, output
    result = train(tiny(tmp_path))
    assert result.first_step == events[-1]["step"]
    assert_equal_runs(tmp_path / "demo", unbroken)


def test_told_to_stop_while_it_evaluates_it_finishes_and_saves(unbroken, tmp_path, monkeypatch):
    batches = Evaluation.__iter__

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        yield from batches(self)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "__iter__", interrupted)
        result = train(tiny(tmp_path))
    assert result.preempted and result.steps == 8
    assert train(tiny(tmp_path)).first_step == 8
    assert_equal_runs(tmp_path / "demo", unbroken)
    events = [event["event"] for event in read_events(tmp_path / "demo")]
    assert events == ["data", "start", "preempted", "resume", "stop"]


def test_a_long_evaluation_makes_room_for_the_checkpoint(tmp_path, monkeypatch):
    batches = Evaluation.__iter__

    def interrupted(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for batch in batches(self):
            time.sleep(6.0)
            yield batch

    monkeypatch.setattr(Evaluation, "__iter__", interrupted)
    words = ("--preemption.grace_seconds", "20", "--trainer.max_eval_batches", "9")
    result = train(tiny(tmp_path, *words))
    assert result.preempted and result.steps == 8
    newest = newest_whole(str(tmp_path / "demo"))
    assert newest is not None and newest.step == 7
    assert "evaluation_abandoned" in [event["event"] for event in read_events(tmp_path / "demo")]
    assert "eval/validation/loss" not in read_metrics(tmp_path / "demo" / "metrics.jsonl")[-1]
