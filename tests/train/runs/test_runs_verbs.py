"""`tomat runs` on folders and on a bucket."""

import json
import os
import shutil

import pytest
from forked import Forked
from reported import reported

from tomat.app.cli import main


@pytest.fixture
def two_runs(make_run):
    make_run("a", steps=20, saved=(19,))
    make_run("b", partial=(12,), events=({"event": "start", "step": 0, "configuration": "abc"},))
    return make_run("c", steps=3, saved=()).parent


def test_the_verbs_show_what_is_there(two_runs, tmp_path, capsys):
    runs = reported(tmp_path, "runs", "list", two_runs)["runs"]
    printed = capsys.readouterr().out
    assert "finished" in printed and "20 of 20" in printed and "10 of 20" in printed
    assert [(run["name"], run["state"], run["last_whole_step"], run["partial_checkpoints"]) for run in runs] == [
        ("a", "finished", 19, 0),
        ("b", "open", 9, 1),
        ("c", "open", None, 0),
    ]
    shown = reported(tmp_path, "runs", "show", two_runs / "b")
    assert "never completed" in " ".join(capsys.readouterr().out.split())
    assert shown["configuration_hashes"] == ["abc"] and [item["step"] for item in shown["checkpoints"]] == [4, 9, 12]


def test_verify_says_it_with_its_status(two_runs, capsys):
    assert main(["runs", "verify", str(two_runs)]) == 0
    lines = (two_runs / "b" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (two_runs / "b" / "metrics.jsonl").write_text("".join(lines[:4] + lines[5:]))
    assert main(["runs", "verify", str(two_runs)]) == 1
    printed = capsys.readouterr().out
    assert "damaged b" in printed and "lacks step 4" in printed and "sound a" in printed


def test_places_that_are_none_and_files_that_cannot_be_read_are_one_line(two_runs, capsys):
    runs, metrics = str(two_runs), two_runs / "a" / "metrics.jsonl"
    metrics.unlink()
    metrics.mkdir()
    for verb, place, said in (
        ("list", runs, "metrics.jsonl"),
        ("list", f"{runs}/nothing", "nothing does not exist"),
        ("verify", f"{runs}/nothing", "nothing does not exist"),
        ("list", str(metrics), "holds no run"),
        ("show", runs, "is a folder of runs, not a run"),
    ):
        assert main(["runs", verb, place]) == 2
        told = capsys.readouterr().err
        assert told.startswith("error: ") and said in told and told.count("\n") == 1


def test_runs_in_a_bucket_read_the_same(two_runs, bucket, tmp_path):
    """In processes of their own: gcsfs and TensorStore read the service's address once."""
    for path in two_runs.rglob("*"):
        if path.is_file():
            bucket.put("bucket", f"runs/{path.relative_to(two_runs)}", path.read_bytes())

    def runs(*words: str) -> Forked:
        process = Forked("runs", *words, env={**os.environ, **bucket.environment})
        process.wait()
        return process

    listed = runs("list", "gs://bucket/runs", "--json", str(tmp_path / "bucket.json"))
    assert listed.returncode == 0, listed.said()
    here = reported(tmp_path, "runs", "list", two_runs)["runs"]
    there = json.loads((tmp_path / "bucket.json").read_text())["runs"]
    for run in (*here, *there):
        del run["url"], run["written_seconds_utc"], run["state_detail"]
    assert here == there
    damaged = next(name for name in bucket.objects if "/a/checkpoints/step-19/d/" in name)
    bucket.remove(damaged)
    verified = runs("verify", "gs://bucket/runs/a")
    assert verified.returncode == 1 and "step-19" in verified.said()


def test_the_log_becomes_a_page(two_runs, tmp_path, capsys):
    entries = reported(tmp_path, "runs", "log", two_runs)["entries"]
    assert "3 runs, 0 measured rows" in capsys.readouterr().out
    assert "b" in (two_runs / "log.md").read_text()
    assert sorted(entry["name"] for entry in entries) == ["a", "b", "c"]
    assert main(["runs", "log", "memory://bucket/none"]) == 2
    assert "say where to write the page with --output" in capsys.readouterr().err


def test_a_copy_of_a_run_is_told_from_it(two_runs, tmp_path, capsys):
    shutil.copytree(two_runs / "b", two_runs / "b-copy")
    (two_runs / "b-copy" / "metrics.jsonl").write_text("")
    names = ["a", "b", "b (in b-copy)", "c"]
    for verb, key in (("list", "runs"), ("log", "entries")):
        assert sorted(one["name"] for one in reported(tmp_path, "runs", verb, two_runs)[key]) == names
    assert main(["runs", "verify", str(two_runs)]) == 1
    assert "damaged b (in b-copy):" in capsys.readouterr().out
    assert "b (in b-copy)" in (two_runs / "log.md").read_text()


def test_runs_are_compared(two_runs, tmp_path, capsys):
    page = tmp_path / "ab.md"
    report = reported(tmp_path, "runs", "compare", two_runs / "a", two_runs / "b", "--output", page)
    assert "training loss of 10 common steps" in capsys.readouterr().out
    assert report["common_steps"] == 10 and "# a against b" in page.read_text()
    assert main(["runs", "compare", str(two_runs / "a"), str(two_runs / "d")]) == 2
    assert "config.yaml does not exist" in capsys.readouterr().err
