"""`tomat page` as it is typed."""

import os
import webbrowser
from pathlib import Path

from forked import Forked
from html_reader import read_page
from reported import reported

from tomat.app.cli import main

BEFORE = Path(__file__).parents[1] / "fixtures" / "before" / "run"
SWEEP = Path(__file__).parents[2] / "docs" / "tracking" / "sweeps" / "mfu-200m.json"


def test_the_page_is_written_reported_and_shown(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    page = tmp_path / "pages" / "sweep.html"
    found = reported(tmp_path, "page", SWEEP, "--output", page, "--open")
    assert (found["page_bytes"], found["kind"]) == (page.stat().st_size, "sweep of plans")
    assert opened == [page.as_uri()] and str(page) in capsys.readouterr().out
    read_page(page.read_text())
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert main(["page", str(SWEEP), "--output", str(page), "--open"]) == 2
    assert "no browser was found" in capsys.readouterr().err
    for flag in (["--species", "Si"], ["--accept", "atoms"]):
        assert main(["page", str(SWEEP), "--output", str(page), *flag]) == 2
        assert "are for a prediction or a density" in capsys.readouterr().err


def test_a_run_in_a_bucket_has_a_page(bucket, tmp_path):
    page = tmp_path / "run.html"
    for path in (path for path in BEFORE.rglob("*") if path.is_file()):
        bucket.put("bucket", f"runs/a/{path.relative_to(BEFORE)}", path.read_bytes())
    process = Forked("page", "gs://bucket/runs/a", "--output", page, env={**os.environ, **bucket.environment})
    assert process.wait(120) == 0, process.said()
    text = read_page(page.read_text()).text
    assert "gs://bucket/runs/a" in text and "train/loss" in text and "are not fetched" in text
