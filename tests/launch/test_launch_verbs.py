"""`tomat launch` refuses what it cannot do, before anything is paid for."""

import shutil

import pytest

from tomat.app.cli import main

WORDS = ["launch", "--config_path", "run.yaml", "--zone", "us-east5-b"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch", "--config_path", "run.yaml"], "--zone is missing"),
        ([*WORDS, "--slice", "null"], "names no slice"),
        ([*WORDS, "--slice", "v6e-5"], "slice 'v6e-5' is not known"),
        ([*WORDS, "--optimizer.no_such_key", "1"], "no_such_key"),
        ([*WORDS, "--execute", "--output_dir", "runs"], "goes with the machine"),
        ([*WORDS, "--execute", "--output_dir", "gs://BUCKET/runs"], "your bucket"),
        ([*WORDS, "--poll_seconds", "0"], "poll_seconds"),
        ([*WORDS, "--max_failures", "0"], "max_failures"),
        ([*WORDS, "--iris", "marin", "--labels", "a=b"], "--labels is for TPU VMs of your own"),
        ([*WORDS, "--iris", "marin", "--data_disk", "d"], "--data_disk is for TPU VMs of your own"),
        ([*WORDS, "--execute", "--data_disk", "d", "--output_dir", "gs://b/runs"], "--data_disk is 'd'; expected"),
        ([*WORDS, "--env_file", "nowhere"], "nowhere does not exist"),
    ],
)
def test_bad_input_is_one_line(world, capsys, words, message):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert message in told and told.startswith("error: ") and told.count("\n") == 1
    assert world.calls() == []


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
    assert "1 file(s) differ from the last commit" in capsys.readouterr().err
    assert main(WORDS) == 0
    assert "# warning: 1 file(s) differ" in capsys.readouterr().out


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text("slice: v6e-16\n")
    monkeypatch.chdir(tmp_path)
    assert main(WORDS) == 2
    assert "root of a checkout" in capsys.readouterr().err


def test_what_gcloud_says_is_shown_as_it_is(world, capfd):
    """A slice is paid for by then: brackets in an answer must not end the process that gives it back."""
    world.answer("create", "RESOURCE_EXHAUSTED: [/red] in [link=x]a[bold]b[/x]")
    world.behave(0)
    words = [*WORDS, "--slice", "v6e-4", "--poll_seconds", "0.1", "--backoff_seconds", "0.01"]
    assert main([*words, "--execute", "--json", "report.json"]) == 0
    assert "[/red] in [link=x]a[bold]b[/x]" in "".join(capfd.readouterr().out.splitlines())
    assert world.machines() == []
