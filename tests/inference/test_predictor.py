"""A run of a few steps as a predictor, both ways; half a minute, most of it training and compiling."""

from pathlib import Path

import numpy as np
import pytest
from tiny_run import DEMO, tiny_run

from tomat.base.errors import TomatError
from tomat.density.crystal import Crystal
from tomat.density.demo.embedded import demo_materials, load_demo
from tomat.inference import load, predictor
from tomat.inference.choice import Choice
from tomat.inference.predictor import RunPredictor
from tomat.inference.trained import LoadedRun, load_trained
from tomat.training.config import load_config
from tomat.training.run import train

WORDS = tiny_run(
    3, 3, "--model.environment.channels", "4", "--model.environment.max_atoms", "144", "--density_dropout", "0.5"
)
SHAPE = (9, 8, 7)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return train(load_config(DEMO, [*WORDS, "--output_dir", str(tmp_path_factory.mktemp("runs"))])).run_dir


@pytest.fixture(scope="module")
def run(run_dir) -> LoadedRun:
    return load_trained(run_dir)


@pytest.fixture(scope="module")
def crystal() -> Crystal:
    return Crystal.of(load_demo(demo_materials("train")[0].material_id))


def test_samples_of_a_structure_have_a_mean_and_a_spread_and_can_be_had_again(run_dir, crystal, capsys):
    drawn = load(str(run_dir), decoder="autoregressive", samples=3, seed=4)
    told = []
    first = drawn.predict(crystal, SHAPE, electrons=None, on_patches=lambda *each: told.append(each))
    assert told[-1] == (12, 12), "4 patches, 3 samples"
    assert capsys.readouterr().out.count("autoregressive decoder: 32 patches of 343 voxels at a time on 2 devices") == 1
    assert first.spread is not None and first.spread.shape == SHAPE and (first.spread > 0).any()
    # The same samples one by one, and their values in the codec's own bins.
    bins = run_values(drawn)
    singles = [RunPredictor(drawn.run, 1, "autoregressive", Choice("sampled", 1, 1.0, 4))]
    one = singles[0].predict(crystal, SHAPE, electrons=None)
    assert one.spread is None and np.isin(one.rho, bins).all()
    again = drawn.predict(crystal, SHAPE, electrons=10.0)
    scale = 10.0 / first.electrons_before
    np.testing.assert_allclose(again.rho, first.rho * scale, rtol=1e-5)
    np.testing.assert_allclose(again.spread, first.spread * scale, rtol=1e-5)
    assert "3 samples, temperature 1, seed 4" in drawn.identity


def run_values(drawn: RunPredictor) -> np.ndarray:
    codec = drawn.run.codec
    return codec.decode(np.arange(codec.n_density_tokens), "mean").astype(np.float32)


def test_both_decoders_begin_with_the_same_voxel_and_fit_their_batch_into_memory(run, crystal, monkeypatch, capsys):
    median = RunPredictor(run, 1, "autoregressive").predict(crystal, SHAPE, electrons=None)
    assert np.isin(median.rho, run_values(RunPredictor(run, 1, "autoregressive"))).all() and median.spread is None
    parallel = RunPredictor(run)
    plenty = parallel.predict(crystal, SHAPE, electrons=None)
    said = capsys.readouterr().out
    assert "parallel decoder: 32 patches" in said
    monkeypatch.setattr(predictor, "free_bytes", lambda: 12_000_000)
    scarce = RunPredictor(run)
    few = scarce.predict(crystal, SHAPE, electrons=None)
    assert "parallel decoder: 32 patches" not in capsys.readouterr().out
    np.testing.assert_allclose(few.rho, plenty.rho, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(predictor, "free_bytes", lambda: 1000)
    with pytest.raises(TomatError, match="decoding 2 patches at a time takes"):
        RunPredictor(run).predict(crystal, SHAPE, electrons=None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (dict(samples=2), "samples is for the autoregressive decoder"),
        (dict(decoder="autoregressive", choice="median", samples=2), "only choice 'sampled'"),
        (dict(decoder="autoregressive", rounds=2), "rounds is 2"),
        (dict(decoder="serial"), "decoder is 'serial'"),
        (dict(decoder="autoregressive", temperature=0.0), "temperature 0.0"),
    ],
)
def test_words_that_do_not_go_together_are_refused(run_dir, words, message):
    with pytest.raises(TomatError, match=message):
        load(str(run_dir), **words)
