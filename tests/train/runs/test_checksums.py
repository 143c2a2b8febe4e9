"""The checksums of a checkpoint: there before it is complete, of every file, and compared where it is loaded."""

import base64
import json
import os
import shutil
from pathlib import Path

import google_crc32c
import jax.numpy as jnp
import numpy as np
import pytest
from forked import Forked
from levanter.checkpoint import CheckpointerConfig, load_checkpoint

from tomat.base.layout import CHECKSUM_FILE
from tomat.train import checkpointer as module
from tomat.train.checkpointer import RunCheckpointer
from tomat.train.runs.checkpoints import (
    UNHASHED,
    examine,
    find_checkpoint,
    list_checkpoints,
    with_data_read,
)


def make(run: Path) -> RunCheckpointer:
    """Saves a permanent checkpoint at every step."""
    config = CheckpointerConfig(
        base_path=str(run / "checkpoints"), keep=[{"every": 1, "until": None}], append_run_id_to_base_path=False
    )
    return RunCheckpointer(config, "run")


def tree(step: int) -> dict:
    return {"a": jnp.arange(4096.0).reshape(64, 64) + step, "b": jnp.full((3,), float(step))}


def save(checkpointer: RunCheckpointer, step: int) -> None:
    checkpointer.on_step(tree=tree(step), step=step)
    checkpointer.wait_until_finished()


@pytest.fixture
def step(tmp_path) -> Path:
    save(make(tmp_path / "run"), 5)
    return tmp_path / "run" / "checkpoints" / "step-5"


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def test_every_file_has_size_and_checksum(step):
    written = json.loads((step / CHECKSUM_FILE).read_text())["files"]
    files = {path.relative_to(step).as_posix(): path for path in step.rglob("*") if path.is_file()}
    assert written.keys() == files.keys() - set(UNHASHED)
    assert any(name.startswith("d/") for name in written) and "manifest.json" in written
    for name, entry in written.items():
        content = files[name].read_bytes()
        crc = int.from_bytes(base64.b64decode(entry["crc32c"]), "big")
        assert (entry["size"], crc) == (len(content), google_crc32c.value(content))


def test_they_are_written_before_the_checkpoint_counts_as_complete(tmp_path, monkeypatch):
    """A save whose checksums cannot be written is not complete, and says so."""
    seen = []

    def refuse(path: str) -> None:
        seen.append(os.path.exists(f"{path}/metadata.json"))
        raise OSError("no space left")

    monkeypatch.setattr(module, "write_checksums", refuse)
    with pytest.raises(OSError, match="no space left"):
        save(make(tmp_path / "run"), 5)
    assert seen == [False]
    assert not examine(f"{tmp_path}/run/checkpoints/step-5", 5).whole


def test_each_file_is_noticed_when_it_is_damaged_missing_or_longer(step, tmp_path):
    names = sorted(p.relative_to(step).as_posix() for p in step.rglob("*") if p.is_file() and p.name != "metadata.json")
    assert len(names) >= 4
    for name in names:
        for harm in ("flip", "remove", "append"):
            copy = tmp_path / "copy"
            shutil.copytree(step, copy)
            if harm == "flip":
                flip(copy / name, len((copy / name).read_bytes()) // 2)
            elif harm == "append":
                (copy / name).write_bytes((copy / name).read_bytes() + b"x")
            elif name != CHECKSUM_FILE:  # without it a checkpoint is one of an earlier version
                (copy / name).unlink()
            else:
                (copy / name).write_bytes(b"")
            found = examine(str(copy), 5, read_data=True)
            assert not found.whole, (name, harm)
            # A flipped name or figure in the checksums themselves is put down to the file it stands for.
            assert name in found.reason or name in (CHECKSUM_FILE, "manifest.json"), (name, harm, found.reason)
            shutil.rmtree(copy)


def test_a_checkpoint_is_loaded_with_files_of_no_checkpoint_and_without_checksums(step, capsys):
    """As a network file system leaves a file that is open while it is removed, and as an earlier version saved."""
    for name in (".nfs000000000001", "d/.DS_Store"):
        (step / name).write_bytes(b"x")
    found = find_checkpoint(str(step))
    assert found.whole and found.has_checksums and capsys.readouterr().out == ""
    (step / CHECKSUM_FILE).unlink()
    found = find_checkpoint(str(step))
    assert found.whole and not found.has_checksums
    assert "not known" in " ".join(capsys.readouterr().out.split())
    np.testing.assert_array_equal(np.asarray(load_checkpoint(tree(0), str(step))["a"]), tree(5)["a"])


def test_the_newest_whole_one_is_found_by_its_data(tmp_path, capsys):
    checkpointer = make(tmp_path / "run")
    for number in (1, 2, 3):
        save(checkpointer, number)
    run = tmp_path / "run"
    data = max((run / "checkpoints" / "step-3" / "d").iterdir(), key=lambda path: path.stat().st_size)
    flip(data, data.stat().st_size // 2)  # in an array; at the end may lie the database, which is compared at once
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
