"""What only a process of its own shows: a disk that fills up, a loader that hangs."""

import subprocess
from pathlib import Path

import pytest
from forked import Forked
from tiny_run import tiny_run

from tomat.train.guards.process import DUMP_SECONDS
from tomat.train.runs.checkpoints import newest_whole
from tomat.train.runs.history import read_events, read_metrics

TINY = [
    "--run_name", "demo", "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", *tiny_run(12, 1),
]  # fmt: skip

ON_A_SMALL_DISK = """
import os, shutil, subprocess, sys
from pathlib import Path
from tomat.app.cli import main

words, disk, kept = {words!r}, {disk!r}, {kept!r}
user, group = os.getuid(), os.getgid()
os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
for file, text in (("uid_map", f"0 {{user}} 1"), ("setgroups", "deny"), ("gid_map", f"0 {{group}} 1")):
    Path("/proc/self", file).write_text(text)
# A file system of four megabytes, in a namespace of its own: mounting needs no privilege there.
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)
status = main(words)
subprocess.run(["mount", "-o", "remount,size=60m", disk], check=True)
again = main(words)
shutil.copytree(f"{{disk}}/demo", kept)
sys.exit(status if again == 0 else 1)
"""

HANGS = """
import time
from tomat.train.loader import ShardDataset

get_batch = ShardDataset.get_batch

async def waits_for_ever(self, indices):
    if max(indices) >= 5 * 4:
        time.sleep(3600)
    return await get_batch(self, indices)

ShardDataset.get_batch = waits_for_ever
"""


def words(folder: Path, *more: str) -> list[str]:
    (folder / "empty.yaml").write_text("{}\n")
    return ["train", "--config_path", str(folder / "empty.yaml"), *TINY, *more]


def namespaces_allowed() -> bool:
    return subprocess.run("unshare -rm true", shell=True, capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces: a small disk cannot be mounted")
def test_a_disk_that_fills_up_ends_the_run_and_the_run_goes_on_with_more(tmp_path):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    given = words(tmp_path, "--output_dir", str(disk))
    process = Forked(before=ON_A_SMALL_DISK.format(words=given, disk=str(disk), kept=str(kept)))
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 2, said[-3000:]
    [error] = [line for line in said.splitlines() if line.startswith("error: ")]
    assert "no room left while writing" in error and "are free" in error and "A checkpoint takes up to" in error
    assert "Traceback" not in said and "resumed at step" in said
    assert [row["step"] for row in read_metrics(kept / "metrics.jsonl")] == list(range(12))
    whole = newest_whole(str(kept))
    assert whole is not None and whole.step == 11


@pytest.mark.slow
def test_a_loader_that_hangs_ends_the_process_with_its_stacks(tmp_path):
    more = ["--output_dir", str(tmp_path), "--guards.hang_seconds", "2"]
    process = Forked(*words(tmp_path, *more), before=HANGS)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 124, said[-3000:]
    run_dir = tmp_path / "demo"
    [stacks] = run_dir.glob("stacks-0-*.txt")
    text = stacks.read_text()
    assert "in waits_for_ever" in text and "in training_steps" in text and ": MainThread" in text
    [event] = [event for event in read_events(run_dir) if event["event"] == "guard:hang"]
    assert event["stacks"] == stacks.name and event["step"] == 5 and 2 <= event["seconds"] < DUMP_SECONDS
    assert "no progress for" in said and str(stacks) in said
    whole = newest_whole(str(run_dir))
    assert whole is not None and whole.step == 4
