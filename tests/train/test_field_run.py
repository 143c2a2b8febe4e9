"""A run of a field model: it learns, resumes with its statistics, predicts, and refuses what does not go with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from run_facts import assert_same_model, losses
from tiny_run import TINY_FIELD

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import load_stored
from tomat.data.density.outputs import write_density
from tomat.model.field import FieldModel
from tomat.predict.inference.predictor import load
from tomat.train.run import train
from tomat.train.settings.config import TrainConfig, load_config


def small(folder: Path, *words: str) -> TrainConfig:
    return load_config("demo", [*TINY_FIELD, "--output_dir", str(folder), *words])


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


def test_an_atom_without_room_is_said_with_what_is_needed(tmp_path):
    with pytest.raises(TomatError, match=r"32 voxels of .* have \d+ atoms near them .* set it to \d+ or more"):
        train(small(tmp_path, "--model.max_atoms", "16"))
