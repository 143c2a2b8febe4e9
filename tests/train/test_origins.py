"""What a run begins from: changes by name, forks, warm starts. Real, tiny runs; most of the minute is compiling."""

import dataclasses
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
from fitted_codec import fitted_codec
from fsspec.implementations.local import LocalFileSystem
from run_facts import assert_same_model, events, flipped, losses
from tiny_run import DEMO, demo_config, tiny_run

from tomat.base.errors import RetryableError, TomatError
from tomat.data.codec.files import write_codec
from tomat.predict.inference.trained import load_trained
from tomat.train import origins
from tomat.train import run as run_module
from tomat.train.datasets import open_datasets
from tomat.train.folder import fetch
from tomat.train.origins import Continuation, plan_start, refuse_changes
from tomat.train.run import train
from tomat.train.runs.checkpoints import Checkpoint, find_checkpoint, list_checkpoints
from tomat.train.runs.history import read_metrics
from tomat.train.runs.record import read_config
from tomat.train.settings.config import load_config
from tomat.train.settings.meanings import changed_keys
from tomat.train.startup import initialise

TINY = tiny_run(6, 2)
tiny = partial(demo_config, TINY)


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """A run that is through: checkpoints 2, 4 and 5."""
    return train(tiny(tmp_path_factory.mktemp("runs"))).run_dir


@pytest.fixture
def runs(parent, tmp_path) -> Path:
    """A folder of runs that holds a copy of the parent, which a test may change."""
    shutil.copytree(parent, tmp_path / "runs" / "demo")
    return tmp_path / "runs"


def test_a_change_is_taken_by_name_and_recorded(runs):
    run = runs / "demo"
    for step in (4, 5):
        shutil.rmtree(run / "checkpoints" / f"step-{step}")
    words = ("--optimizer.learning_rate", "0.5")
    before = losses(run)
    with pytest.raises(TomatError, match="--allow_change optimizer.learning_rate"):
        train(tiny(runs, *words))
    result = train(tiny(runs, *words), Continuation(allow_change=("optimizer.learning_rate", "loss.kind")))
    assert (result.first_step, result.steps) == (3, 6)
    (change,) = events(run, "allow_change")
    assert (change["key"], change["old"], change["new"], change["step"]) == ("optimizer.learning_rate", 0.01, 0.5, 3)
    # The change acts from step 3 on, whose loss is still that of the old weights.
    after = losses(run)
    assert len(after) == 6 and after[:4] == before[:4] and after[5] != before[5]
    # It is the run's own setting from now on, and the command may be given again.
    assert yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["learning_rate"] == 0.5
    start = plan_start(tiny(runs, *words), Continuation(allow_change=("optimizer.learning_rate",)), run)
    assert start.changes == {}


def test_a_checkpoint_of_damaged_data_is_passed_over_for_an_older_one(runs, capsys, monkeypatch):
    """As one that was cut short: said, recorded, and the run goes on as it did the first time."""
    run = runs / "demo"
    before = losses(run)
    damaged, opened = flipped(run / "checkpoints" / "step-5" / "d"), []
    monkeypatch.setattr(run_module, "initialise", lambda *args: opened.append(args[-1]) or initialise(*args))
    result = train(tiny(runs))
    assert (result.first_step, result.steps) == (5, 6)
    assert opened == [5]  # the step from which TensorBoard forgets
    assert losses(run) == before
    (event,) = events(run, "partial_checkpoint")
    assert event["step"] == 6 and damaged.name in event["reason"]
    assert "passed over" in " ".join(capsys.readouterr().out.split())
    assert [found.whole for found in list_checkpoints(str(run), read_data=True)] == [True, True, True]


@pytest.mark.parametrize("key, hint", [("optimizer", "optimizer.learning_rate"), ("optimizer.learning_rat", "in full")])
def test_only_whole_keys_are_taken(runs, key, hint):
    config = tiny(runs, "--optimizer.learning_rate", "0.5")
    with pytest.raises(TomatError, match=hint):
        plan_start(config, Continuation(allow_change=(key,)), runs / "demo")


def test_a_fork_goes_on_with_model_optimizer_and_data(runs):
    """Forked after step 2 without a change, it repeats what its parent did then, to the last bit."""
    before = sorted(str(path) for path in (runs / "demo").rglob("*"))
    config = tiny(runs, "--run_name", "child")
    fork = Continuation(fork_of="demo", fork_step=2)
    result = train(config, fork)
    assert (result.first_step, result.steps) == (3, 6)
    assert losses(runs / "child") == losses(runs / "demo")[3:]
    assert_same_model(runs / "child", runs / "demo")
    (event,) = events(runs / "child", "fork")
    assert (event["parent"], event["step"], event["changes"]) == ("demo", 3, {})
    assert [event["event"] for event in events(runs / "child", "start", "resume", "stop")] == ["start", "stop"]
    # Its parent is as it was, the command can be given again, and the name is taken for any other origin.
    assert sorted(str(path) for path in (runs / "demo").rglob("*")) == before
    assert train(config, fork).first_step == 6
    for other in (Continuation(fork_of="demo", fork_step=4), Continuation(fork_of="another")):
        with pytest.raises(TomatError, match="a fork of 'demo' after step 2"):
            train(config, other)


def test_a_fork_that_cannot_be_made_leaves_nothing(runs):
    for words, wanted, message in (
        (["--optimizer.learning_rate", "0.5"], Continuation(fork_of="demo"), "allow_change optimizer.learning_rate"),
        ([], Continuation(fork_of="demo", fork_step=3), "step-3 is not a whole checkpoint"),
        ([], Continuation(fork_of="nobody"), "nobody/config.yaml does not exist"),
        ([], Continuation(fork_of="demo", warm_start="demo"), "exclude each other"),
    ):
        with pytest.raises(TomatError, match=message):
            train(tiny(runs, "--run_name", "child", *words), wanted)
    shutil.rmtree(runs / "demo" / "checkpoints")
    with pytest.raises(TomatError, match="own name"):
        train(tiny(runs), Continuation(fork_of="demo"))
    assert {path.name for path in runs.iterdir()} == {"demo"}


def test_a_fork_whose_copy_was_cut_short_is_copied_again(runs):
    config, fork = tiny(runs, "--run_name", "child"), Continuation(fork_of="demo", fork_step=4)
    datasets = open_datasets(config, runs / "child")
    start = plan_start(config, fork, runs / "child").settle(datasets)
    start.record(datasets)
    start.with_fork_copied()
    copied = runs / "child" / "checkpoints" / "step-4"
    (copied / "metadata.json").unlink()
    next((copied / "d").iterdir()).unlink()
    assert not list_checkpoints(str(runs / "child"))[0].whole
    # Also for a command that does not name the fork any more: never a run with fresh weights in its place.
    for wanted in (Continuation(), Continuation(fork_of="demo")):
        again = plan_start(config, wanted, runs / "child").settle(datasets)
        taken = again.taken("state")
        assert taken is not None and taken.step == 4
    again.record(datasets)
    again.with_fork_copied()
    assert find_checkpoint(str(runs / "child")).step == 4
    assert len(events(runs / "child", "fork")) == 1


def test_a_fork_in_a_bucket_is_known_there_before_it_is_copied(runs, tmp_path, monkeypatch):
    """A machine that is taken away while it copies: another one goes on with the fork."""
    (tmp_path / "machine").mkdir()
    monkeypatch.chdir(tmp_path / "machine")
    bucket = f"file://{runs}"
    config = dataclasses.replace(tiny(runs, "--run_name", "child"), output_dir=bucket)
    fork = Continuation(fork_of="demo", fork_step=2)
    found: list[str] = []

    def cut_short(source: Checkpoint, destination: str) -> None:
        found.extend(path.name for path in (runs / "child").iterdir())
        raise RetryableError("taken away")

    with monkeypatch.context() as patch, pytest.raises(RetryableError, match="taken away"):
        patch.setattr(origins.checkpoints, "copy", cut_short)
        train(config, fork)
    assert {"config.yaml", "codec.json", "history.jsonl"} <= set(found)
    fetch(config.run_dir, tmp_path / "another")
    again = plan_start(config, fork, tmp_path / "another")
    assert again.parent is not None and again.parent.taken == "state" and again.parent.checkpoint.step == 2


def test_a_run_goes_on_with_its_own_codec_alone_and_weights_too(runs):
    """The model fits, but the ids mean other densities."""
    datasets, recorded = open_datasets(tiny(runs), runs / "demo"), runs / "demo" / "codec.json"
    wanted = Continuation(warm_start=str(runs / "demo"))
    own = plan_start(tiny(runs), Continuation(), runs / "demo")
    warm = plan_start(tiny(runs, "--run_name", "warm"), wanted, runs / "warm")
    other = fitted_codec(64, np.random.default_rng(0).exponential(size=(20, 20, 20)))
    write_codec(other, recorded)
    for plan, whose in ((own, "run 'demo'"), (warm, f"'{runs}/demo'")):
        with pytest.raises(TomatError, match=f"{whose} was trained with codec {other.sha256[:12]}.*retokenize --codec"):
            plan.settle(datasets)
    recorded.unlink()
    recorded.mkdir()
    with pytest.raises(TomatError, match="codec.json cannot be read"):
        own.settle(datasets)


def test_a_warm_start_takes_the_weights_and_nothing_else(runs, parent):
    config, wanted = tiny(runs, "--run_name", "warm", "--trainer.seed", "7"), Continuation(warm_start=str(parent))
    result = train(config, wanted)
    assert (result.first_step, result.steps) == (0, 6)
    # The trained weights' loss, not that of fresh ones.
    before = losses(parent)
    assert abs(result.first_loss - before[5]) < 0.5 * abs(result.first_loss - before[0])
    rows = read_metrics(runs / "warm" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    assert rows[0]["optim/learning_rate"] < rows[1]["optim/learning_rate"]
    (event,) = events(runs / "warm", "warm_start")
    assert event["source"] == str(parent) and event["source_step"] == 5 and event["warmup"] == 2
    # The same command resumes it, as a launcher does after a preemption; another source is refused.
    assert train(config, wanted).first_step == 6
    with pytest.raises(TomatError, match="a run that has checkpoints is resumed"):
        train(config, Continuation(warm_start=str(runs / "demo")))


def test_the_temporary_checkpoints_of_another_run_are_found(runs, tmp_path):
    place, newest = tmp_path / "passing" / "demo", runs / "demo" / "checkpoints" / "step-5"
    recorded = yaml.safe_load((runs / "demo" / "config.yaml").read_text())
    recorded["trainer"]["checkpointer"]["temporary_base_path"] = str(place.parent)
    (runs / "demo" / "config.yaml").write_text(yaml.safe_dump(recorded))
    place.mkdir(parents=True)
    newest.rename(place / newest.name)
    assert load_trained(runs / "demo").step == 5
    wanted = (
        Continuation(("trainer.checkpointer.temporary_base_path",), "demo"),
        Continuation(warm_start=f"{runs}/demo"),
    )
    for name, each in zip(("child", "warm"), wanted, strict=True):
        config = tiny(runs, "--run_name", name)
        # The codec is the run's, wherever its weights lie.
        start = plan_start(config, each, runs / name).settle(open_datasets(config, runs / name))
        assert start.parent is not None and start.parent.checkpoint.path == str(place / newest.name)


def test_temporary_checkpoints_are_not_forgotten_where_their_place_changes(runs, tmp_path):
    """The run would begin anew, and its log be cut."""
    place = tmp_path / "passing" / "demo"
    recorded = yaml.safe_load((runs / "demo" / "config.yaml").read_text())
    recorded["trainer"]["checkpointer"]["temporary_base_path"] = str(place.parent)
    (runs / "demo" / "config.yaml").write_text(yaml.safe_dump(recorded))
    shutil.copytree(runs / "demo" / "checkpoints" / "step-4", place / "step-4")
    assert plan_start(tiny(runs), Continuation(), runs / "demo").newest.step == 5
    for older, said in (("step-5", "leads to step 2 alone"), ("step-2", "leads to no checkpoint")):
        shutil.rmtree(runs / "demo" / "checkpoints" / older)
        shutil.rmtree(runs / "demo" / "checkpoints" / "step-4", ignore_errors=True)
        with pytest.raises(TomatError, match=f"{said}. Set it to {place.parent} as before"):
            plan_start(tiny(runs), Continuation(), runs / "demo")


def test_a_warm_start_killed_before_its_first_checkpoint_stays_warm(runs, parent):
    config = tiny(runs, "--run_name", "warm")
    datasets = open_datasets(config, runs / "warm")
    start = plan_start(config, Continuation(warm_start=str(parent)), runs / "warm").settle(datasets)
    start.record(datasets)
    again = plan_start(config, Continuation(), runs / "warm").settle(datasets)
    assert start.taken("weights") is not None and again.taken("weights") == start.taken("weights")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--optimizer.warmup", "0"], "optimizer.warmup is 0"),
        (["--optimizer.warmup", "0.01"], "optimizer.warmup is 0.01, which gives no step of"),
        (["--model.intermediate_dim", "128"], "model.intermediate_dim: 64 -> 128"),
        (["--data.n_density_tokens", "128"], "data.n_density_tokens: 64 -> 128"),
        (["--data.vocabulary_rows", "2304"], "data.vocabulary_rows: None -> 2304"),
    ],
)
def test_weights_that_do_not_fit_are_refused(runs, parent, words, message):
    with pytest.raises(TomatError, match=message):
        train(tiny(runs, "--run_name", "warm", *words), Continuation(warm_start=str(parent)))
    assert not (runs / "warm").exists()


def test_what_a_checkpoint_lacks_is_not_made_up(runs, parent):
    """State that the checkpoint has no arrays for is refused, not completed; and a begun run is not warmed."""
    config = tiny(runs, "--trainer.model_averaging", "{type: ema, beta: 0.9}")
    changed = changed_keys(read_config(str(runs / "demo" / "config.yaml")), config.to_dict())
    with pytest.raises(TomatError, match="does not hold this model and optimizer"):
        train(config, Continuation(allow_change=tuple(changed)))
    with pytest.raises(TomatError, match="has begun, without"):
        train(tiny(runs), Continuation(warm_start=str(parent)))


# What a run is held to, without training.


@pytest.fixture
def recorded(tmp_path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(load_config(DEMO).to_dict()))
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    return path


@pytest.mark.parametrize(
    "content, said",
    [
        (None, r"has checkpoints, but config\.yaml .* is missing.*copy.*run_name"),
        (b"  \n", r"has checkpoints, but config\.yaml .* is empty.*copy.*run_name"),
        (b"- a\n- b\n", "holds no settings"),
        (b"!!bool x", "is not YAML .* Restore it or use another run_name"),
        (b"[" * 5000, "is not YAML"),
        (b"\xff\xfe\xff", "is not YAML"),
    ],
)
def test_checkpoints_without_a_configuration_are_not_continued(recorded, content, said):
    recorded.unlink()
    if content is not None:
        recorded.write_bytes(content)
    with pytest.raises(TomatError, match=said):
        refuse_changes(recorded, load_config(DEMO))


def test_a_place_that_cannot_be_listed_is_one_error(recorded, monkeypatch):
    def refuse(self: object, path: str, **_: object) -> list[str]:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalFileSystem, "ls", refuse)
    with pytest.raises(TomatError, match=f"{recorded.parent}/checkpoints cannot be read: .*Give this user the right"):
        refuse_changes(recorded, load_config(DEMO))


def test_checkpoints_that_lie_elsewhere_count_and_without_any_there_is_nothing_to_continue(recorded, tmp_path):
    (recorded.parent / "checkpoints" / "step-3").rmdir()
    refuse_changes(recorded, load_config(DEMO, ["--loss.kind", "crps"]))
    (tmp_path / "temporary" / "demo-decoder" / "step-5").mkdir(parents=True)
    words = ["--trainer.checkpointer.temporary_base_path", str(tmp_path / "temporary")]
    with pytest.raises(TomatError, match="loss.kind"):
        refuse_changes(recorded, load_config(DEMO, [*words, "--loss.kind", "crps"]))
