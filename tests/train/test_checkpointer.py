"""What is saved stays whole while the next is saved, and what is in the way of a save does not mix with it."""

import datetime
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from levanter.checkpoint import CheckpointerConfig, load_checkpoint

from tomat.train import checkpointer as module
from tomat.train.checkpointer import RunCheckpointer
from tomat.train.runs.checkpoints import examine, list_checkpoints, newest_whole


def make(
    run: Path, partial=(), before_save=lambda: None, every: int | None = None, seconds=1e-6, **more
) -> RunCheckpointer:
    """Saves a temporary checkpoint at every step, or every so many seconds, and a permanent one every `every` steps."""
    config = CheckpointerConfig(
        base_path=str(run / "checkpoints"),
        save_interval=datetime.timedelta(seconds=seconds),
        keep=None if every is None else [{"every": every}],
        append_run_id_to_base_path=False,
        **more,
    )
    return RunCheckpointer(config, "run", partial, before_save)


def tree(step: int) -> dict:
    return {"a": jnp.arange(64.0).reshape(8, 8) + step, "b": jnp.full((3,), float(step))}


def save(checkpointer: RunCheckpointer, step: int, force: bool = False) -> None:
    checkpointer.on_step(tree=tree(step), step=step, force=force)
    checkpointer.wait_until_finished()


def loaded(path: str) -> np.ndarray:
    return np.asarray(load_checkpoint(tree(0), path)["a"])


def times(path: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


@pytest.fixture
def run(tmp_path) -> Path:
    return tmp_path / "run"


def test_a_temporary_one_goes_when_the_next_is_whole(run):
    checkpointer = make(run, every=4)
    for step in range(1, 8):
        save(checkpointer, step)
        newest = newest_whole(str(run))
        assert newest is not None and newest.step == step
    assert [(found.step, found.temporary) for found in list_checkpoints(str(run))] == [(4, False), (7, True)]
    np.testing.assert_array_equal(loaded(f"{run}/checkpoints/step-7"), tree(7)["a"])


def test_as_many_temporary_ones_are_kept_as_the_settings_say_and_where(run, tmp_path):
    checkpointer = make(run, every=4, temporary_base_path=f"{tmp_path}/other", keep_last_temporary_checkpoints=2)
    for step in range(1, 8):
        save(checkpointer, step)
    assert [found.step for found in list_checkpoints(str(run))] == [4]
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == ["step-6", "step-7"]


@pytest.mark.parametrize("first", [0, 3])
def test_what_a_stop_leaves_lasts_until_the_run_that_goes_on_has_saved(run, tmp_path, first):
    """Beside the permanent ones, since a storage of temporary ones may be emptied meanwhile."""
    elsewhere = {"temporary_base_path": f"{tmp_path}/other"}
    stopped = make(run, seconds=3600, **elsewhere)
    stopped.on_stop(tree=tree(first), step=first)
    stopped.wait_until_finished()
    assert [(found.step, found.whole) for found in list_checkpoints(str(run))] == [(first, True)]
    resumed = make(run, every=5, **elsewhere)
    save(resumed, 4)
    save(resumed, 5)
    # Of its first step Levanter keeps what it is made to save.
    assert [found.step for found in list_checkpoints(str(run))] == [0, 5][first > 0 :]


def test_the_last_whole_one_is_not_removed_for_one_that_kept_only_its_mark(run):
    """Levanter keeps the newest of the temporary checkpoints it finds: here one that lost its data."""
    save(make(run), 5)
    shutil.copytree(run / "checkpoints" / "step-5", run / "checkpoints" / "step-9")
    damaged = run / "checkpoints" / "step-9"
    shutil.rmtree(damaged / "d")
    metadata = json.loads((damaged / "metadata.json").read_text())
    (damaged / "metadata.json").write_text(json.dumps({**metadata, "step": 9}))
    partial = [found for found in list_checkpoints(str(run)) if not found.whole]
    assert [found.step for found in partial] == [9]
    save(make(run, partial), 6)
    assert [(found.step, found.whole) for found in list_checkpoints(str(run))] == [(6, True)]


def test_what_was_left_at_a_step_does_not_mix_with_its_next_save(run):
    """A save of step 3 of which the mark and some data are left, as after a removal that was cut short."""
    save(make(run), 3)
    left = run / "checkpoints" / "step-3"
    (left / "manifest.ocdbt").unlink()
    old = {path.name for path in (left / "d").iterdir()}
    partial = [examine(str(left), 3)]
    save(make(run, partial), 3)
    assert examine(str(left), 3).whole
    assert not old & {path.name for path in (left / "d").iterdir()}
    np.testing.assert_array_equal(loaded(str(left)), tree(3)["a"])


def test_a_step_that_is_saved_is_not_written_again_but_becomes_permanent(run):
    checkpointer = make(run)
    save(checkpointer, 4)
    path = run / "checkpoints" / "step-4"
    before = times(path)
    assert examine(str(path), 4).temporary
    save(checkpointer, 4, force=True)
    found = examine(str(path), 4)
    assert found.whole and not found.temporary
    after = times(path)
    assert {file.name for file in after if after[file] != before.get(file)} == {"metadata.json"}
    save(checkpointer, 5)
    save(checkpointer, 6)
    assert [item.step for item in list_checkpoints(str(run))] == [4, 6]


def test_a_whole_checkpoint_is_never_written_over(run):
    seen = []
    save(make(run, before_save=lambda: seen.append(newest_whole(str(run)))), 4)
    assert seen == [None]  # called before the save
    path = run / "checkpoints" / "step-4"
    before = times(path)
    save(make(run), 4, force=True)
    assert times(path) == before


def test_checksums_are_written_before_the_checkpoint_counts_as_complete(run, monkeypatch):
    """A save whose checksums cannot be written is not complete, and says so."""
    seen = []

    def refuse(path: str) -> None:
        seen.append(os.path.exists(f"{path}/metadata.json"))
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_checksums", refuse)
    with pytest.raises(OSError, match="no space left"):
        save(make(run), 5)
    assert seen == [False] and not examine(f"{run}/checkpoints/step-5", 5).whole


def test_a_clock_that_is_set_back_stops_no_timed_save(run, monkeypatch):
    """Local time goes back an hour at step 3, as at the end of summer time; the interval is a minute, a step half."""
    monotonic = [1000.0]
    wall = [datetime.datetime(2026, 10, 25, 2, 50)]

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return wall[0] if tz is None else datetime.datetime.now(tz)

    class Datetime:
        datetime, timedelta, UTC, timezone = Clock, datetime.timedelta, datetime.UTC, datetime.timezone

    monkeypatch.setattr("levanter.checkpoint.datetime", Datetime)
    monkeypatch.setattr("time.monotonic", lambda: monotonic[0])
    checkpointer, saved = make(run, seconds=60), set()
    for step in range(1, 9):
        monotonic[0] += 30.0
        wall[0] += datetime.timedelta(seconds=30) - datetime.timedelta(hours=step == 3)
        save(checkpointer, step)
        saved |= {found.step for found in list_checkpoints(str(run))}
    assert saved == {2, 4, 6, 8}
