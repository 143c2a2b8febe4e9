"""What the kills must not change."""

import pytest
from reported import reported
from retokenize_kills import build_parser


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(tmp_path):
    figures = reported(tmp_path, "--kill_runs", 1, "--folder", tmp_path, parser=build_parser())
    assert figures["kill_runs_byte_identical"] == 1 and figures["unbroken_run_seconds"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
