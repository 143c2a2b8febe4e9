"""From a folder of densities to a trained, evaluated model and a predicted CHGCAR, in two commands."""

import json
from pathlib import Path

import yaml
from density_folder import write_folder
from html_reader import read_page
from json_keys import assert_keys_of_before
from tiny_run import DEMO, tiny_run

from tomat.app.cli import main
from tomat.app.workflow.folder_run import folder_words
from tomat.base.overrides import parse_overrides
from tomat.data.density.io import open_density


def test_a_folder_is_enough(tmp_path, monkeypatch, capsys):
    densities = write_folder(tmp_path / "My CHGCARs")
    monkeypatch.chdir(tmp_path)
    words = ["train", "--config_path", str(DEMO), *tiny_run(2, 1, atoms=True, name=""), "--output_dir", "runs"]
    words += ["--evaluation.free_running", "true", "--evaluation.patches_per_material", "1"]
    words += ["--data.source", "folder", "--data.input", str(densities), "--data.codec_floor", "0.05"]
    assert main([*words, "--json", "figures.json"]) == 0
    assert_keys_of_before("train", json.loads(Path("figures.json").read_text()))
    told = " ".join(capsys.readouterr().out.split())
    assert "7 read, 3 ignored: " in told and "2 duplicates: copy (of NaF), same (of NaF)" in told
    run = tmp_path / "runs" / "My-CHGCARs"
    recorded = yaml.safe_load((run / "config.yaml").read_text())
    held = json.loads((run / "data" / "folder.json").read_text())["validation_formulas"]
    # What follows from the densities is in the configuration that the run leaves: fewer bins than the 64 allowed.
    assert recorded["data"]["n_density_tokens"] == 32 and recorded["model"]["environment"]["max_elements"] == 2
    assert recorded["model"]["environment"]["max_atoms"] % 16 == 0 and str(densities) in recorded["purpose"]
    figures = json.loads((run / "evaluation.json").read_text())
    names = [material["material_id"] for material in figures["materials"]]
    assert names and names == [material["material_id"] for material in figures["free_running"]["materials"]]
    assert all(0 < material["free_running_nmae"] < 2 for material in figures["free_running"]["materials"])
    page = (run / "README.md").read_text()
    assert f"Held out of {densities}." in page and all(name in page for name in names)
    assert (run / "prediction.png").exists() and (run / "density.png").exists() and held
    shown = read_page((run / "index.html").read_text())
    assert "[index.html](index.html)" in page and all(name in shown.text for name in names)
    [item] = shown.data["density-data"]["items"]
    assert set(item["values"]) == {"density", "reference"} and "train/loss" in shown.text

    without = ["--evaluation.free_running", "false", "--evaluation.patches_per_material", "0"]
    assert main([*words, *without]) == 0
    assert "training is complete: 2 of 2 steps are done." in capsys.readouterr().out

    # The second command.
    structure = str(densities / "NaCl" / "POSCAR")
    assert main(["predict", "--run", str(run), "--structure", structure, "--spacing", "0.5", "--output", "out"]) == 0
    assert open_density(next(Path("out").glob("*.CHGCAR")), "x").formula == "ClNa"

    # What the run held out is evaluated again without naming it.
    again = ["eval", "--run", str(run), "--patches_per_material", "1", "--json", "eval.json"]
    capsys.readouterr()
    assert main(again) == 0
    told = capsys.readouterr().out
    assert f"held out by the record of the run ({run / 'data' / 'folder.json'}) and unchanged since:" in told
    assert all(any(name in line and str(densities) in line for line in told.splitlines()) for name in names)
    repeated = json.loads(Path("eval.json").read_text())
    assert repeated["materials"] == figures["materials"]
    assert repeated["settings"]["materials_from"] == figures["settings"]["materials_from"]
    assert main([*again, "--species", "Na"]) == 2
    assert "they do not apply to what the run held out" in capsys.readouterr().err

    # Under the name of a run on other data a folder is refused before anything is written.
    (tmp_path / "runs" / "demo").mkdir()
    (tmp_path / "runs" / "demo" / "config.yaml").write_text("data: {source: embedded}\n")
    assert main([*words, "--run_name", "demo"]) == 2
    assert "was begun with data.source 'embedded'; use another --run_name" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "runs" / "demo").iterdir()] == ["config.yaml"]


def test_a_run_is_called_as_its_folder(tmp_path):
    folder = ["--data.source", "folder"]
    for words, name in (
        ([*folder, "--data.input", "a/MY_CHGCARS/"], "MY_CHGCARS"),
        ([*folder, "--data.input", "./2024"], "2024"),
        ([*folder, "--data.input", "über (1)"], "ber-1"),
        ([*folder, "--data.input", "x", "--run_name", "mine"], "mine"),
        (folder, None),
        (["--trainer.num_train_steps", "3"], None),
    ):
        assert parse_overrides(folder_words(DEMO, words)).get("run_name") == name
    # The configuration of a folder has a name of its own.
    (tmp_path / "own.yaml").write_text("run_name: own\ndata: {source: folder, input: x}\n")
    assert folder_words(tmp_path / "own.yaml", [*folder, "--data.input", "y"]) == [*folder, "--data.input", "y"]


def test_wrong_words_are_refused(tmp_path, capsys):
    for words, message in (
        (["--data.source", "folder"], "needs the folder of densities as data.input"),
        (["--data.input", "x"], "no other source takes one"),
        (["--data.source", "folder", "--data.input", "x", "--data.validation_share", "1"], "expected shares"),
    ):
        assert main(["train", "--config_path", str(DEMO), "--output_dir", str(tmp_path), *words]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
