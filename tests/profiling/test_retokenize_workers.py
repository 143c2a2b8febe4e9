import os
from functools import partial

import pytest
import retokenize_workers
import tokenize_speed
from reported import reported
from retokenize_workers import build_parser

from tomat.data.tokens.pipeline.config import RetokenizeConfig

TWO_CORES = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


@pytest.mark.slow
@pytest.mark.skipif(not TWO_CORES, reason="needs two cores")
def test_two_workers_stand_beside_one_and_what_the_machine_gives(tmp_path, monkeypatch):
    for turn in ("UNIT_MATERIALS", "SEARCHES"):  # a hundredth of their seconds
        monkeypatch.setattr(retokenize_workers, turn, getattr(retokenize_workers, turn) // 100)
    monkeypatch.setattr(tokenize_speed, "RetokenizeConfig", partial(RetokenizeConfig, bins=64))
    monkeypatch.setattr(retokenize_workers, "LEAST_MATERIALS", 2)
    figures = reported(tmp_path, "--materials", 2, "--rounds", 1, "--folder", tmp_path, parser=build_parser())
    rates = figures["two_workers_patches_per_second"] / figures["one_worker_patches_per_second"]
    assert figures["two_workers_over_one_ratio"] == pytest.approx(rates)
    # Wide, since other processes may take a core meanwhile; two cores give no more than twice one.
    assert 0.5 < figures["two_processes_ceiling_ratio"] < 3 and 0 < figures["free_worker_cores"] < 2.1
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
