"""Real runs on a data set with one poisoned row: what stops, what is skipped, what is written down."""

import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from forked import Forked, as_users_fuse
from run_facts import assert_same_model, events
from tiny_run import tiny_run

from tomat.base.errors import TomatError
from tomat.data.tokens.shards import open_shards
from tomat.data.tokens.shuffle import ShuffledIndex
from tomat.train.datasets import open_datasets
from tomat.train.dispatch import CompiledStep
from tomat.train.loop import DATA_KEY
from tomat.train.run import train
from tomat.train.runs.history import read_metrics
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.tracking import TrainingProgress

TINY = ["--preset", "demo", "--data.layout", "v3-p7", *tiny_run(6, 1, "--trainer.mp", "f32", steady=False, name="")]
BAD_STEP = 3
NO_TOKEN = 65535
"""An id far beyond the vocabulary."""


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """The embedded densities, tokenised."""
    folder = tmp_path_factory.mktemp("clean")
    words = ["--data.source", "embedded", "--output_dir", str(folder)]
    open_datasets(load_config(None, [*TINY, *words]), folder)
    return folder / "data" / "train"


@pytest.fixture(scope="module")
def poisoned(clean, tmp_path_factory) -> tuple[Path, str]:
    """A copy in which one row of the batch of `BAD_STEP` is not what its checksum says; and that row's material."""
    folder = tmp_path_factory.mktemp("poisoned") / "train"
    shutil.copytree(clean, folder)
    config = run_config(folder, folder.parent)
    shards = open_shards(folder)
    index = ShuffledIndex(shards.rows, config.data.shuffle, config.trainer.seed + DATA_KEY)
    row = int(index(np.array([4 * BAD_STEP + 1]))[0])
    array = ts.open({"driver": "zarr3", "kvstore": f"file://{folder}/tokens.zarr/"}, open=True).result()
    array[row, 1:].write(np.full(shards.context - 1, NO_TOKEN, np.uint16)).result()
    return folder, shards.material_of_row(row).material_id


def run_words(data: Path, output_dir: Path) -> list[str]:
    return [*TINY, "--data.source", "shards", "--data.train", str(data), "--output_dir", str(output_dir)]


def run_config(data: Path, output_dir: Path, *words: str) -> TrainConfig:
    return load_config(None, [*run_words(data, output_dir), *words])


OVERFLOWS = f"""
import jax.numpy as jnp
import tomat.train.step as step_module

density_loss = step_module.density_loss

def overflowing(hidden, lm_head, tokens, **settings):
    loss, metrics = density_loss(hidden, lm_head, tokens, **settings)
    return loss * jnp.where(jnp.any(tokens.array == {NO_TOKEN}), jnp.nan, 1.0), metrics

step_module.density_loss = overflowing
"""
"""Lets the loss of a batch with `NO_TOKEN` be NaN, and its gradient, as where a kernel overflows on some input."""

TRAINS = """
from tomat.train.run import train
from tomat.train.settings.config import load_config

train(load_config(None, {words}))
raise SystemExit
"""


@pytest.fixture(scope="module", autouse=True)
def overflow():
    import tomat.train.step as step_module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_module, "density_loss", step_module.density_loss)  # put back at the end
        exec(OVERFLOWS, {})
        yield


UNVERIFIED = ("--data.verify_checksums", "false")
SKIP = (*UNVERIFIED, "--guards.on_bad_loss", "skip")


@pytest.fixture(scope="module")
def stopped(poisoned, tmp_path_factory) -> tuple[Path, str]:
    """A run that the bad batch stopped, and its error."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.raises(TomatError) as error:
        train(run_config(poisoned[0], folder, *UNVERIFIED))
    return folder / "run", str(error.value)


@pytest.fixture(scope="module")
def skipping(poisoned, tmp_path_factory) -> Path:
    """A run that passed over the bad batch, never stopped; its caches are cleared after its fifth step.

    In Levanter's own loop, which asks the caches at each step.
    """
    update = TrainingProgress.update

    def forgetful(self, next_step, *args):
        update(self, next_step, *args)
        if next_step == 5:
            jax.clear_caches()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingProgress, "update", forgetful)
        result = train(run_config(poisoned[0], tmp_path_factory.mktemp("skipping"), *SKIP, "--dispatch_ahead", "0"))
    assert math.isfinite(result.last_loss)
    return result.run_dir


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run_dir / "checkpoints").glob("step-*"))


def guard_events(run_dir: Path, name: str) -> list[dict]:
    return events(run_dir, f"guard:{name}")


def test_a_bad_loss_stops_the_run_before_it_is_saved(stopped, poisoned):
    run_dir, message = stopped
    assert f"step {BAD_STEP}: the loss is not finite" in message and poisoned[1] in message
    assert "--guards.on_bad_loss skip" in message
    assert max(steps(run_dir)) == BAD_STEP - 1
    [event] = guard_events(run_dir, "bad_loss")
    assert (event["step"], event["action"]) == (BAD_STEP, "stop") and poisoned[1] in event["materials"]


def test_a_skipped_batch_leaves_the_model_as_it_was(skipping):
    assert_same_model(skipping, skipping, BAD_STEP - 1, BAD_STEP)
    rows = read_metrics(skipping / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["train/loss"] is None for row in rows] == [step == BAD_STEP for step in range(6)]
    assert [row.get("guards/bad_steps") for row in rows] == [None] * 3 + [1, 1, 1]
    # The schedule moves on with the step.
    rates = [row["optim/learning_rate"] for row in rows]
    assert len(set(rates)) == len(rates)


AHEAD = ("--dispatch_ahead", "2", "--trainer.checkpointer.keep", "[{every: 5, until: null}]")
"""Nothing is saved before the last step, so that steps are in flight when the bad one is read."""


@pytest.fixture
def dispatched(monkeypatch) -> list[int]:
    """The steps that are dispatched, as they are."""
    found: list[int] = []
    take = CompiledStep.__call__

    def counted(self, batch):
        found.append(len(found))
        return take(self, batch)

    monkeypatch.setattr(CompiledStep, "__call__", counted)
    return found


def test_a_bad_loss_stops_the_run_with_steps_in_flight_and_none_of_them_is_saved(
    stopped, poisoned, tmp_path, dispatched
):
    with pytest.raises(TomatError) as error:
        train(run_config(poisoned[0], tmp_path, *UNVERIFIED, *AHEAD))
    assert dispatched == list(range(BAD_STEP + 3))
    assert str(error.value) == stopped[1].replace(str(stopped[0].parent), str(tmp_path))
    assert steps(tmp_path / "run") == []
    runs = (tmp_path / "run", stopped[0])
    ours, theirs = (read_metrics(run / "metrics.jsonl") for run in runs)
    assert [row.get("train/loss") for row in ours[:BAD_STEP]] == [row["train/loss"] for row in theirs[:BAD_STEP]]
    assert len(ours) == len(theirs)
    (ours,), (theirs,) = (guard_events(run, "bad_loss") for run in runs)
    assert {**ours, "time": 0} == {**theirs, "time": 0}


def test_a_batch_is_skipped_with_steps_in_flight(skipping, poisoned, tmp_path, dispatched):
    run_dir = train(run_config(poisoned[0], tmp_path, *SKIP, *AHEAD)).run_dir
    assert dispatched == list(range(6)) and steps(run_dir) == [5]
    assert_same_model(run_dir, skipping, 5, 5)
    rows, expected = (read_metrics(run / "metrics.jsonl") for run in (run_dir, skipping))
    for key in ("step", "train/loss", "guards/bad_steps", "optim/learning_rate"):
        assert [row.get(key) for row in rows] == [row.get(key) for row in expected]


def test_a_stopped_run_goes_on_with_the_batch_skipped(poisoned, tmp_path):
    """As a run that never stopped, to the bit, though the program of the steps before the stop was another."""

    def trained(folder: str, *words: str) -> str:
        """What the process said."""
        code = TRAINS.format(words=[*run_words(poisoned[0], tmp_path / folder), *words])
        return Forked(env=as_users_fuse(), before=OVERFLOWS + code).communicate(300)[0]

    said = trained("stopped", *UNVERIFIED)
    assert max(steps(tmp_path / "stopped" / "run"), default=None) == BAD_STEP - 1, said
    for folder in ("stopped", "skipping"):
        said = trained(folder, *SKIP)
        assert max(steps(tmp_path / folder / "run"), default=None) == 5, said
    run_dir = tmp_path / "stopped" / "run"
    assert [event["step"] for event in events(run_dir, "resume")] == [BAD_STEP]
    assert_same_model(run_dir, tmp_path / "skipping" / "run", 5, 5)
    assert [event["action"] for event in guard_events(run_dir, "bad_loss")] == ["stop", "skip"]


def test_a_learning_rate_beyond_all_sense_ends_the_run_though_it_skips(clean, tmp_path, dispatched):
    words = ("--optimizer.learning_rate", "1e30", "--guards.on_bad_loss", "skip", "--guards.max_skips", "1")
    with pytest.raises(TomatError, match=r"step 1: the update is not finite .* 2 bad steps in a row; .*max_skips is 1"):
        train(run_config(clean, tmp_path, *words, *AHEAD))
    assert [event["action"] for event in guard_events(tmp_path / "run", "bad_loss")] == ["skip", "stop"]
    assert dispatched == [0, 1, 2, 3] and steps(tmp_path / "run") == []


def test_a_step_that_is_compiled_again_is_reported(skipping, stopped):
    events = guard_events(skipping, "recompilation")
    assert [(event["function"], event["step"]) for event in events] == [("jit(_train_step)", 5)]
    assert events[0]["seconds"] > 0
    assert read_metrics(skipping / "metrics.jsonl")[5]["guards/recompilations"] == 1
    assert guard_events(stopped[0], "recompilation") == []
