import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import retokenize_workers
from retokenize_workers import build_parser

from tomat.app.cli import main
from tomat.data.tokens.pipeline.config import RetokenizeConfig
from tomat.measure.bench import tokenize

SCRIPTS = Path(__file__).parents[2] / "profiling"
TWO_CORES = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


@pytest.mark.slow
@pytest.mark.skipif(not TWO_CORES, reason="needs two cores")
def test_two_workers_stand_beside_one_and_what_the_machine_gives(tmp_path, monkeypatch):
    for turn in ("UNIT_MATERIALS", "SEARCHES"):  # a hundredth of their seconds
        monkeypatch.setattr(retokenize_workers, turn, getattr(retokenize_workers, turn) // 100)
    monkeypatch.setattr(tokenize, "RetokenizeConfig", partial(RetokenizeConfig, bins=64))
    words = ["--materials", "12", "--rounds", "1", "--folder", str(tmp_path), "--json", str(tmp_path / "b.json")]
    assert main(words, build_parser()) == 0
    figures = json.loads((tmp_path / "b.json").read_text())
    rates = figures["two_workers_patches_per_second"] / figures["one_worker_patches_per_second"]
    assert figures["two_workers_over_one_ratio"] == pytest.approx(rates)
    # Wide, since other processes may take a core meanwhile; two cores give no more than twice one.
    assert 0.5 < figures["two_processes_ceiling_ratio"] < 3 and 0 < figures["free_worker_cores"] < 2.1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


_AFFINITIES = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
from retokenize_workers import _hold_to
with ThreadPoolExecutor(1) as before, ThreadPoolExecutor(1) as after:
    before.submit(int).result()
    _hold_to({int(sys.argv[1])})
    print(os.sched_getaffinity(0), *(each.submit(os.sched_getaffinity, 0).result() for each in (before, after)))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not bind threads to cores")
def test_a_worker_is_held_to_its_cores_with_the_threads_it_has_and_those_it_starts():
    core = max(os.sched_getaffinity(0))
    # In a process of its own, started where the script lies: this one keeps its cores.
    words = [sys.executable, "-c", _AFFINITIES, str(core)]
    done = subprocess.run(words, check=True, capture_output=True, text=True, cwd=SCRIPTS)
    assert done.stdout.split() == [f"{{{core}}}"] * 3
