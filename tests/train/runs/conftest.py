"""Runs as training leaves them: configuration, log, history, checkpoints in Levanter's layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import yaml

from tomat.base.checked_json import signed
from tomat.train.runs.checksums import write_checksums

MakeRun = Callable[..., Path]


def save_checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    """Manifest, an OCDBT database with one array, and the metadata that marks a finished save."""
    path = run / "checkpoints" / f"step-{step}"
    path.mkdir(parents=True)
    arrays = [{"path": "model/a", "shape": [8], "dtype": "float32"}]
    (path / "manifest.json").write_text(json.dumps({"format_version": 1, "arrays": arrays}))
    kvstore = {"driver": "ocdbt", "base": f"file://{path}/", "path": "model/a"}
    store = ts.open({"driver": "zarr3", "kvstore": kvstore}, create=True, dtype="float32", shape=(8,)).result()
    store.write(np.ones(8, np.float32)).result()
    if complete:
        write_checksums(str(path))
        (path / "metadata.json").write_text(json.dumps({"step": step, "timestamp": "2026-01-02T03:04:05"}))
    return path


@pytest.fixture
def make_run(tmp_path) -> MakeRun:
    def make(
        name: str = "a",
        steps: int = 10,
        total: int = 20,
        saved: tuple[int, ...] = (4, 9),
        partial: tuple[int, ...] = (),
        events: tuple[dict[str, Any], ...] = (),
    ) -> Path:
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        config = {"run_name": name, "purpose": "for a test", "trainer": {"num_train_steps": total}}
        (run / "config.yaml").write_text(signed(yaml.safe_dump(config)))
        rows = [{"step": step, "train/loss": 4.0 - step / 10, "mfu_full": 0.01 * step} for step in range(steps)]
        if rows:
            rows[-1]["eval/validation/loss"] = 3.25
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        for step in saved:
            save_checkpoint(run, step)
        for step in partial:
            save_checkpoint(run, step, complete=False)
        return run

    return make
