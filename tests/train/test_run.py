"""A real, small run on the embedded densities: what it leaves, how it resumes, what it refuses."""

import dataclasses
import fcntl
import json
import shlex
import shutil
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Forked, signalled
from levanter.tracker import current_tracker
from run_facts import assert_same_model, losses
from tiny_run import DEMO, demo_config, tiny_run

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.predict.inference.trained import load_trained
from tomat.train import folder as folder_module
from tomat.train import loop as loop_module
from tomat.train import run as run_module
from tomat.train.loop import TrainingLoop
from tomat.train.origins import Continuation
from tomat.train.run import train
from tomat.train.runs.checkpoints import newest_whole
from tomat.train.runs.devices import DETAILS
from tomat.train.runs.history import last_event, read_events, read_metrics
from tomat.train.runs.lock import Holder
from tomat.train.runs.run_log import read_lines

TINY = tiny_run(6, 2, "--trainer.steps_per_eval", "3", "--trainer.max_eval_batches", "1")
tiny = partial(demo_config, TINY)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    return train(tiny(folder, "--slice", "v6e-4", "--run_elsewhere", "true")).run_dir


def test_the_folder_says_what_happened(unbroken):
    rows = read_metrics(unbroken / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(6))
    for row in rows:
        assert min(row[key] for key in ("wall_seconds", "step_seconds", "tokens_per_second")) > 0
        assert "mfu_full" not in row  # the CPU's peak is not known, so there is no MFU
    assert rows[0]["compile_seconds"] > 0
    assert [row["step"] for row in rows if "eval/validation/loss" in row][:2] == [2, 5]
    assert {path.name for path in (unbroken / "checkpoints").iterdir()} >= {"step-2", "step-4", "step-5"}
    assert yaml.safe_load((unbroken / "config.yaml").read_text())["run_name"] == "demo"
    assert json.loads((unbroken / "codec.json").read_text())
    # Levanter's log, under the name it is meant to have.
    assert [path.name for path in unbroken.glob("*.log*")] == ["demo.log"]
    assert (unbroken / "demo.log").stat().st_size > 0
    # The log of the folder that the run is in: what ran, and what was asked for.
    start, end = read_lines(str(unbroken.parent))[0][:2]
    assert (start["event"], start["step"], start["command"]) == ("start", 0, "")
    for said in (start, last_event(read_events(unbroken), "start") or {}):
        assert [said[key] for key in DETAILS] == ["2 x cpu", 2, 1, "v6e-4"]
    assert (end["event"], end["status"], end["figures"]["steps_done"]) == ("end", "finished", 6)
    assert end["figures"]["first_loss"] == rows[0]["train/loss"]


def test_a_resumed_run_equals_an_unbroken_one(unbroken, tmp_path, capsys):
    shutil.copytree(unbroken, tmp_path / "demo")
    for step in (4, 5):
        shutil.rmtree(tmp_path / "demo" / "checkpoints" / f"step-{step}")
    result = train(tiny(tmp_path, "--trainer.profiler", "{enabled: true, start_step: 3}"))
    said = " ".join(capsys.readouterr().out.split())
    assert "no trace: trainer.profiler.start_step is 3, and this process begins after step 3" in said
    assert (result.first_step, result.steps) == (3, 6)
    assert losses(tmp_path / "demo") == losses(unbroken)
    assert [line["event"] for line in read_lines(str(tmp_path))[0]] == ["resume", "end"]
    assert load_trained(unbroken).weights == "of the last step"
    assert_same_model(tmp_path / "demo", unbroken)


def test_a_complete_run_stays_as_it_is(unbroken):
    before = (unbroken / "metrics.jsonl").read_bytes()
    result = train(tiny(unbroken.parent))
    assert result.first_step == result.steps == 6
    assert (unbroken / "metrics.jsonl").read_bytes() == before
    with pytest.raises(RuntimeError, match="No global tracker"):  # none is left to the next trainer
        current_tracker()
    with (unbroken / "train.lock").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TomatError, match="run 'demo' is being trained"):
            train(tiny(unbroken.parent))


def test_a_batch_the_devices_cannot_share_is_refused(tmp_path):
    with pytest.raises(TomatError, match="train_batch_size is 5"):
        train(tiny(tmp_path, "--trainer.train_batch_size", "5"))
    assert not (tmp_path / "demo" / "checkpoints").exists()


def test_a_loss_that_is_not_the_configured_one_stops_the_run(tmp_path, monkeypatch):
    """As if the configured loss had been silently replaced: the step computes another one than the check expects."""
    monkeypatch.setattr(loop_module, "uniform_loss", lambda *args, **kwargs: 0.31)
    with pytest.raises(TomatError, match="ce_emd"):
        train(tiny(tmp_path))


def test_rows_without_density_and_axes_that_no_device_has_are_refused(tmp_path):
    with pytest.raises(TomatError, match="no row of the first batch has a density token among its first 9"):
        train(tiny(tmp_path, "--data.seq_len", "9"))
    with pytest.raises(TomatError, match="the first weights cannot be made as configured .*nowhere"):
        train(tiny(tmp_path, "--run_name", "mesh", "--trainer.mesh.shared_mapping", "{heads: nowhere}"))


def test_missing_runs_and_checkpoints_are_refused(unbroken, tmp_path):
    shutil.copytree(unbroken, tmp_path / "demo", ignore=shutil.ignore_patterns("checkpoints"))
    for place, step, message in (
        (tmp_path, None, "not a run"),
        (unbroken, 77, "step-77"),
        (tmp_path / "demo", None, "no whole checkpoint"),
    ):
        with pytest.raises(TomatError, match=message):
            load_trained(place, step)


def test_a_resume_that_fails_leaves_the_run_as_it_was(unbroken, tmp_path):
    """The changes are allowed, but the checkpoint does not hold such a model."""
    shutil.copytree(unbroken, tmp_path / "demo")
    names = ("config.yaml", "codec.json", "history.jsonl", "metrics.jsonl")
    before = {name: (tmp_path / "demo" / name).read_bytes() for name in names}
    with pytest.raises(TomatError, match="does not hold"):
        train(tiny(tmp_path, "--model.intermediate_dim", "128"), Continuation(("model.intermediate_dim",)))
    assert {name: (tmp_path / "demo" / name).read_bytes() for name in names} == before
    assert load_trained(tmp_path / "demo").step == 5
    assert train(tiny(tmp_path)).first_step == 6
    values = yaml.safe_load(before["config.yaml"])
    values["model"]["intermediate_dim"] = 128
    (tmp_path / "demo" / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(TomatError, match="does not hold"):
        load_trained(tmp_path / "demo")


def test_a_start_whose_run_went_on_before_its_turn_goes_on_from_there(unbroken, tmp_path, monkeypatch):
    """Between the first look at the run and its lock another process saves, ends and lets go."""
    shutil.copytree(unbroken, tmp_path / "demo", ignore=shutil.ignore_patterns("step-4", "step-5"))
    lock, begun = folder_module.hold_run, []

    def late(run_url: str, run_dir: Path, run_name: str) -> Any:
        shutil.copytree(unbroken / "checkpoints", run_dir / "checkpoints", dirs_exist_ok=True)
        recorded = yaml.safe_load((run_dir / "config.yaml").read_text())
        recorded["optimizer"]["learning_rate"] = 0.5
        (run_dir / "config.yaml").write_text(yaml.safe_dump(recorded))
        return lock(run_url, run_dir, run_name)

    monkeypatch.setattr(folder_module, "hold_run", late)
    monkeypatch.setattr(run_module, "open_datasets", lambda *args: begun.append(args))
    with pytest.raises(TomatError, match="optimizer.learning_rate: 0.5 -> 0.01"):
        train(tiny(tmp_path))
    assert begun == []


def test_files_in_a_bucket_that_another_process_trains_in_by_now_stay_its_own(unbroken, tmp_path, monkeypatch):
    """An outage in which this process could neither renew its lease nor learn that another one took it over."""
    monkeypatch.chdir(tmp_path)
    bucket = tmp_path / "bucket" / "demo"
    shutil.copytree(unbroken, bucket, ignore=shutil.ignore_patterns("data", "*.log", "step-5"))
    other = Holder(**{**vars(Holder.this_process()), "host": "other"})

    def outage(*args: object) -> None:
        (bucket / "lease.json").write_text(json.dumps(vars(other)))
        (bucket / "metrics.jsonl").write_text("theirs")
        raise AssertionError("far enough")

    monkeypatch.setattr(TrainingLoop, "run", outage)
    with pytest.raises(TomatError, match="now belongs to process .* on host other"):
        train(dataclasses.replace(tiny(tmp_path), output_dir=f"file://{tmp_path}/bucket"))
    assert (bucket / "metrics.jsonl").read_text() == "theirs"


def test_other_data_are_refused_before_a_tracker_is_opened(unbroken, tmp_path, monkeypatch):
    """TensorBoard drops the steps from the first one on as it opens."""
    shutil.copytree(unbroken, tmp_path / "demo")
    recorded = last_event(read_events(unbroken), "data")
    assert recorded is not None
    history = tmp_path / "demo" / "history.jsonl"
    history.write_text(history.read_text().replace(recorded["train"], "0" * 64))
    monkeypatch.setattr(run_module, "initialise", lambda *args: pytest.fail("opened"))
    with pytest.raises(TomatError, match=r"data.train .*expected 000000000000"):
        train(tiny(tmp_path))


def test_an_output_folder_that_cannot_be_made_is_one_error(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    words = ["train", "--config_path", str(DEMO), *TINY, "--output_dir", str(tmp_path / "file" / "runs")]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "--output_dir" in error and "Traceback" not in error


def test_a_run_that_is_stopped_writes_its_page_and_that_of_its_trace(tmp_path):
    """Told to stop in the middle of the steps that are traced. In a process of its own: after hundreds of other tests
    in one process a trace came without its programs."""
    words = ["train", "--config_path", str(DEMO), *TINY, "--output_dir", str(tmp_path), "--evaluation.picture", "false"]
    words += ["--trainer.profiler", "{enabled: true, start_step: 2, num_steps: 3}"]
    words += ["--tracking_dir", str(tmp_path / "tracking"), "--preemption.grace_seconds", "600"]
    stopped = Forked(*words, cwd=tmp_path, before=signalled(3, signal.SIGINT))
    said, _ = stopped.communicate()
    assert stopped.returncode == 130, said
    page = (tmp_path / "tracking" / "demo.md").read_text()
    assert "attention" in page and "optimizer" in page, page
    assert "demo" in (tmp_path / "tracking" / "index.md").read_text()
    assert "preempted" in (tmp_path / "demo" / "README.md").read_text()
    newest = newest_whole(str(tmp_path / "demo"))
    assert newest is not None and newest.step == 2
    # What is printed to go on with is the same command.
    printed = said.partition("the same command continues the run: ")[2]
    assert shlex.split(printed.splitlines()[0])[:4] == ["tomat", *words[:3]]
    assert set(words) <= set(shlex.split(printed))
