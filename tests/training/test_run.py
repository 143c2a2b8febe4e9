"""A real, small run on the embedded densities: what it leaves, how it resumes, what it refuses.

About a minute, most of it compiling; every test reads the one run that the module's fixture made.
"""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from tomat.errors import TomatError
from tomat.training.config import TrainConfig, load_config
from tomat.training.run import load_trained, train
from tomat.training.tracking import read_metrics

DEMO = Path(__file__).parents[2] / "configs" / "train" / "demo.yaml"
TINY = [
    "--model.num_layers", "1", "--model.hidden_dim", "32", "--model.intermediate_dim", "64", "--model.num_heads", "2",
    "--model.num_kv_heads", "2", "--data.n_density_tokens", "64", "--data.patches_per_material", "4",
    "--trainer.train_batch_size", "4", "--trainer.num_train_steps", "6", "--trainer.steps_per_eval", "3",
    "--trainer.max_eval_batches", "1", "--trainer.checkpointer.keep", "[{every: 2, until: null}]",
]  # fmt: skip


def tiny(output_dir: Path, *words: str) -> TrainConfig:
    return load_config(DEMO, [*TINY, "--output_dir", str(output_dir), *words])


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    return train(tiny(folder)).run_dir


def losses(run_dir: Path) -> list[float]:
    return [row["train/loss"] for row in read_metrics(run_dir / "metrics.jsonl")]


def test_the_folder_says_what_happened(unbroken):
    rows = read_metrics(unbroken / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        assert row["wall_seconds"] >= row["step_seconds"] > 0
        assert row["tokens_per_second"] > 0
        assert "mfu_full" not in row  # the CPU's peak is not known, so there is no MFU
    assert rows[0]["compile_seconds"] > 0
    assert [row["step"] for row in rows if "eval/validation/loss" in row][:2] == [2, 5]
    assert {path.name for path in (unbroken / "checkpoints").iterdir()} >= {"step-2", "step-4", "step-5"}
    assert yaml.safe_load((unbroken / "config.yaml").read_text())["run_name"] == "demo"
    assert json.loads((unbroken / "codec.json").read_text())


def test_a_resumed_run_equals_an_unbroken_one(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "demo")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "demo" / "checkpoints" / f"step-{step}")
    result = train(tiny(tmp_path))
    assert (result.first_step, result.steps) == (3, 6)
    assert losses(tmp_path / "demo") == losses(unbroken)
    ours, theirs = (load_trained(folder).model for folder in (tmp_path / "demo", unbroken))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_complete_run_stays_as_it_is(unbroken):
    before = (unbroken / "metrics.jsonl").read_bytes()
    result = train(tiny(unbroken.parent))
    assert result.first_step == result.steps == 6
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_another_configuration_under_the_same_name_is_refused(unbroken):
    before = sorted(path.name for path in unbroken.rglob("*"))
    with pytest.raises(TomatError, match="optimizer.learning_rate"):
        train(tiny(unbroken.parent, "--optimizer.learning_rate", "0.5"))
    assert sorted(path.name for path in unbroken.rglob("*")) == before


def test_a_checkpoint_of_another_model_is_refused(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "demo")
    recorded = tmp_path / "demo" / "config.yaml"
    values = yaml.safe_load(recorded.read_text())
    values["model"]["intermediate_dim"] = 128
    recorded.write_text(yaml.safe_dump(values))
    with pytest.raises(TomatError, match="does not hold"):
        load_trained(tmp_path / "demo")
    with pytest.raises(TomatError, match="does not hold"):
        train(tiny(tmp_path, "--model.intermediate_dim", "128"))


def test_a_batch_the_devices_cannot_share_is_refused(tmp_path):
    with pytest.raises(TomatError, match="train_batch_size is 5"):
        train(tiny(tmp_path, "--trainer.train_batch_size", "5"))
    assert not (tmp_path / "demo" / "checkpoints").exists()


def test_a_loss_that_is_not_the_configured_one_stops_the_run(tmp_path, monkeypatch):
    """As if the configured loss had been silently replaced: the step computes another one than the check expects."""
    import tomat.training.run as run_module

    monkeypatch.setattr(run_module, "uniform_loss", lambda *args, **kwargs: 0.31)
    with pytest.raises(TomatError, match="soft_cross_entropy"):
        train(tiny(tmp_path))


def test_missing_runs_and_checkpoints_are_refused(unbroken, tmp_path):
    with pytest.raises(TomatError, match="not a run"):
        load_trained(tmp_path)
    with pytest.raises(TomatError, match="step-77"):
        load_trained(unbroken, step=77)
    shutil.copytree(unbroken, tmp_path / "demo", ignore=shutil.ignore_patterns("checkpoints"))
    with pytest.raises(TomatError, match="no whole checkpoint"):
        load_trained(tmp_path / "demo")


def test_sigterm_stops_with_a_checkpoint_and_the_run_continues(unbroken, tmp_path, monkeypatch):
    """The signal arrives while the third step is being reported; the run ends after it and goes on from there."""
    from tomat.training.tracking import TrainingProgress

    update = TrainingProgress.update

    def interrupted(self, next_step, *args):
        update(self, next_step, *args)
        if next_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    words = ("--trainer.checkpointer.keep", "[{every: 100, until: null}]")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingProgress, "update", interrupted)
        result = train(tiny(tmp_path, *words))
    assert result.preempted and result.steps == 3
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    result = train(tiny(tmp_path, *words))
    assert not result.preempted and (result.first_step, result.steps) == (3, 6)
    assert losses(tmp_path / "demo") == losses(unbroken)


def test_a_profiled_run_writes_its_tracking_page(tmp_path):
    from tomat.workflow import train_and_report

    words = (
        "--trainer.profiler",
        "{enabled: true, start_step: 2, num_steps: 2}",
        "--evaluation.patches_per_material",
        "0",
    )
    config = tiny(tmp_path, *words, "--tracking_dir", str(tmp_path / "tracking"))
    train_and_report(config, time.monotonic())
    page = (tmp_path / "tracking" / "demo.md").read_text()
    assert "attention" in page and "optimizer" in page
    assert "demo" in (tmp_path / "tracking" / "index.md").read_text()
