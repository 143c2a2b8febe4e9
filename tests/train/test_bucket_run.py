"""A run whose folder is a bucket that fails now and then, and is cut off in a save; taken over by another machine."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from forked import Forked
from run_facts import losses
from tiny_run import DEMO, tiny_run

from tomat.train.run import train
from tomat.train.settings.config import load_config

STEPS = 8
TINY = tiny_run(STEPS, 3)
IMPATIENT = """
import tensorstore as ts
from tomat.base import storage

def soon(tries):
    retries = {"max_retries": tries - 1, "initial_delay": "10ms", "max_delay": "50ms"}
    return ts.Context({"gcs_request_retries": retries})

storage.retry_context = soon
"""
"""As many tries as ever, with waits of milliseconds."""
SOON_CUT = """
from tomat.train.guards.storage import StorageWatch

StorageWatch.__init__.__kwdefaults__.update(say_seconds=0.5, end_seconds=4)
"""
"""A bucket that takes nothing ends the process after seconds, not after a minute and a quarter."""


def machine(bucket: Any, disk: Path, before: str = "") -> Forked:
    """The command on a machine whose own disk is `disk`."""
    disk.mkdir()
    words = ["train", "--config_path", DEMO, "--output_dir", "gs://bucket/runs", *TINY]
    return Forked(*words, cwd=disk, env={**os.environ, **bucket.environment}, before=IMPATIENT + before)


@pytest.mark.slow
def test_another_machine_takes_over_a_run_in_a_bucket_that_fails_now_and_then(bucket, tmp_path):
    faults = bucket.faults
    faults.share, usual = 0.03, faults.kinds

    def cut_once_step_3_is_saved(method: str, path: str) -> bool:
        if "runs/demo/checkpoints/step-3/metadata.json" in bucket.objects:
            faults.kinds, faults.share = ("stall",), 1.0
        return True

    faults.only = cut_once_step_3_is_saved
    first = machine(bucket, tmp_path / "first", SOON_CUT)
    output, _ = first.communicate(timeout=600)
    assert first.returncode == 75, output[-3000:]
    (error,) = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "gs://bucket/runs/demo: " in error and "made no progress" in error and "last whole checkpoint" in error
    assert "runs/demo/checkpoints/step-6/metadata.json" not in bucket.objects
    assert "after 4 s this process ends, to be started again" in output

    faults.kinds, faults.share, faults.only = usual, 0.03, lambda method, path: True
    second = machine(bucket, tmp_path / "second")
    try:
        output, _ = second.communicate(timeout=600)
    finally:
        second.kill()
    assert second.returncode == 0, output[-3000:]
    assert "resumed at step" in output
    assert bucket.faults.counts.total() > 5

    unbroken = train(load_config(DEMO, [*TINY, "--output_dir", str(tmp_path)])).run_dir
    assert losses(tmp_path / "second" / "runs" / "demo") == losses(unbroken)
    published = bucket.objects["runs/demo/metrics.jsonl"][0].decode().splitlines()
    assert len(published) == STEPS
    history = bucket.objects["runs/demo/history.jsonl"][0].decode()
    assert '"after": "killed"' in history and '"reason": "complete"' in history


@pytest.mark.slow
def test_data_that_cannot_be_read_just_now_end_the_run_with_the_status_that_is_tried_again(bucket, tmp_path):
    """Manifest and codec are read; then every block answers 503, for longer than TensorStore tries."""
    from tomat.train.datasets import open_datasets

    config = load_config(DEMO, [*TINY, "--output_dir", str(tmp_path)])
    folder = Path(open_datasets(config, tmp_path / "demo").train.url.removeprefix("file://"))
    for path in folder.rglob("*"):
        if path.is_file():
            bucket.put("bucket", f"set/{path.relative_to(folder)}", path.read_bytes())
    bucket.faults.kinds, bucket.faults.share = ("503",), 1.0
    bucket.faults.only = lambda method, path: "tokens.zarr/c" in unquote(path)
    (tmp_path / "set.yaml").write_text("preset: demo\ndata: {source: shards, layout: v3-p7}\n")
    words = ["train", "--config_path", tmp_path / "set.yaml", *TINY]
    words += ["--data.train", "gs://bucket/set", "--output_dir", tmp_path / "runs"]
    process = Forked(*words, env={**os.environ, **bucket.environment}, before=IMPATIENT)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 75, output[-3000:]
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "tokens.zarr" in errors[0] and "try again" in errors[0]
    assert bucket.faults.counts["503"] > 0
