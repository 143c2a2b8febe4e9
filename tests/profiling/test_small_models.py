"""The page of small models: what was measured stands beside what it is compared with."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from fitted_codec import fitted_codec
from small_models import build_parser, keep_named, small_model, write_small_models_page
from tiny_run import DEMO, tiny_run

from tomat.app.cli import main
from tomat.app.weights_verbs import PARTS
from tomat.base.errors import TomatError
from tomat.data.codec.files import write_codec
from tomat.predict.weights.arrays import named_arrays
from tomat.predict.weights.folder import Compression, write_weights
from tomat.train.restore import model_initialiser
from tomat.train.settings.config import load_config


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A model whole, in 3 bits, and with its MLPs in 2, each as if it had been measured."""
    place = tmp_path_factory.mktemp("small")
    run = place / "run"
    run.mkdir()
    config = load_config(DEMO, tiny_run(1, 1))
    write_codec(fitted_codec(64, np.random.default_rng(0).random(10_000, np.float32)), run / "codec.json")
    (run / "config.yaml").write_text(yaml.safe_dump(config.to_dict()))
    arrays = named_arrays(model_initialiser(config, jax.random.PRNGKey(0))())
    found = {}
    three, mixed = (
        Compression("lut", 128, {**dict.fromkeys(PARTS, bits), "mlp": mlp}) for bits, mlp in ((3, 3), (4, 2))
    )
    for number, (name, compression) in enumerate({"whole": None, "three": three, "mixed": mixed}.items()):
        found[name] = place / name
        write_weights(run, arrays, 1, "of the last step", found[name], compression=compression)
        report = {
            "over_materials": {"teacher_forced_nmae_median": {"median": 0.02}},
            "free_running": {
                "over_materials": {"free_running_nmae": {"median": 0.025 * (1 + number)}},
                "materials": [{"seconds": seconds} for seconds in (1.0, 2.0, 9.0)],
            },
        }
        (found[name] / "evaluation.json").write_text(json.dumps(report))
    return found


def test_sizes_and_errors_stand_beside_those_of_the_first(folders, tmp_path):
    whole, three, mixed = (small_model(folder) for folder in folders.values())
    assert (whole.bits, three.bits, mixed.bits) == ("32", "3", "mlp 2, rest 4")
    assert whole.disk_bytes == whole.memory_bytes == whole.float32_bytes == three.float32_bytes
    for few in (three, mixed):
        assert 3 / 32 < few.disk_bytes / few.float32_bytes < 5 / 32
        assert few.memory_bytes == pytest.approx(few.disk_bytes, rel=0.02)
    assert three.seconds_per_cell == 2.0 and three.materials == 3
    kept = keep_named(folders["three"], three, tmp_path)
    assert kept.name == "three-nmae5.00" and (kept / "model.safetensors").is_file()
    assert keep_named(folders["three"], three, tmp_path) == kept
    page = tmp_path / "small.md"
    write_small_models_page([whole, three, mixed], page, "Measured nowhere.")
    text = page.read_text()
    assert "| 3 | lut |" in text and "| 5.00 % | 2.00 |" in text and "Measured nowhere." in text
    page.write_text(text.replace("<!-- What follows", "Mine. <!-- What follows"))
    write_small_models_page([whole, three], page, "")
    assert "Mine." in page.read_text() and "mlp 2" not in page.read_text()


def test_what_was_not_measured_is_said(tmp_path):
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(TomatError, match="evaluation.json is damaged: .*--free_running"):
        small_model(tmp_path)
    with pytest.raises(TomatError, match="is missing: `tomat eval --run"):
        small_model(tmp_path / "nothing")


def test_the_median_of_an_even_number_of_cells_lies_between_two(folders, tmp_path):
    folder = shutil.copytree(folders["three"], tmp_path / "three")
    report = json.loads((folder / "evaluation.json").read_text())
    report["free_running"]["materials"].pop()
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert small_model(folder).seconds_per_cell == 1.5


def test_errors_over_other_materials_are_no_comparison(folders, tmp_path, capsys):
    folder = shutil.copytree(folders["three"], tmp_path / "three")
    report = json.loads((folder / "evaluation.json").read_text())
    report["free_running"]["materials"].pop()
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert main(["--run", str(folders["whole"]), "--folders", str(folder)], build_parser()) == 2
    assert f"three is of 2 materials, that of {folders['whole']} of 3; expected the same" in capsys.readouterr().err
    report["free_running"]["materials"].append({"material_id": "GaP", "seconds": 1.0})
    (folder / "evaluation.json").write_text(json.dumps(report))
    assert main(["--run", str(folders["whole"]), "--folders", str(folder)], build_parser()) == 2
    assert "do not both have GaP; expected the same materials" in capsys.readouterr().err
