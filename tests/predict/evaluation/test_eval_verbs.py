"""`tomat eval` on a run's folder as training leaves it: configuration, codec, checkpoint."""

import dataclasses
import json
from pathlib import Path

import pytest
from json_keys import assert_keys_of_before

from tomat.app.cli import main
from tomat.app.eval_verbs import files_sha256
from tomat.base.layout import PACKAGED_MODEL
from tomat.data.density.zarr_store import write_zarr
from tomat.predict.evaluation.result import LABEL, TeacherForcedResult


@pytest.fixture(scope="module")
def inputs(tmp_path_factory, make_grid):
    folder = tmp_path_factory.mktemp("densities")
    paths = []
    for shape, name in (((7, 8, 9), "a"), ((8, 8, 6), "b")):
        paths.append(str(folder / f"{name}.zarr"))
        grid = make_grid(shape, name)
        # A reader takes whole electrons only: 10 of Si-q4 and O-q6.
        write_zarr(dataclasses.replace(grid, rho=grid.rho * (10 / grid.electron_count)), paths[-1])
    return paths


@pytest.fixture(scope="module")
def report(run_dir, inputs, tmp_path_factory):
    path = tmp_path_factory.mktemp("reports") / "eval.json"
    words = ["--patches_per_material", "2", "--batch_size", "2"]
    assert main(["eval", "--run", str(run_dir), "--input", *inputs, *words, "--json", str(path)]) == 0
    return path


def test_report_is_whole_and_says_what_it_is(report, inputs):
    content = json.loads(report.read_text())
    assert_keys_of_before("eval", content)
    assert content["label"] == LABEL
    assert [row["material_id"] for row in content["materials"]] == [Path(place).stem for place in inputs]
    # The second cell is 6 voxels high: what a patch of 7 holds again counts once.
    assert [row["voxels"] for row in content["materials"]] == [2 * 7 * 7 * 7, 2 * 7 * 7 * 6]
    settings = content["settings"]
    assert (settings["run"], settings["step"], settings["layout"], settings["seed"]) == ("demo", 2, "v3-p7", 0)
    assert not list(report.parent.glob("*.partial"))


def test_a_stopped_evaluation_goes_on_where_it_was_and_is_compared_and_drawn(run_dir, inputs, report, tmp_path, capsys):
    whole, target, picture = json.loads(report.read_text()), tmp_path / "eval.json", tmp_path / "plane.png"
    first = {**whole["materials"][0], "teacher_forced_nmae_mean": 0.125}  # marks the row that was kept
    header = json.dumps({"settings": whole["settings"]}, sort_keys=True)
    (tmp_path / "eval.json.partial").write_text(f"{header}\n{json.dumps(first)}\n")
    words = ["--patches_per_material", "2", "--batch_size", "2", "--against", str(report), "--picture", str(picture)]
    assert main(["eval", "--run", str(run_dir), "--input", *inputs, *words, "--json", str(target)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert LABEL in said
    # The same model on the same patches: no difference anywhere.
    assert "mean difference in NMAE +0.000 points" in said and "lower on 0, higher on 0 of 2 materials" in said
    resumed = TeacherForcedResult.from_dict(json.loads(target.read_text()), target)
    assert resumed.materials[0].teacher_forced_nmae_mean == 0.125
    assert resumed.materials[1] == TeacherForcedResult.from_dict(whole, "whole").materials[1]
    assert picture.read_bytes().startswith(b"\x89PNG") and {*tmp_path.iterdir()} == {target, picture}


def test_files_of_one_name_elsewhere_or_written_since_are_others(tmp_path):
    """Else the kept materials of a stopped evaluation would stand for other densities."""
    places = [tmp_path / folder / "CHGCAR" for folder in "ab"]
    for place in places:
        place.parent.mkdir()
        place.write_text("1")
    first, other = (files_sha256([str(place)]) for place in places)
    assert first != other and files_sha256([str(places[0])]) == first
    places[0].write_text("12")
    assert files_sha256([str(places[0])]) != first
    assert files_sha256(["gs://a/x.zarr"]) != files_sha256(["gs://b/x.zarr"])


def test_what_a_field_model_has_no_use_for_is_refused(inputs, capsys):
    words = ["eval", "--run", str(PACKAGED_MODEL), "--input", inputs[0], "--free_running"]
    for more in (["--whole_cell"], ["--seed", "1"]):
        assert main([*words, *more]) == 2
        assert "Give --free_running alone" in " ".join(capsys.readouterr().err.split())
