"""What an earlier version left is read as that version read it: `tests/fixtures/before/README.md`."""

import hashlib
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from tomat.data.tokens.shards import open_shards
from tomat.predict.inference.trained import load_trained
from tomat.report.pages.report import read_record, write_index
from tomat.train.origins import Continuation
from tomat.train.run import train
from tomat.train.runs.history import read_events, read_metrics
from tomat.train.settings.config import load_config

BEFORE = Path(__file__).parents[1] / "fixtures" / "before"
TRACKING = Path(__file__).parents[2] / "docs" / "tracking"
EXPECTED = json.loads((BEFORE / "expected.json").read_text())


@pytest.fixture
def runs(tmp_path) -> Path:
    """A folder of runs with a copy of the old one, `before`."""
    shutil.copytree(BEFORE / "run", tmp_path / "before")
    return tmp_path


def test_a_checkpoint_has_the_same_parameters(runs):
    run = load_trained(runs / "before")
    assert run.step == EXPECTED["step"] and run.codec.sha256 == EXPECTED["codec_sha256"]
    found = {
        jax.tree_util.keystr(path): float(np.abs(np.asarray(leaf, np.float64)).sum())
        for path, leaf in jax.tree_util.tree_leaves_with_path(run.model)
    }
    assert found == pytest.approx(EXPECTED["parameters_l1"], rel=1e-12)


def test_a_shard_set_has_the_same_tokens(runs):
    shards = open_shards(runs / "before" / "data" / "train")
    assert shards.manifest.rows == EXPECTED["rows"] and shards.manifest.has_checksum
    tokens = np.ascontiguousarray(shards.array[: shards.manifest.rows].read().result(), dtype="<i4")
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == EXPECTED["tokens_sha256"]


def test_the_run_goes_on(runs):
    words = ["--output_dir", str(runs), "--trainer.num_train_steps", "3"]
    longer = Continuation(allow_change=("trainer.num_train_steps",))
    result = train(load_config(runs / "before" / "config.yaml", words), longer)
    assert (result.first_step, result.steps) == (2, 3)
    assert [row["step"] for row in read_metrics(runs / "before" / "metrics.jsonl")] == [0, 1, 2]
    events = read_events(runs / "before")
    assert [event["event"] for event in events] == ["data", "start", "stop", "allow_change", "resume", "stop"]
    assert [event["step"] for event in events] == [0, 0, 2, 2, 2, 3]


def test_a_page_on_record_is_listed_and_kept(tmp_path):
    """The pages of this repository were written by earlier versions."""
    (tmp_path / "archive").mkdir()
    page = Path(shutil.copy(TRACKING / "archive" / "demo-cpu.md", tmp_path / "archive"))
    before = page.read_bytes()
    (tmp_path / "data").mkdir()
    shutil.copy(TRACKING / "data" / "demo-cpu.json", tmp_path / "data")
    record = read_record(tmp_path, "demo-cpu")
    index = write_index(tmp_path).read_text()
    row = next(line for line in (TRACKING / "index.md").read_text().splitlines() if line.startswith("| [demo-cpu]"))
    assert record["kind"] == "measured" and row in index
    assert page.read_bytes() == before
