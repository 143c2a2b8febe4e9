"""What the kills must not change."""

import json

import pytest
from retokenize_kills import build_parser

from tomat.app.cli import main


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(tmp_path):
    words = ["--kill_runs", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "k.json")]
    assert main(words, build_parser()) == 0
    figures = json.loads((tmp_path / "k.json").read_text())
    assert figures["kill_runs_byte_identical"] == 1 and figures["unbroken_run_seconds"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
