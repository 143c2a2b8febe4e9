"""A run of a model with statistics, a field model first: it learns, resumes with them, predicts, and is refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_facts import assert_same_model, losses
from tiny_run import DEMO, TINY_FIELD, tiny_run

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import load_stored
from tomat.data.density.outputs import write_density
from tomat.model.decoder import DensityDecoder
from tomat.model.field import FieldModel
from tomat.predict.inference.predictor import load
from tomat.predict.weights.arrays import check_arrays, named_arrays
from tomat.train.run import train
from tomat.train.settings.config import TrainConfig, load_config
from tomat.train.settings.meanings import changed_keys


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


def test_a_decoder_with_angles_keeps_its_statistics_from_start_to_resume_and_export(tmp_path):
    words = [*tiny_run(4, 2, atoms=True), "--trainer.model_averaging", "{type: ema, beta: 0.9}"]
    config = load_config(DEMO, [*words, "--model.environment.max_l", "3", "--output_dir", str(tmp_path / "whole")])
    run = train(config).run_dir
    averaged = load(run).run
    assert isinstance(averaged.model, DensityDecoder) and averaged.model.environment is not None
    statistics = averaged.model.environment.norm
    assert statistics is not None and (np.asarray(statistics.deviation.array) != 1).all()
    shutil.copytree(run, tmp_path / "again" / "demo")
    shutil.rmtree(tmp_path / "again" / "demo" / "checkpoints" / "step-3")
    train(replace(config, output_dir=str(tmp_path / "again")))
    assert losses(tmp_path / "again" / "demo")[:4] == losses(run)
    assert_same_model(tmp_path / "again" / "demo", run)
    shapes = {name: array.shape for name, array in named_arrays(averaged.model).items()}
    assert shapes.pop("environment.norm.mean")
    with pytest.raises(TomatError, match=r"environment.norm.mean is not there; the model .* has \["):
        check_arrays(shapes, averaged.config)
    before, now = (load_config(DEMO, words).to_dict() for _ in range(2))
    for key in ("max_l", "products", "descriptors"):
        del before["model"]["environment"][key]
    assert not list(changed_keys(before, now)), "runs of before go on"


def test_it_predicts_and_is_evaluated_on_whole_cells(run, tmp_path, capsys):
    truth = load_stored("MgO-rock-salt-ideal")
    prediction = load(run).predict(truth.structure, truth.grid_shape)
    assert prediction.electron_count == pytest.approx(8.0, abs=1e-4)
    error = float(np.abs(prediction.rho - truth.rho).sum() / truth.rho.sum())
    assert error < 0.06
    weights = tmp_path / "weights"
    assert main(["export", "--run", str(run), "--output", str(weights)]) == 0
    again = load(weights).predict(truth.structure, truth.grid_shape)
    np.testing.assert_allclose(again.rho, prediction.rho, rtol=1e-5)
    words = [
        "eval",
        "--run",
        str(run),
        "--input",
        str(tmp_path / "cell.cube"),
        "--json",
        str(tmp_path / "figures.json"),
    ]

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
