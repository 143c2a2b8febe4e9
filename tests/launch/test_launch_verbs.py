"""`tomat launch` refuses what it cannot do, before anything is paid for."""

import shutil

import pytest
import yaml
from pod_twin import DENIED, LOGIN, NO_BUCKET

from tomat.app.cli import main
from tomat.train.settings.config import load_config

WORDS = ["launch", "--config_path", "run.yaml", "--zone", "us-east5-b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*WORDS, "--slice", "null"], "names no slice"),
        ([*WORDS, "--slice", "v6e-5"], "slice 'v6e-5' is not known"),
        ([*WORDS, "--optimizer.no_such_key", "1"], "no_such_key"),
        ([*WORDS, "--execute", "--output_dir", "runs"], "is lost with the machine"),
        ([*WORDS, "--execute", "--output_dir", "gs://BUCKET/runs"], "your bucket"),
        ([*WORDS, "--execute", "--trainer.checkpointer.temporary_base_path", "/tmp"], "is lost with the machine"),
        ([*WORDS, "--max_hours", "2", "--preemption.grace_seconds", "100"], "Set at most 75"),
        ([*WORDS, "--poll_seconds", "0"], "poll_seconds"),
        ([*WORDS, "--max_failures", "0"], "max_failures"),
        ([*WORDS, "--zone", "us-east5-b,us-east5"], "--zone is 'us-east5'"),
        ([*WORDS, "--zone", "us-east5-b,us-east5-a", "--data_disk", "d"], "--zone names several"),
        ([*WORDS, "--engine", "skypilot", "--max_hours", "2", "--keep"], "--keep is for --engine gcloud"),
        ([*WORDS, "--iris", "marin", "--labels", "a=b"], "--labels is for TPU VMs of your own"),
        ([*WORDS, "--iris", "marin", "--data_disk", "d"], "--data_disk is for TPU VMs of your own"),
        ([*WORDS, "--env_file", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line(world, capsys, words, message):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1
    assert world.calls() == []


def test_a_cap_in_money_holds_in_the_dearest_zone_and_a_grace_is_given(world, capsys):
    several = ["--zone", "us-central1-b,us-east5-b", "--spot", "--max_cost", "100", "--preemption.grace_seconds", "60"]
    assert main([*WORDS[:3], *several]) == 0
    # us-east5 has 1.215 dollars for a chip-hour, us-central1 0.544.
    assert f"at most {100 / (16 * 1.215):.2f} h with a slice, $100.00" in capsys.readouterr().out
    script = (world.checkout / "runs" / "soak_1" / "launch" / "give-back.sh").read_text()
    assert "seq 75" in script and "seq 40" not in script


def test_a_missing_gcloud_is_told(world, capsys, monkeypatch, tmp_path):
    programs = tmp_path / "only-git"
    programs.mkdir()
    (programs / "git").symlink_to(shutil.which("git"))
    monkeypatch.setenv("PATH", str(programs))
    assert main([*WORDS, "--execute"]) == 2
    assert "`gcloud` is not on PATH" in capsys.readouterr().err


def test_a_changed_checkout_is_not_sent_unasked(world, capsys):
    (world.checkout / "train_tomat_tpu.py").write_text("raise SystemExit\n")
    assert main([*WORDS, "--execute"]) == 2
    assert "changed since the last commit: 1 file (train_tomat_tpu.py)" in capsys.readouterr().err
    assert main(WORDS) == 0
    assert "# warning: changed since the last commit" in capsys.readouterr().out
    assert world.calls() == []


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text("slice: v6e-16\n")
    monkeypatch.chdir(tmp_path)
    assert main(WORDS) == 2
    assert "root of a checkout" in capsys.readouterr().err
    (tmp_path / "train_tomat_tpu.py").write_text("")
    assert main(WORDS) == 2
    assert "not a git checkout" in capsys.readouterr().err


def test_a_name_that_another_run_has_is_refused_before_anything_is_paid(world, capsys):
    run = world.folder / "buckets" / "bucket" / "runs" / "soak_1"
    (run / "checkpoints" / "step-3").mkdir(parents=True)
    config = load_config("run.yaml").to_dict()
    words = [*WORDS, "--execute", "--max_hours", "0.01"]  # what comes after is refused, too
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(words) == 2 and "raise --max_hours" in capsys.readouterr().err
    config["optimizer"]["learning_rate"] = 0.5
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(words) == 2
    assert "another configuration: 1 key (optimizer.learning_rate); give another --run_name" in capsys.readouterr().err
    assert world.verbs() == [] and world.packs() == []


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            LOGIN,
            "cannot prompt during non-interactive execution.. Run `gcloud auth login`; nothing",
        ),
        (DENIED, "[core/account] property.. Check the bucket and your access to it; nothing was started"),
        (NO_BUCKET.errors, "gs://b not found: 404.. Check the bucket and your access to it; nothing was started"),
    ],
)
def test_a_bucket_that_is_not_to_be_had_is_one_line_before_anything_is_paid(world, capsys, said, told):
    world.answer("storage", *[said.partition(") ")[2]] * 3)  # is the name taken; is there a launch; take the pack
    assert main([*WORDS, "--execute"]) == 2
    error = capsys.readouterr().err
    assert told in error and error.startswith("error: ") and error.count("\n") == 1
    assert world.verbs() == [] and world.packs() == []


def test_what_gcloud_says_is_shown_as_it_is(world, capfd):
    """A slice is paid for by then: brackets in an answer must not end the process that gives it back."""
    world.answer("create", "RESOURCE_EXHAUSTED: [/red] in [link=x]a[bold]b[/x]")
    world.behave(0)
    words = [*WORDS, "--slice", "v6e-4", "--poll_seconds", "0.1", "--backoff_seconds", "0.01"]
    assert main([*words, "--execute", "--json", "report.json"]) == 0
    assert "[/red] in [link=x]a[bold]b[/x]" in "".join(capfd.readouterr().out.splitlines())
    assert world.machines() == []
