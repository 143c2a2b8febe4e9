"""What only a process of its own shows: a disk that fills up, a loader that hangs. A minute, most of it imports."""

import os
import subprocess
from pathlib import Path

import pytest
from forked import Forked
from tiny_run import tiny_run, tomat

from tomat.train.guards.hang import DUMP_SECONDS
from tomat.train.runs.checkpoints import newest_whole
from tomat.train.runs.history import read_events
from tomat.train.runs.log_lines import read_metrics

TINY = [
    "--run_name", "demo", "--preset", "demo", "--data.source", "embedded", "--data.layout", "v3-p7", *tiny_run(12, 1),
]  # fmt: skip

# A file system of four megabytes, in a namespace of its own: mounting needs no privilege there.
ON_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size=4m tmpfs "$1"
shift
status=0
"$@" || status=$?
mount -o remount,size=60m "$DISK"
"$@"
cp -r "$DISK/demo" "$KEPT"
exit $status
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
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces: a small disk cannot be mounted")
def test_a_disk_that_fills_up_ends_the_run_and_the_run_goes_on_with_more(tmp_path):
    disk, kept = tmp_path / "disk", tmp_path / "kept"
    disk.mkdir()
    train = tomat(*words(tmp_path, "--output_dir", str(disk)))
    done = subprocess.run(
        ["unshare", "-rm", "bash", "-c", ON_A_SMALL_DISK, "bash", str(disk), *train],
        env={**os.environ, "DISK": str(disk), "KEPT": str(kept)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 2, done.stdout[-3000:] + done.stderr[-3000:]
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "no room left while writing" in error and "are free" in error and "A checkpoint takes up to" in error
    assert "Traceback" not in done.stderr
    assert "resumed at step" in done.stdout
    assert [row["step"] for row in read_metrics(kept / "metrics.jsonl")] == list(range(12))
    whole = newest_whole(str(kept))
    assert whole is not None and whole.step == 11


@pytest.mark.slow
def test_a_loader_that_hangs_ends_the_process_with_its_stacks(tmp_path):
    more = ["--output_dir", str(tmp_path), "--guards.hang_seconds", "4"]
    process = Forked(*words(tmp_path, *more), before=HANGS)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 124, said[-3000:]
    run_dir = tmp_path / "demo"
    [stacks] = run_dir.glob("stacks-0-*.txt")
    text = stacks.read_text()
    assert "in waits_for_ever" in text and "in training_steps" in text and ": MainThread" in text
    [event] = [event for event in read_events(run_dir) if event["event"] == "guard:hang"]
    assert event["stacks"] == stacks.name and event["step"] == 5 and 4 <= event["seconds"] < DUMP_SECONDS
    assert "no progress for" in said and str(stacks) in said
    whole = newest_whole(str(run_dir))
    assert whole is not None and whole.step == 4
