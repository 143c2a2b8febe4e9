"""A run in few bits from teacher to folder: what is trained alone changes, it goes on where it stopped, nothing is
fitted again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_run import DEMO, tiny_run

from tomat.app.cli import main
from tomat.app.train_verbs import distillation_values
from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.predict.distillation.subject import open_subject
from tomat.predict.inference.trained import load_trained
from tomat.predict.weights.arrays import named_arrays
from tomat.predict.weights.folder import read_weights
from tomat.predict.weights.quantise import Quantised
from tomat.train.datasets import Datasets, open_datasets
from tomat.train.run import train
from tomat.train.runs.checkpoints import array_shapes
from tomat.train.runs.history import read_events
from tomat.train.settings.config import config_from_dict, load_config


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """`teacher`, its weights in two bits (`few`), and `student`, their MLPs after three steps."""
    folder = tmp_path_factory.mktemp("runs")
    teacher = train(load_config(DEMO, tiny_run(2, 100, "--output_dir", str(folder), "--run_name", "teacher"))).run_dir
    assert main(["compress", "--run", str(teacher), "--bits", "2", "--output", str(folder / "few")]) == 0
    shutil.copytree(teacher / "data", folder / "student" / "data")  # the same, and seconds to make again
    assert main(words_of(folder)) == 0
    return folder


def words_of(folder: Path, *more: str) -> list[str]:
    return [
        "train", "--teacher", str(folder / "teacher"), "--quantised", str(folder / "few"), "--train", "mlp",
        "--run_name", "student", "--trainer.num_train_steps", "3", "--optimizer.warmup", "1",
        "--trainer.checkpointer.keep", "[{every: 1, until: null}]", *more,
    ]  # fmt: skip


def test_only_what_is_trained_changes_and_is_saved(runs):
    before, after = read_weights(runs / "few").stored, read_weights(runs / "student" / "weights").stored
    changed = {name for name in before if not np.array_equal(unpacked(before[name]), unpacked(after[name]))}
    assert changed == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    for name in changed:
        assert isinstance(after[name], Quantised) and after[name].description == before[name].description
    saved = [name for name in array_shapes(str(runs / "student" / "checkpoints" / "step-1")) if "student/" in name]
    # Numbers, scales and tables of three matrices: what is trained, and its two moments.
    assert all("/mlp/" in name for name in saved) and len(saved) == 3 * 3 * 3
    assert not any(event["event"].startswith("guard:") for event in read_events(runs / "student"))
    rows = [json.loads(line) for line in (runs / "student" / "metrics.jsonl").read_text().splitlines()]
    assert [row["train/teacher_kl_nats"] > 0 for row in rows if "train/loss" in row] == [True] * 3


def test_the_run_predicts_with_the_folder_and_is_not_fitted_again(runs, tmp_path, capsys):
    of_run, of_folder = (load_trained(runs / place) for place in ("student", "student/weights"))
    ours, theirs = named_arrays(of_run.model), read_weights(runs / "student" / "weights").arrays
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert "mlp distilled from teacher" in of_run.weights and of_run.step == of_folder.step == 2
    again = ["--run", str(runs / "student"), "--output", str(tmp_path / "out")]
    assert main(["compress", "--bits", "4", *again]) == 2
    assert "in few bits already" in capsys.readouterr().err
    assert main(["export", *again, "--json", str(tmp_path / "sizes.json")]) == 0
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        runs / "student" / "weights" / "model.safetensors"
    ).read_bytes()
    assert json.loads((tmp_path / "sizes.json").read_text())["weights_over_float32"] < 0.5
    with pytest.raises(TomatError, match=r"tomat export --run .* --step 0"):
        load_trained(runs / "student", 0)


def test_it_goes_on_as_the_unbroken_run_would_have(runs):
    student = runs / "student"
    unbroken = read_weights(student / "weights").arrays
    shutil.rmtree(student / "checkpoints" / "step-2")
    shutil.rmtree(student / "weights")
    with pytest.raises(TomatError, match="has not ended"):
        load_trained(student)
    assert main(words_of(runs)) == 0
    assert [event["step"] for event in read_events(student) if event["event"] == "resume"] == [2]
    resumed = read_weights(student / "weights").arrays
    assert all(np.array_equal(unbroken[name], resumed[name]) for name in unbroken)


def test_another_begin_is_refused_when_it_goes_on(runs, capsys):
    history = runs / "student" / "history.jsonl"
    before = history.read_text()
    begun = next(event for event in read_events(runs / "student") if event["event"] == "subject")
    history.write_text(before.replace(begun["quantised_sha256"], "0" * 64))
    assert main(words_of(runs)) == 2
    assert "began with quantised_sha256 0000" in capsys.readouterr().err
    history.write_text(before)


@pytest.mark.parametrize(
    "words, message",
    [
        (["--data.n_density_tokens", "32"], "is .*the model of its configuration has"),
        (["--model.hidden_dim", "16"], r"few: the array .* is \[2250, 32\]; .* has \[2250, 16\]"),
        (["--distillation.quantised", "teacher"], "has no weights.json"),
    ],
)
def test_a_folder_of_another_model_is_refused(runs, words, message, monkeypatch):
    monkeypatch.chdir(runs)
    config = config_from_dict(*distillation_values(Path("few"), "teacher", "mlp", words))
    datasets = open_datasets(load_config(DEMO, tiny_run(2, 100)), runs / "student")
    with pytest.raises(TomatError, match=message):
        open_subject(config, datasets)


def test_a_teacher_of_another_codec_is_refused(runs):
    config = config_from_dict(*distillation_values(runs / "few", str(runs / "teacher"), "mlp", []))
    datasets = open_datasets(config, runs / "student")
    histogram = DensityHistogram()
    histogram.add(np.random.default_rng(0).random((8, 8, 8), dtype=np.float32))
    other = Datasets(replace(datasets.train, codec=fit_lloyd_max(histogram, n_bins=32)), None)
    with pytest.raises(TomatError, match="a codec .*64 density ids.* and the run or its data .*32"):
        open_subject(config, other)
    assert open_subject(config, datasets).record["teacher_step"] == 1


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "needs --teacher RUN and --quantised"),
        (["--quantised", "{runs}"], "has no config.yaml"),
        (["--quantised", "{runs}/few", "--sharding", "fsdp"], "set sharding: replicated"),
        (["--quantised", "{runs}/few", "--distillation.top_k", "0"], "expected at least 1"),
        (["--quantised", "{runs}/few", "--distillation.temperature", "0"], "positive"),
    ],
)
def test_words_that_cannot_be_are_one_line(runs, words, message, capsys):
    assert main(["train", "--teacher", f"{runs}/teacher", *(word.format(runs=runs) for word in words)]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def unpacked(stored) -> np.ndarray:
    return stored.values() if isinstance(stored, Quantised) else stored
