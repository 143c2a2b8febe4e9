"""A checkpoint is whole or it is not, whatever was interrupted or damaged: by its structure, and by its checksums."""

import base64
import json
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec
import google_crc32c
import pytest
import tensorstore as ts
from forked import Forked
from hypothesis import given, settings
from hypothesis import strategies as st
from run_facts import flipped
from saved_checkpoint import save_checkpoint

from tomat.base.errors import TomatError
from tomat.base.layout import CHECKSUM_FILE
from tomat.train.runs.checkpoints import (
    UNHASHED,
    array_shapes,
    copy,
    examine,
    find_checkpoint,
    list_checkpoints,
    newest_whole,
    remove,
    with_data_read,
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


def read_all(path: Path) -> list[bytes]:
    base = {"driver": "ocdbt", "base": f"file://{path}/"}
    return [
        ts.open({"driver": "zarr3", "kvstore": {**base, "path": name}}, open=True).result().read().result().tobytes()
        for name in ARRAYS
    ]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_checkpoint_called_whole_can_be_read_wherever_a_file_was_cut_or_removed(run, tmp_path_factory, data):
    """Levanter's reader takes all of these that still have `metadata.json` for complete."""
    target = tmp_path_factory.mktemp("cut") / "step-100"
    shutil.copytree(run / "checkpoints" / "step-100", target)
    file = data.draw(st.sampled_from(sorted(path for path in target.rglob("*") if path.is_file())))
    content = file.read_bytes()
    kept = data.draw(st.none() | st.integers(0, len(content) - 1))
    file.unlink()
    if kept is not None:
        file.write_bytes(content[:kept])
    found = examine(str(target), 100)
    assert found.whole or found.reason
    if found.whole:  # a file that only older versions of the database point into
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


# Checksums: of every file, and compared where a checkpoint is loaded.


@pytest.fixture
def step(tmp_path) -> Path:
    return save(tmp_path / "run", 5, checksums=True)


def test_every_file_has_size_and_checksum(step):
    written = json.loads((step / CHECKSUM_FILE).read_text())["files"]
    files = {path.relative_to(step).as_posix(): path for path in step.rglob("*") if path.is_file()}
    assert written.keys() == files.keys() - set(UNHASHED)
    assert any(name.startswith("d/") for name in written) and "manifest.json" in written
    for name, entry in written.items():
        content = files[name].read_bytes()
        crc = int.from_bytes(base64.b64decode(entry["crc32c"]), "big")
        assert (entry["size"], crc) == (len(content), google_crc32c.value(content))


def test_each_file_is_noticed_when_it_is_damaged_missing_or_longer(step, tmp_path):
    names = sorted(p.relative_to(step).as_posix() for p in step.rglob("*") if p.is_file() and p.name != "metadata.json")
    assert len(names) >= 4
    for name in names:
        for harm in ("flip", "remove", "append"):
            copy = tmp_path / "copy"
            shutil.copytree(step, copy)
            content = (copy / name).read_bytes()
            if harm == "flip":
                middle = len(content) // 2
                (copy / name).write_bytes(content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :])
            elif harm == "append":
                (copy / name).write_bytes(content + b"x")
            elif name != CHECKSUM_FILE:  # without it a checkpoint is one of an earlier version
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(b"")
            found = examine(str(copy), 5, read_data=True)
            assert not found.whole, (name, harm)
            # A flipped name or figure in the checksums themselves is put down to the file it stands for.
            assert name in found.reason or name in (CHECKSUM_FILE, "manifest.json"), (name, harm, found.reason)
            shutil.rmtree(copy)


def test_files_of_no_checkpoint_count_for_nothing_and_one_without_checksums_is_said(step, capsys):
    """As a network file system leaves a file that is open while it is removed, and as an earlier version saved."""
    for name in (".nfs000000000001", "d/.DS_Store"):
        (step / name).write_bytes(b"x")
    found = find_checkpoint(str(step))
    assert found.whole and found.has_checksums and capsys.readouterr().out == ""
    (step / CHECKSUM_FILE).unlink()
    found = find_checkpoint(str(step))
    assert found.whole and not found.has_checksums
    assert "not known" in " ".join(capsys.readouterr().out.split())


def test_the_newest_whole_one_is_found_by_its_data(tmp_path, capsys):
    run = tmp_path / "run"
    for number in (1, 2, 3):
        save(run, number, checksums=True)
    flipped(run / "checkpoints" / "step-3" / "d")  # in an array; at the end may lie the database, compared at once
    structure = list_checkpoints(str(run))
    assert [found.whole for found in structure] == [True, True, True]
    checked = with_data_read(structure)
    assert [found.whole for found in checked] == [True, True, False]
    assert "d/" in checked[-1].reason and "checksum differs" in checked[-1].reason
    assert [found.whole for found in list_checkpoints(str(run), read_data=True)] == [True, True, False]
    assert find_checkpoint(str(run)).step == 2
    assert "step-3 is passed over" in " ".join(capsys.readouterr().out.split())


BUCKET = """
import datetime, sys
import jax.numpy as jnp
from levanter.checkpoint import CheckpointerConfig
from tomat.train.checkpointer import RunCheckpointer
from tomat.train.runs.checkpoints import copy, examine

config = CheckpointerConfig(
    base_path="gs://bucket/run/checkpoints", save_interval=datetime.timedelta(1), append_run_id_to_base_path=False
)
checkpointer = RunCheckpointer(config, "run")
checkpointer.on_step(tree={{"a": jnp.arange(4096.0)}}, step=5, force=True)
checkpointer.wait_until_finished()
found = examine("gs://bucket/run/checkpoints/step-5", 5, read_data=True)
assert found.whole and found.has_checksums, found
copy(found, {folder!r} + "/step-5")
sys.exit()
"""
EXAMINED = """
import sys
from tomat.train.runs.checkpoints import examine

print(examine("gs://bucket/run/checkpoints/step-5", 5))
sys.exit()
"""


def test_a_bucket_says_its_own_checksums(bucket, tmp_path):
    """Without a byte of the data read back, and equal to those of a copy on disk."""
    environment = {**os.environ, **bucket.environment}
    saving = Forked(before=BUCKET.format(folder=str(tmp_path)), env=environment)
    assert saving.wait(timeout=120) == 0, saving.said()
    name = "run/checkpoints/step-5/"
    assert (tmp_path / "step-5" / CHECKSUM_FILE).read_bytes() == bucket.objects[name + CHECKSUM_FILE][0]
    files = {key: value[0] for key, value in bucket.objects.items() if key.startswith(name + "d/")}
    data = max(files, key=lambda key: len(files[key]))
    content = bytearray(files[data])
    content[len(content) // 2] ^= 1
    bucket.put("bucket", data, bytes(content))
    said, _ = Forked(before=EXAMINED, env=environment).communicate(timeout=120)
    assert "whole=False" in said and data.removeprefix(name) in said
