"""A process that is killed, really: what is lost, and that the run goes on as if nothing had happened.

Two processes that are forked, and one run in this one to compare with.
"""

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from forked import Forked
from run_facts import assert_same_model
from tiny_run import DEMO, WITHOUT_ATOMS, demo_config, tiny_run

from tomat.train.loop import Evaluation
from tomat.train.run import train
from tomat.train.runs.checkpoints import examine, list_checkpoints, newest_whole
from tomat.train.runs.history import read_events, read_metrics

STEPS = 12
TINY = tiny_run(
    STEPS, 3, "--trainer.steps_per_eval", "4", "--trainer.max_eval_batches", "2", "--model.scan_layers", "false",
    atoms=True,
)  # fmt: skip
"""The program is that of the run which the tests of predictions share."""
tiny = partial(demo_config, TINY)


def words(output_dir: Path) -> list[object]:
    return ["train", "--config_path", DEMO, "--output_dir", output_dir, *TINY]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    return train(tiny(tmp_path_factory.mktemp("unbroken"))).run_dir


def assert_equal_runs(one: Path, other: Path, not_evaluated: int | None = None) -> None:
    rows, expected = (read_metrics(run / "metrics.jsonl") for run in (one, other))
    if not_evaluated is not None:
        del expected[not_evaluated]["eval/validation/loss"]
    for key in ("step", "train/loss", "eval/validation/loss"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected]
    assert_same_model(one, other)


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


def test_told_to_stop_while_it_compiles_it_leaves_nothing_half_done(tmp_path):
    # What other tests have compiled would be loaded within a second.
    uncached = "import jax; jax.config.update('jax_enable_compilation_cache', False)"
    process = Forked(*words(tmp_path), *WITHOUT_ATOMS, before=uncached)
    while "\nrun demo" not in f"\n{process.said()}":
        assert process.poll() is None, process.said()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    status, output = process.wait(timeout=60), process.said()
    assert status == 143, output
    # Either the compilation was left, or its step was done and saved.
    found = list_checkpoints(str(tmp_path / "demo"))
    events = read_events(tmp_path / "demo")
    assert [event["event"] for event in events] == ["data", "start", "preempted"], output
    assert all(one.whole for one in found) and len(found) == events[-1]["step"] <= 1, output


def test_told_to_stop_while_it_evaluates_it_finishes_where_there_is_time_and_always_saves(
    unbroken, tmp_path, monkeypatch
):
    """Told in the first evaluation; and in the second, which takes more than half of the grace."""
    figures, seconds_of_a_batch = Evaluation._figures, iter((0.0, 15.0))

    def slow(evaluation, batches, seconds):
        for batch in batches:
            yield batch
            evaluation._stop._asked_at -= seconds

    def interrupted(self, model):
        os.kill(os.getpid(), signal.SIGTERM)
        self._loader = slow(self, self._loader, next(seconds_of_a_batch))
        return figures(self, model)

    run = tmp_path / "demo"
    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "_figures", interrupted)
        for steps in (4, 8):
            result = train(tiny(tmp_path))
            assert result.preempted and result.steps == steps
            newest = newest_whole(str(run))
            assert newest is not None and newest.step == steps - 1
    assert train(tiny(tmp_path)).first_step == 8
    assert_equal_runs(run, unbroken, not_evaluated=7)
    events = [event["event"] for event in read_events(run)]
    assert events == ["data", "start", "preempted", "resume", "evaluation_abandoned", "preempted", "resume", "stop"]
