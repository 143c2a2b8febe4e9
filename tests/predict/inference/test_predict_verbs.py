"""`tomat predict`: the words, what is printed, the exit status, a full disk."""

import json
import os

import pytest
from pymatgen.io.vasp import Chgcar
from small_promolecule import skewed

from tomat.app.cli import main
from tomat.data.density.outputs import OutputError, write_density
from tomat.predict.inference import folder


def predict(*words: object) -> int:
    return main(["predict", *map(str, words)])


def test_files_in_files_out(tmp_path, promolecule_file, capsys):
    skewed().to(filename=str(tmp_path / "a.cif"))
    (tmp_path / "in").mkdir()
    skewed(("Na", "Cl")).to(filename=str(tmp_path / "in" / "bad.cif"))
    (tmp_path / "in" / "notes.txt").write_text("x")
    words = ["--promolecule", promolecule_file, "--structure", tmp_path / "a.cif", "--output", tmp_path / "out"]
    assert predict(*words, "--spacing", "0.5", "--valences", "Na=1,F=7", "--json", tmp_path / "r.json") == 0
    told = capsys.readouterr().out
    assert "1 structure for " in told and "grid: --spacing 0.5" in told and "warning" not in told
    assert "scaled to 8.0000 (--valences) -> a.CHGCAR" in " ".join(told.split())
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["structures"][0]["spacing_a"] == pytest.approx([2.9017 / 6, 3.3302 / 8, 3.7458 / 8], abs=1e-3)
    assert Chgcar.from_file(str(tmp_path / "out" / "a.CHGCAR")).dim == (6, 8, 8)

    words[3:4] = [tmp_path / "a.cif", tmp_path / "in"]
    assert predict(*words, "--grid", 6, 8, 8, "--valences", "Na=1,F=7", "--json", tmp_path / "r.json") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "0 predicted, 1 already there, 1 failed" in told and "ignored 1 other file: " in told
    assert "failed: bad has Cl, which no training density had; the model knows F Na Mg." in told
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["failed"] == ["bad"] and report["skipped"] == ["a"] and len(report["ignored"]) == 1


def test_a_full_disk_is_one_error_and_the_folder_is_finished_later(tmp_path, promolecule_file, capsys, monkeypatch):
    def full(prediction, target, *how, **more):
        if target.name == "b.CHGCAR":
            raise OutputError(f"cannot write {target}: No space left on device.")
        write_density(prediction, target, *how, **more)

    words = ["--promolecule", promolecule_file, "--output", tmp_path / "out", "--grid", 6, 7, 8, "--structure"]
    for name in ("a", "b", "c"):
        skewed().to(filename=str(tmp_path / f"{name}.cif"))
        words.append(tmp_path / f"{name}.cif")
    with monkeypatch.context() as patched:
        patched.setattr(folder, "write_density", full)
        assert predict(*words, "--valences", "Na=1,F=7") == 2
    assert capsys.readouterr().err.count("error: cannot write") == 1
    assert sorted(os.listdir(tmp_path / "out")) == ["a.CHGCAR", "predictions.jsonl"]
    assert predict(*words, "--valences", "Na=1,F=7") == 0
    assert "2 predicted, 1 already there, 0 failed" in " ".join(capsys.readouterr().out.split())
