"""`tomat predict`: the words, what is printed, the exit status, a full disk."""

import json
import subprocess
import sys

import pytest
from pymatgen.io.vasp import Chgcar
from small_promolecule import skewed
from tiny_run import tomat

from tomat.app.cli import main


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
    assert "1 structure; loading" in told and "grid: --spacing 0.5" in told and "warning" not in told
    assert "scaled to 8.0000 (--valences) -> a.CHGCAR" in " ".join(told.split())
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["structures"][0]["spacing_a"] == pytest.approx([2.9017 / 6, 3.3302 / 8, 3.7458 / 8], abs=1e-3)
    assert Chgcar.from_file(str(tmp_path / "out" / "a.CHGCAR")).dim == (6, 8, 8)

    words[3:4] = [tmp_path / "a.cif", tmp_path / "in"]
    assert predict(*words, "--grid", 6, 8, 8, "--valences", "Na=1,F=7", "--json", tmp_path / "r.json") == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "0 predicted, 1 there before, 1 failed" in told and "passed over 1 other file: " in told
    assert "failed: bad has Cl, which no training density had; the model knows F Na Mg." in told
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["failed"] == ["bad"] and report["skipped"] == ["a"] and len(report["ignored"]) == 1


DISK = """
mount -t tmpfs -o size=64k tmpfs "$DISK"
"$@"; first=$?
ls -A "$DISK/out"
mount -o remount,size=20m "$DISK"
"$@"; second=$?
ls -A "$DISK/out"
echo "$first $second"
"""


def namespaces_allowed() -> bool:
    try:
        return subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not namespaces_allowed(), reason="no user namespaces: a small disk cannot be mounted")
def test_a_full_disk_is_one_error_and_the_folder_is_finished_later(tmp_path, promolecule_file):
    (tmp_path / "disk").mkdir()
    skewed().to(filename=str(tmp_path / "a.cif"))
    (skewed() * (2, 2, 1)).to(filename=str(tmp_path / "b.json"))
    words = tomat("predict", "--promolecule", promolecule_file, "--output", tmp_path / "disk" / "out")
    words += ["--structure", str(tmp_path / "a.cif"), str(tmp_path / "b.json"), "--spacing", "0.25"]
    words += ["--valences", "Na=1,F=7"]
    setting = ["env", f"DISK={tmp_path / 'disk'}", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        ["unshare", "-rm", *setting, "bash", "-c", DISK, "bash", *words], capture_output=True, text=True, timeout=300
    )
    lines = done.stdout.splitlines()
    assert lines[-1] == "2 0", done.stdout + done.stderr
    assert done.stderr.count("error: cannot write") == 1 and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    outputs = [line for line in lines if line in ("a.CHGCAR", "b.CHGCAR", "predictions.jsonl") or line.startswith(".")]
    assert outputs == ["a.CHGCAR", "predictions.jsonl", "a.CHGCAR", "b.CHGCAR", "predictions.jsonl"]
