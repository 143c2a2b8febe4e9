"""Runs as training leaves them: configuration, log, history, checkpoints in Levanter's layout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from saved_checkpoint import save_checkpoint

from tomat.base.documents import signed

MakeRun = Callable[..., Path]
ARRAY = {"model/a": (8,)}


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
            save_checkpoint(run, step, ARRAY, checksums=True)
        for step in partial:
            save_checkpoint(run, step, ARRAY, complete=False)
        return run

    return make
