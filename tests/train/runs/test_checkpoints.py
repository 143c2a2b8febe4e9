"""A checkpoint is whole or it is not, whatever was interrupted. A few seconds; no training."""

import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st
from saved_checkpoint import save_checkpoint

from tomat.base.errors import TomatError
from tomat.train.runs.checkpoints import (
    array_shapes,
    copy,
    examine,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    remove,
    unmark,
)

ARRAYS = {"step": (), "model/a": (64, 32), "model/b": (3,), "optimizer/mu": (64, 32)}


def save(run: Path, step: int, **how: Any) -> Path:
    return save_checkpoint(run, step, ARRAYS, node_bytes=300, **how)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    for step in (3, 20, 100):
        save(root, step, temporary=step == 20)
    return root


def test_whole_ones_are_listed_by_step(run):
    found = list_checkpoints(str(run))
    assert [(item.step, item.whole, item.temporary, item.reason) for item in found] == [
        (3, True, False, ""),
        (20, True, True, ""),
        (100, True, False, ""),
    ]
    newest = newest_whole(str(run))
    assert newest is not None and newest == found[-1] and newest.seconds_utc is not None
    assert array_shapes(newest.path) == ARRAYS


def test_a_removal_cut_short_is_seen_whichever_file_went_first(run, tmp_path):
    """Levanter's reader takes all of these that still have `metadata.json` for complete."""
    files = [path.relative_to(run) for path in (run / "checkpoints" / "step-100").rglob("*") if path.is_file()]
    assert len(files) >= 5
    needed = 0
    for file in files:
        shutil.copytree(run, tmp_path / "run")
        (tmp_path / "run" / file).unlink()
        found = list_checkpoints(str(tmp_path / "run"))[-1]
        if not found.whole:
            assert found.reason
            newest = newest_whole(str(tmp_path / "run"))
            assert newest is not None and newest.step == 20
            needed += 1
        else:  # a file that only older versions of the database point into
            assert read_all(tmp_path / "run" / "checkpoints" / "step-100") == read_all(run / "checkpoints" / "step-100")
        shutil.rmtree(tmp_path / "run")
    assert needed >= 5


def read_all(path: Path) -> list[bytes]:
    base = {"driver": "ocdbt", "base": f"file://{path}/"}
    return [
        ts.open({"driver": "zarr3", "kvstore": {**base, "path": name}}, open=True).result().read().result().tobytes()
        for name in ARRAYS
    ]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_checkpoint_called_whole_can_be_read_wherever_a_file_was_cut(run, tmp_path_factory, data):
    root = tmp_path_factory.mktemp("cut")
    target = root / "step-100"
    shutil.copytree(run / "checkpoints" / "step-100", target)
    files = sorted(path for path in target.rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    content = file.read_bytes()
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    if examine(str(target), 100).whole:
        assert read_all(target) == read_all(run / "checkpoints" / "step-100")


def test_a_save_cut_short_and_a_wrong_step_are_not_whole(tmp_path):
    save(tmp_path, 5, complete=False)
    assert "never completed" in examine(str(tmp_path / "checkpoints" / "step-5"), 5).reason
    assert newest_whole(str(tmp_path)) is None
    save(tmp_path, 6)
    assert "says step 6" in examine(str(tmp_path / "checkpoints" / "step-6"), 7).reason
    assert "does not exist" in examine(str(tmp_path / "checkpoints" / "step-8"), 8).reason
    assert list_checkpoints(str(tmp_path / "nothing")) == []


def test_what_is_wrong_with_a_step_is_told_of_the_place_that_has_it(run, tmp_path):
    latest = save(tmp_path / "elsewhere", 200)
    newest = newest_whole(str(run), str(latest.parent))  # where temporary ones are sent
    assert newest is not None and newest.step == 200
    (latest / "manifest.ocdbt").unlink()
    with pytest.raises(TomatError, match=f"{latest} is not a whole checkpoint: its database is damaged"):
        find_checkpoint(str(run), 200, str(latest.parent))
    for elsewhere in (None, str(latest.parent)):
        with pytest.raises(TomatError, match="run.*/checkpoints/step-4 is not a whole checkpoint: it does not exist"):
            find_checkpoint(str(run), 4, elsewhere)
    assert [find_checkpoint(str(run), step).step for step in (None, 3)] == [100, 3]
    assert find_checkpoint(f"{run}/checkpoints/step-20/").step == 20


def test_no_other_reader_takes_an_unmarked_one_for_whole(run, tmp_path):
    from levanter.checkpoint import discover_latest_checkpoint

    shutil.copytree(run, tmp_path / "run")
    latest = tmp_path / "run" / "checkpoints" / "step-100"
    (latest / "manifest.ocdbt").unlink()
    assert str(discover_latest_checkpoint(str(latest.parent))).endswith("step-100")
    unmark(examine(str(latest), 100))
    assert str(discover_latest_checkpoint(str(latest.parent))).endswith("step-20")
    unmark(examine(str(latest.parent / "step-20"), 20))  # a whole one keeps its mark
    assert find_checkpoint(str(tmp_path / "run")).step == 20


def test_a_copy_is_whole_permanent_and_equal(run, tmp_path):
    copy(examine(str(run / "checkpoints" / "step-20"), 20), f"{tmp_path}/b/checkpoints/step-20")
    found = find_checkpoint(str(tmp_path / "b"))
    assert found.step == 20 and not found.temporary
    assert read_all(Path(found.path)) == read_all(run / "checkpoints" / "step-20")
    remove(found.path)
    assert not os.path.exists(found.path)


def test_a_copy_stays_in_its_folder(run, tmp_path, monkeypatch):
    """A bucket may hold an object named `../../x`; the copy that is there stays, and nothing is written."""
    source = examine(str(run / "checkpoints" / "step-20"), 20)
    copy(source, f"{tmp_path}/b/checkpoints/step-20")
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    files = fsspec.filesystem("file")
    found = files.find(source.path)
    monkeypatch.setattr(type(files), "find", lambda self, root, detail: dict.fromkeys([*found, f"{root}/../../x"]))
    with pytest.raises(TomatError, match=r"leads out of the folder .* Rename the object\.$"):
        copy(source, f"{tmp_path}/b/checkpoints/step-20")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
