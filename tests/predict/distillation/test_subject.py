"""A run in few bits from teacher to folder: what is trained alone changes, it goes on where it stopped, nothing is
fitted again."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fitted_codec import fitted_codec
from haliax import NamedArray
from json_keys import assert_keys_of_before
from reported import reported
from tiny_run import DEMO, tiny_run

from tomat.app.cli import main
from tomat.app.train_verbs import distillation_values
from tomat.base.errors import TomatError
from tomat.data.tokens.vocabulary import DENSITY_START, PAD
from tomat.model.any_decoder import HiddenHead
from tomat.model.loss.interface import DensityTarget
from tomat.predict.distillation.divergence import divergence, teacher_divergence
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
    sizes = reported(tmp_path, "export", *again)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        runs / "student" / "weights" / "model.safetensors"
    ).read_bytes()
    assert_keys_of_before("export", sizes)
    assert sizes["weights_over_float32"] < 0.5
    with pytest.raises(TomatError, match=r"tomat export --run .* --step 0"):
        load_trained(runs / "student", 0)


def test_it_goes_on_as_the_unbroken_run_would_have(runs):
    student = runs / "student"
    unbroken = read_weights(student / "weights").arrays
    shutil.rmtree(student / "checkpoints" / "step-2")
    shutil.rmtree(student / "weights")
    with pytest.raises(TomatError, match="has not ended"):
        load_trained(student)
    shutil.copytree(runs / "few", student / "weights")  # of another step, as those of an earlier end are
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


def test_it_is_not_written_with_scales_of_another_begin(runs, tmp_path, capsys):
    """Those are read from the folder: with another one the numbers that were trained would mean something else."""
    history = runs / "student" / "history.jsonl"
    before = history.read_text()
    begun = next(event for event in read_events(runs / "student") if event["event"] == "subject")
    history.write_text(before.replace(begun["quantised_sha256"], "0" * 64))
    assert main(["export", "--run", str(runs / "student"), "--output", str(tmp_path / "out")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "began with quantised_sha256 0000" in said and "Put back the folder" in said
    assert not (tmp_path / "out").exists()
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
    codec = fitted_codec(32, np.random.default_rng(0).random((8, 8, 8)))
    other = Datasets(replace(datasets.train, codec=codec), None)
    with pytest.raises(TomatError, match="a codec .*64 density ids.* and the run or its data .*32"):
        open_subject(config, other)
    assert open_subject(config, datasets).record["teacher_step"] == 1


@pytest.mark.parametrize(
    "words, message",
    [
        (["--sharding", "fsdp"], "set sharding: replicated"),
        (["--distillation.top_k", "0"], "expected at least 1"),
        (["--distillation.temperature", "0"], "positive"),
    ],
)
def test_words_that_cannot_be_are_one_line(runs, words, message, capsys):
    assert main([*words_of(runs), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def unpacked(stored) -> np.ndarray:
    return stored.values() if isinstance(stored, Quantised) else stored


BINS, ROWS = 6, DENSITY_START + 6
TARGET = DensityTarget(BINS, np.arange(1.0, BINS + 1.0))
RANDOM = np.random.default_rng(0)
BATCH, POSITION, VOCAB = hax.Axis("batch", 3), hax.Axis("position", 10), hax.Axis("vocab", ROWS)


def model_of(embed: int, rows: hax.Axis = VOCAB) -> HiddenHead:
    Embed = hax.Axis("embed", embed)
    hidden, head = (
        RANDOM.normal(size=[axis.size for axis in axes]) for axes in ((BATCH, POSITION, Embed), (rows, Embed))
    )
    return HiddenHead(
        NamedArray(jnp.asarray(hidden, jnp.float32), (BATCH, POSITION, Embed)),
        NamedArray(jnp.asarray(head, jnp.float32), (rows, Embed)),
    )


def tokens_of() -> NamedArray:
    ids = RANDOM.integers(DENSITY_START, ROWS, (3, 10))
    ids[:, :4], ids[1, 7:], ids[2] = 5, PAD, 5
    return NamedArray(jnp.asarray(ids, jnp.int32), (BATCH, POSITION))


STUDENT, TEACHER, TOKENS = model_of(4), model_of(8), tokens_of()


def value(student: HiddenHead, top_k: int = BINS, temperature: float = 1.0, block: int = 4) -> jax.Array:
    return teacher_divergence(
        student, TEACHER, TOKENS, target=TARGET, top_k=top_k, temperature=temperature, block_positions=block
    )


def by_hand(top_k: int, temperature: float) -> float:
    sums = []
    for row in range(3):
        own = []
        for position in range(9):
            if int(TOKENS.array[row, position + 1]) < DENSITY_START:
                continue
            p, q = (
                np.exp(np.asarray(head.array[DENSITY_START:] @ hidden.array[row, position], np.float64) / temperature)
                for hidden, head, _ in (TEACHER, STUDENT)
            )
            p, q = p / p.sum(), q / q.sum()
            order = np.argsort(-p)
            p, q = ([*x[order[:top_k]], *([x[order[top_k:]].sum()] if top_k < BINS else [])] for x in (p, q))
            own.append(sum(a * np.log(a / b) for a, b in zip(p, q, strict=True)))
        sums.append(np.mean(own) if own else 0.0)
    return float(np.mean(sums))


@pytest.mark.parametrize("top_k, temperature, block", [(6, 1.0, 4), (2, 1.0, 10), (1, 3.0, 64), (9, 2.0, 3)])
def test_it_is_the_formula(top_k, temperature, block):
    assert float(value(STUDENT, top_k, temperature, block)) == pytest.approx(by_hand(top_k, temperature), rel=1e-5)


def test_the_gradient_is_that_of_the_formula_and_the_teacher_has_none_but_the_same_vocabulary():
    def plain(head: jax.Array) -> jax.Array:
        logits = jnp.einsum("bpe,ve->bpv", STUDENT[0].array, head)[:, :-1, DENSITY_START:]
        teacher = jnp.einsum("bpe,ve->bpv", TEACHER[0].array, TEACHER[1].array)[:, :-1, DENSITY_START:]
        p, q = jax.nn.softmax(teacher), jax.nn.log_softmax(logits)
        density = (TOKENS.array[:, 1:] >= DENSITY_START).astype(jnp.float32)
        each = jnp.sum(p * (jnp.log(p) - q), axis=-1) * density
        return jnp.mean(each.sum(axis=1) / jnp.maximum(density.sum(axis=1), 1))

    found = jax.grad(lambda head: value(HiddenHead(STUDENT[0], NamedArray(head, STUDENT[1].axes))))(STUDENT[1].array)
    np.testing.assert_allclose(found, jax.grad(plain)(STUDENT[1].array), atol=1e-6)
    assert np.abs(found).max() > 1e-3
    of_teacher = jax.grad(
        lambda head: teacher_divergence(
            STUDENT, HiddenHead(TEACHER[0], NamedArray(head, TEACHER[1].axes)), TOKENS, target=TARGET, top_k=2,
            temperature=1.0, block_positions=4,
        )
    )(TEACHER[1].array)  # fmt: skip
    assert not np.asarray(of_teacher).any()
    with pytest.raises(TomatError, match=f"teacher's head has {ROWS:,} rows and the student's {ROWS + 1:,}"):
        value(model_of(4, hax.Axis("vocab", ROWS + 1)))


def test_a_student_that_says_the_same_costs_nothing():
    assert float(value(TEACHER)) == pytest.approx(0.0, abs=1e-6)
    # Bins as probable as the last of the top are told apart too: no mass is left, and nothing is not a number.
    equal = jnp.zeros((2, BINS))
    assert np.allclose(divergence(equal, equal, 3), 0.0)
    assert np.isfinite(jax.grad(lambda x: divergence(x, equal, 3).sum())(equal + 1.0)).all()
