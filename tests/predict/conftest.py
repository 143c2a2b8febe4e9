"""The run that all tests of predictions share."""

from pathlib import Path

import pytest
from memory_back import give_back
from shared_folder import alone, shared_folder
from tiny_run import DEMO, tiny_run

from tomat.train.run import train
from tomat.train.settings.config import load_config

UNROLLED = ("--model.scan_layers", "false")
"""Layers that Haliax cannot read from named arrays."""


@pytest.fixture(scope="session")
def run_words():
    """Words of the run for another folder of runs."""
    return lambda folder: tiny_run(3, 100, "--output_dir", str(folder), *UNROLLED, atoms=True)


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory, run_words) -> Path:
    """A run of three steps: it predicts little better than the promolecule. Whichever worker is first trains it."""
    folder = shared_folder(tmp_path_factory, "predicting-runs")
    with alone(folder):
        if not (folder / "demo").exists():
            train(load_config(DEMO, run_words(folder)))
            give_back(compiled=True)  # before the first test compiles two predictors on top: 0.6 GB more than the floor
    return folder / "demo"
