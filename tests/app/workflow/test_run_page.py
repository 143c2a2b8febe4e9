"""The page in a run's folder, from the log as it is."""

import json

from tomat.app.workflow.run_page import write_training_page
from tomat.train.loop import TrainResult
from tomat.train.settings.config import load_config


def test_a_step_without_a_loss_counts_with_its_time_its_tokens_and_its_validation(tmp_path):
    """A batch that `guards.on_bad_loss: skip` passed over has a null in the log."""
    rows = [{"step": step, "train/loss": 2.0, "step_seconds": 1.0, "wall_seconds": 7.0} for step in range(6)]
    rows = [row | {"tokens_per_second": 1000.0} for row in rows]
    rows[5] |= {"train/loss": None, "eval/validation/loss": 1.25}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = TrainResult(tmp_path, 0, 6, 2.0, 2.0, 42.0, 100)
    page = write_training_page(load_config("demo"), result, None).read_text()
    for figure in ("| tokens | 6,000 |", "| validation loss, newest | 1.2500 |", "what came between | 42 s |"):
        assert figure in page
