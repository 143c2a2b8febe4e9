"""A run of a field model: it learns, resumes with its statistics, predicts, and refuses what does not go with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_facts import arrays, assert_same_model, losses
from tiny_run import TINY_FIELD, tiny_run

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import compounds_of, load_stored
from tomat.data.density.outputs import write_density
from tomat.model.field import FieldModel
from tomat.predict.inference.predictor import load
from tomat.train.datasets import open_datasets
from tomat.train.origins import Continuation
from tomat.train.run import train
from tomat.train.settings.config import TrainConfig, load_config

KEPT = ("Si", "Mg2Si", "MgS", "SiO2", "GaAs")
"""Of which the valences of Mg, S and O follow, whose compounds are predicted."""


def without(*compounds: str) -> tuple[str, str]:
    """Words for a sixth of the training cells, whose promolecule is fitted in seconds, less those compounds."""
    names = [name for name in compounds_of(["crystals"]) if name not in KEPT or name in compounds]
    return "--data.left_out", f"[{', '.join(names)}]"


def small(folder: Path, *words: str) -> TrainConfig:
    return load_config("demo", [*TINY_FIELD, *without(), "--output_dir", str(folder), *words])


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return train(small(tmp_path_factory.mktemp("field"))).run_dir


def test_it_begins_as_the_sum_of_atoms_and_resumes_with_its_statistics(run, tmp_path):
    found = losses(run)
    assert len(found) == 8 and 0.01 < found[0] < 0.15
    model = load(run).run.model
    assert isinstance(model, FieldModel)
    statistics = model.members[0].norm
    assert np.abs(statistics.mean.array).max() > 0.1 and (statistics.deviation.array != 1).all()
    shutil.copytree(run, tmp_path / "demo")
    shutil.rmtree(tmp_path / "demo" / "checkpoints" / "step-7")
    train(small(tmp_path))
    assert losses(tmp_path / "demo")[:8] == found
    assert_same_model(tmp_path / "demo", run)


def test_an_average_of_its_weights_has_its_statistics(run, tmp_path):
    """What predicts is the average, which must not begin with the norm of a model that knows nothing."""
    averaged = train(small(tmp_path, "--trainer.model_averaging", "{type: ema, beta: 0.999}")).run_dir
    norm, expected = (load(each).run.model.members[0].norm for each in (averaged, run))
    for name in ("mean", "deviation"):
        np.testing.assert_allclose(getattr(norm, name).array, getattr(expected, name).array, rtol=1e-3, atol=1e-3)


def test_it_predicts_and_is_evaluated_on_whole_cells(run, tmp_path, capsys):
    truth = load_stored("MgS-rock-salt-ideal")
    prediction = load(run).predict(truth.structure, truth.grid_shape)
    assert prediction.electron_count == pytest.approx(8.0, abs=1e-4)
    error = float(np.abs(prediction.rho - truth.rho).sum() / truth.rho.sum())
    assert error < 0.06
    weights = tmp_path / "weights"
    assert main(["export", "--run", str(run), "--output", str(weights)]) == 0
    again = load(weights).predict(truth.structure, truth.grid_shape)
    np.testing.assert_allclose(again.rho, prediction.rho, rtol=1e-5)
    words = ["eval", "--run", str(run), "--input", str(tmp_path / "cell.cube")]
    words += ["--json", str(tmp_path / "figures.json")]
    write_density(truth, tmp_path / "cell.cube", "cube")
    assert main(words) == 2
    assert "reads no density" in capsys.readouterr().err
    assert main([*words, "--free_running"]) == 0
    material = json.loads((tmp_path / "figures.json").read_text())["free_running"]["materials"][0]
    assert material["free_running_nmae"] == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--data.layout", "v3-p7"), "data.layout is v3-p7"),
        (("--loss.kind", "crps"), "loss.kind is crps"),
        (("--density_dropout", "0.5"), "density_dropout is set"),
        (("--model.max_l", "4"), "max_l"),
    ],
)
def test_what_does_not_go_with_it_is_refused(words, said):
    with pytest.raises(TomatError, match=said):
        load_config("demo", list(words))


def decoder(folder: Path, *words: str, members: int = 2) -> TrainConfig:
    """That begins from the field model of `run`, with weight decay."""
    field = f"{{channels: 2, products: 2, hidden_dim: 16, hidden_layers: 1, descriptors: 6, members: {members}}}"
    return load_config("demo-decoder", [
        *tiny_run(4, 2, "--output_dir", str(folder), "--optimizer.weight_decay", "0.5", *words, atoms=True),
        "--model.field", field,
    ])  # fmt: skip


def test_a_decoder_begins_from_it_and_leaves_it_as_it_is(run, tmp_path):
    """Also where it is resumed, exported and used."""
    # Of fewer compounds a fit gives another promolecule: the data are written with that of the field model.
    config, known = decoder(tmp_path, *without("GaAs")), load(run).run.model
    train(config, Continuation(warm_start=str(run)))
    trained = load(tmp_path / "demo")
    assert all(map(np.array_equal, arrays(trained.run.model.field), arrays(known)))
    shutil.rmtree(tmp_path / "demo" / "checkpoints" / "step-3")
    shutil.rmtree(tmp_path / "demo" / "data")  # as where another machine goes on with it
    first = losses(tmp_path / "demo")
    train(config)
    assert losses(tmp_path / "demo") == first
    oxide, grid_shape = load_stored("MgO-rock-salt-ideal").structure, (16, 16, 16)
    prediction, of_field = (each.predict(oxide, grid_shape) for each in (trained, load(run)))
    assert np.abs(prediction.rho - of_field.rho).sum() / of_field.rho.sum() < 0.03
    assert main(["export", "--run", str(tmp_path / "demo"), "--output", str(tmp_path / "weights")]) == 0
    again = load(tmp_path / "weights").predict(oxide, grid_shape)
    np.testing.assert_allclose(again.rho, prediction.rho, rtol=1e-4)


def test_a_decoder_is_refused_without_weights_and_with_those_of_another_model_or_promolecule(run, tmp_path):
    with pytest.raises(TomatError, match="model.field is set, and nothing gives it weights: add --warm_start"):
        train(decoder(tmp_path))
    with pytest.raises(TomatError, match=r"another model:\n  model.field.members: 2 -> 3\nSet the old values"):
        train(decoder(tmp_path, members=3), Continuation(warm_start=str(run)))
    open_datasets(other := decoder(tmp_path, *without("GaAs")), tmp_path / "demo")
    with pytest.raises(TomatError, match="has learnt with the promolecule"):
        train(other, Continuation(warm_start=str(run)))
    with pytest.raises(TomatError, match="model.field is set and model.environment is not"):
        decoder(tmp_path, "--model.environment", "null", "--density_dropout", "0")


def test_an_atom_without_room_is_said_with_what_is_needed(tmp_path):
    with pytest.raises(TomatError, match=r"32 voxels of .* have \d+ atoms near them .* set it to \d+ or more"):
        train(small(tmp_path, "--model.max_atoms", "16"))
