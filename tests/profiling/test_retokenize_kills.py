"""What the kills must not change."""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import psutil
import pytest
import retokenize_kills
from reported import reported
from retokenize_kills import build_parser, workers_of

from tomat.app.cli import main


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(tmp_path):
    figures = reported(tmp_path, "--kill_runs", 1, "--folder", tmp_path, parser=build_parser())
    assert figures["kill_runs_byte_identical"] == 1 and figures["unbroken_run_seconds"] > 0
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_worker_is_a_process_of_the_pool():
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(time.sleep, (0.1, 0.1)))
        driver, workers = psutil.Process(), set(pool._processes)
        assert {each.pid for each in workers_of(driver)} == workers < {each.pid for each in driver.children()}


def test_an_unbroken_run_that_fails_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(retokenize_kills, "retokenize_command", lambda output: ["false"])
    assert main(["--folder", str(tmp_path)], build_parser()) == 2
    assert capsys.readouterr().err == "error: the unbroken run failed with status 1, as is said above.\n"
