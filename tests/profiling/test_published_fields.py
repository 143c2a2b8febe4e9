"""Published networks beside the demo, with another program in the place of their environment."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import published_fields
import pytest
from published_fields import build_parser, collect, curve_rows, score, write_cells, write_page

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import load_stored
from tomat.data.density.promolecule import Promolecule

STANDS_IN = f"""#!{sys.executable}
import json, sys
import numpy as np
job = json.load(open(sys.argv[2]))
name = job["output"] + "/" + job["model"] + "-" + job["target"]
if job["target"] == "density":
    sys.exit("it learns nothing")
with np.load(job["cells"]) as cells:
    held_out = [key for key in cells["keys"].tolist() if key.startswith("held_out/")]
    said = {{key[9:]: 3 * cells[key + "/sum_of_atoms"] for key in held_out}}
np.savez(f"{{name}}-{{job['cpu_seconds'][0]:g}}.npz", counts=np.array([7.5, 40]), **said)
about = {{"settings": {{}}, "parameters": 5, "packages": {{"torch": "2"}}, "curve": [[0.0, 1, 0.5], [7.5, 40, 0.1]]}}
json.dump(about, open(name + ".json", "w"))
"""


PROMOLECULE = Promolecule.load(Path(published_fields.__file__).parents[1] / "tomat/predict/packaged/promolecule.json")
CELLS = {
    "train": ["Si-diamond-ideal", "MgS-rock-salt-ideal"],
    "curve": ["LiF-rock-salt-supercell-of-16-atoms-rattled"],
    "held_out": ["MgO-rock-salt-ideal", "GaP-zinc-blende-ideal"],
}


@pytest.fixture(scope="module")
def cells(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("published") / "cells.npz"
    write_cells(file, PROMOLECULE, CELLS)
    return file


@pytest.fixture
def words(cells, tmp_path) -> list[str]:
    """A command line, with the checkout of the tests' own git in the place of both, and the cells there already."""
    for command in (["init", "-q"], ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m", "--allow-empty"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    python = tmp_path / "python"
    python.write_text(STANDS_IN)
    python.chmod(0o755)
    (tmp_path / "out").mkdir()
    shutil.copy(cells, tmp_path / "out")
    places = ["--python", str(python), "--output", str(tmp_path / "out"), "--times", "1", "3"]
    return ["--deepdft", str(tmp_path), "--charge3net", str(tmp_path), *places]


def test_cells_hold_no_density_that_is_predicted(cells):
    with np.load(cells) as stored:
        for part, names in CELLS.items():
            for name in names:
                grid, key = load_stored(name), f"{part}/{name}"
                assert key in stored["keys"] and np.array_equal(stored[f"{key}/lattice"], grid.lattice)
                assert stored[f"{key}/sum_of_atoms"].shape == grid.grid_shape
                here = {file.rpartition("/")[2] for file in stored.files if file.startswith(f"{key}/")}
                assert here >= {"numbers", "frac"} and ("rho" in here) == (part != "held_out") == (
                    "electrons" not in here
                )


def test_what_a_network_predicts_is_scored_as_tomat_scores_and_stands_beside_the_demo(words, tmp_path, capsys):
    demo = tmp_path / "evaluation.json"
    materials = [{"material_id": name, "free_running_nmae": 0.01} for name in CELLS["held_out"]]
    demo.write_text(json.dumps({"free_running": {"materials": materials}}))
    figures, page = tmp_path / "figures.json", tmp_path / "page.md"
    asked = ["--models", "deepdft-promolecule", "--demo", str(demo), "--json", str(figures), "--page", str(page)]
    assert main([*words, *asked], build_parser()) == 0, capsys.readouterr().err
    report = json.loads(figures.read_text())
    (model,) = report["models"].values()
    (result,) = model["results"]  # of two times one was reached
    assert (result["cpu_seconds"], result["steps"], model["parameters"]) == (7.5, 40, 5)
    # Three times the sum of atoms is the sum of atoms, once it has the electrons that it should.
    assert result["cells"] == pytest.approx(report["sum_of_atoms"]["cells"], rel=1e-4)
    text = page.read_text() + "\nOur words.\n"
    assert "| DeepDFT, PaiNN | sum of atoms x (1 + output) | 5 | 40 |" in text and "| the demo |" in text
    page.write_text(text)
    write_page(report, page, "")
    assert page.read_text() == text
    assert curve_rows(report["models"])[0] == (pytest.approx(0.75), 0.1)


def test_scores_are_scaled_to_the_electrons(cells, tmp_path):
    truths = {name: load_stored(name) for name in CELLS["held_out"]}
    volumes = {name: Crystal.of(truth).volume_a3 for name, truth in truths.items()}
    electrons = {name: float(truth.rho.mean(dtype=float)) * volumes[name] for name, truth in truths.items()}
    assert score({name: 5 * truth.rho for name, truth in truths.items()}, electrons)["worst"] < 1e-5
    shutil.copy(cells, tmp_path)
    found = collect(tmp_path, [1.0])
    assert found["models"] == {} and 0.01 < found["sum_of_atoms"]["median"] < found["sum_of_atoms"]["worst"] < 0.1


def test_a_training_that_fails_and_a_folder_that_is_no_checkout_are_one_line(words, tmp_path, capsys):
    assert main([*words, "--models", "charge3net-density"], build_parser()) == 2
    assert "charge3net-density stopped" in capsys.readouterr().err
    shutil.rmtree(tmp_path / ".git")
    assert main([*words, "--models", "charge3net-density"], build_parser()) == 2
    assert "is no checkout of git" in capsys.readouterr().err


def test_trainings_of_other_settings_are_not_shown_as_of_these(words, tmp_path, capsys):
    asked = [*words, "--models", "deepdft-promolecule"]
    assert main(asked, build_parser()) == 0
    assert main([*asked, "--seed", "1", "--threads", "2"], build_parser()) == 2
    assert "had other threads and seed than are asked for" in capsys.readouterr().err
    commit = ["-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "n", "--allow-empty"]
    subprocess.run(["git", "-C", str(tmp_path), *commit], check=True)
    assert main(asked, build_parser()) == 2
    assert "had other commits than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "free_running of .* is damaged"),
        (
            '{"free_running": {"materials": [{"material_id": "MgO", "free_running_nmae": 0.1}]}}',
            "is of other cells than",
        ),
    ],
)
def test_an_evaluation_that_is_no_match_of_the_cells_is_refused(tmp_path, content, message):
    (tmp_path / "evaluation.json").write_text(content)
    with pytest.raises(TomatError, match=message):
        published_fields.of_the_demo(tmp_path / "evaluation.json", CELLS["held_out"])
