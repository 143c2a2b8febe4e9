"""`tomat doctor`, by a wheel that holds the model of the package: as good as it says on what it has not seen."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import cast

from hatchling.builders.wheel import WheelBuilder

from tomat.base.layout import CONFIG_FILE, PACKAGED_MODEL
from tomat.model.field import FieldConfig
from tomat.predict.weights.record import ARRAYS_FILE
from tomat.train.settings.config import load_config, recorded_config

ROOT = Path(__file__).parents[2]


def test_a_wheel_predicts_a_held_out_cell(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "315532800")  # the first second that ZIP can say
    wheel = next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))
    place = str(tmp_path / "installed")
    zipfile.ZipFile(wheel).extractall(place)
    code = f"import sys; sys.path.insert(0, {place!r}); from tomat.app.cli import main; status = main(); "
    # Levanter's decoders, which a field model does not need, import it: an eighth of a prediction's time.
    code += "sys.exit(status or 3 * ('transformers' in sys.modules))"
    words = [sys.executable, "-c", code, "doctor", "--json", "found.json"]
    # As users compile: a whole cell that is predicted takes several times as long as `conftest.py` has it.
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["place"].startswith(place) and found["packages"]["jax"] and found["devices"]
    # The sum of atoms has 7.6 % there.
    assert 0.001 < found["self_test_nmae"] < 0.012


def test_it_is_of_the_recipe_that_ships_and_small():
    assert (PACKAGED_MODEL / ARRAYS_FILE).stat().st_size < 2e6
    kept, recipe = recorded_config(PACKAGED_MODEL / CONFIG_FILE), load_config(ROOT / "configs/train/packaged.yaml", [])
    assert cast(FieldConfig, kept.model).members == cast(FieldConfig, recipe.model).members
    assert (kept.data, kept.loss, kept.optimizer) == (recipe.data, recipe.loss, recipe.optimizer)
