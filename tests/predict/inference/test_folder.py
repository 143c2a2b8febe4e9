"""Many structures: lines, flags, what fails alone, what is done again; and kills."""

import json
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from forked import Forked, until
from pymatgen.core import Lattice, Structure
from pymatgen.io.common import VolumetricData
from pymatgen.io.vasp import Chgcar
from scipy.io import FortranFile
from small_promolecule import promolecule, skewed

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.io import open_density
from tomat.predict.inference.folder import LINES_FILE, Settings, predict_structures
from tomat.predict.inference.interface import GridChoice
from tomat.predict.inference.structures import find_structures
from tomat.predict.inference.sum_of_atoms import PromoleculePredictor

LEARNT = replace(promolecule(), valences={9: 7.0, 11: 1.0})
PREDICTOR = PromoleculePredictor(LEARNT)
HOW = {"accept": ("normalisation", "distances")}


@pytest.fixture
def places(tmp_path):
    """A folder with two good structures, three bad ones and other files."""
    folder = tmp_path / "in"
    folder.mkdir()
    skewed().to(filename=str(folder / "good.cif"))
    skewed(("F", "Na")).to(filename=str(folder / "other.json"))
    skewed(("Na", "Cl")).to(filename=str(folder / "chlorine.cif"))
    (folder / "torn.cif").write_text("data_x\n")
    (folder / "mol.xyz").write_text("1\n\nO 0 0 0\n")
    (folder / "report.json").write_text('{"a": 1}')
    return [str(folder)]


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path / "out", GridChoice(sides=(6, 7, 8), why="--grid"))


def lines_of(settings):
    text = (settings.output / LINES_FILE).read_text()
    return {line["name"]: line for line in map(json.loads, text.splitlines())}


def test_a_decoder_that_a_model_has_not_is_no_structures_fault(tmp_path, capsys):
    skewed().to(filename=str(tmp_path / "POSCAR"), fmt="poscar")
    words = ["predict", "--structure", str(tmp_path / "POSCAR"), "--output", str(tmp_path / "out"), "--valences"]
    assert main([*words, "Na=1,F=7", "--decoder", "autoregressive"]) == 2
    assert "field model" in capsys.readouterr().err and not (tmp_path / "out" / LINES_FILE).exists()


def test_a_bad_structure_fails_alone_and_is_tried_again(places, settings):
    files, _ = find_structures(places)
    outcome = predict_structures(PREDICTOR, files, settings)
    assert sorted(line["name"] for line in outcome.failed) == ["chlorine", "mol", "torn"]
    assert [path.rsplit("/", 1)[-1] for path in outcome.ignored] == ["report.json"]
    lines = lines_of(settings)
    assert sorted(lines) == ["chlorine", "good", "mol", "other", "torn"]
    assert "Cl, which no training density had" in lines["chlorine"]["error"]
    good = lines["good"]
    assert good["electrons"] == pytest.approx(8, rel=1e-6) and good["electrons_from"] == "learnt from the training set"
    assert good["electrons_before"] != pytest.approx(8, rel=1e-3) and good["grid"] == [6, 7, 8] and not good["flags"]
    assert Chgcar.from_file(str(settings.output / good["output"])).dim == (6, 7, 8)
    again = predict_structures(PREDICTOR, files, settings)
    assert sorted(again.skipped) == ["good", "other"] and len(again.failed) == 3
    skewed(("Na", "Na")).to(filename=f"{places[0]}/chlorine.cif")
    assert sorted(line["name"] for line in predict_structures(PREDICTOR, files, settings).failed) == ["mol", "torn"]
    assert sorted(lines_of(settings)) == sorted(lines)
    assert sorted(each.name for each in settings.output.iterdir() if each.name.startswith(".")) == []


def test_what_changes_the_density_is_done_again_and_a_damaged_line_is_dropped(places, settings):
    files = [file for file in find_structures(places)[0] if file.name == "good"]
    predict_structures(PREDICTOR, files, settings)
    path = settings.output / "good.CHGCAR"
    changes = {
        "grid": (PREDICTOR, replace(settings, grid=GridChoice(sides=(6, 7, 9)))),
        "valences": (PREDICTOR, replace(settings, valences={9: 7.0, 11: 9.0}, accept=("normalisation",))),
        "promolecule": (PromoleculePredictor(replace(LEARNT, n_materials=4)), settings),
        "seed": (PREDICTOR, replace(settings, recorded={"seed": 1})),
    }
    for predictor, changed in changes.values():
        assert predict_structures(predictor, files, changed).skipped == []
        assert predict_structures(predictor, files, changed).skipped == ["good"]
    path.write_text(path.read_text()[:-100])
    assert predict_structures(PREDICTOR, files, changes["seed"][1]).skipped == []
    with (settings.output / LINES_FILE).open("a") as file:
        file.write('{"name": "good", "inp')
    (settings.output / ".writing-x").mkdir()
    assert predict_structures(PREDICTOR, files, changes["seed"][1]).skipped == ["good"]
    assert list(lines_of(settings)) == ["good"] and not list(settings.output.glob(".*"))


def test_the_spread_over_samples_lies_beside_the_density(places, settings):
    class Sampled(PromoleculePredictor):
        def predict(self, *args, **kwargs):
            one = super().predict(*args, **kwargs)
            return replace(one, spread=0.1 * one.rho)

    files = [file for file in find_structures(places)[0] if file.name == "good"]
    (line,) = predict_structures(Sampled(LEARNT), files, settings).lines
    assert line["spread_share"] == pytest.approx(0.1, rel=1e-5) and line["spread_output"] == "good.spread.cube"
    spread = VolumetricData.from_cube(settings.output / "good.spread.cube").data["total"]
    density = Chgcar.from_file(settings.output / "good.CHGCAR")
    expected = 0.1 * density.data["total"] / density.structure.volume * BOHR_A**3
    assert np.allclose(spread, expected, rtol=1e-4, atol=1e-9)
    # One sample has none, and leaves none of before.
    predict_structures(PREDICTOR, files, replace(settings, recorded={"samples": 1}))
    assert not list(settings.output.glob("*.spread.cube"))


def test_a_density_is_never_written_where_the_spread_of_another_belongs(places, settings):
    skewed().to(filename=f"{places[0]}/good.spread.cif")
    files, _ = find_structures(places)
    with pytest.raises(TomatError, match=r"good\.spread\.cif would be written where .* of .*good\.cif belongs; rename"):
        predict_structures(PREDICTOR, files, replace(settings, form="cube"))
    assert not settings.output.exists()
    assert len(predict_structures(PREDICTOR, files, settings).failed) == 3


@pytest.mark.parametrize("strained", [False, True])
def test_augmentation_occupancies_of_moved_atoms_or_another_cell_are_flagged(tmp_path, places, settings, strained):
    files = [file for file in find_structures(places)[0] if file.name != "chlorine"]
    moved = Structure(Lattice.from_parameters(*skewed().lattice.parameters), skewed().species, skewed().frac_coords)
    moved_a = 0.1  # from the atoms of good.cif, whose axes lie as pymatgen lays them
    if strained:
        moved.apply_strain(0.02)
        moved_a = 0.02 * max(skewed().lattice.abc)
    else:
        moved.translate_sites([1], [moved_a, 0, 0], frac_coords=False)
    source = tmp_path / "CHGCAR"
    Chgcar(moved, {"total": np.ones((2, 2, 2))}).write_file(str(source))
    with source.open("a") as file:
        file.write("augmentation occupancies   1   1\n  0.1\naugmentation occupancies   2   1\n  0.2\n")
    outcome = predict_structures(PREDICTOR, files, replace(settings, augmentation_from=str(source)))
    lines = {line["name"]: line for line in outcome.lines}
    assert [flag["distance_a"] for flag in lines["good"]["flags"]] == [pytest.approx(moved_a, abs=1e-4)]
    assert (settings.output / "good.CHGCAR").read_text().endswith("augmentation occupancies   2   1\n  0.2\n")
    assert all(names in lines["other"]["error"] for names in ("(Na F)", "(F Na)"))


def test_one_process_at_a_time(places, settings):
    files, _ = find_structures(places)

    def second(line, skipped):
        with pytest.raises(TomatError, match="another process writes predictions"):
            predict_structures(PREDICTOR, files, settings)

    predict_structures(PREDICTOR, files[:1], settings, on_line=second)


def test_no_truth_is_read(tmp_path, settings):
    """The same bits from a structure with its density, with noise in its place, and with none."""
    crystal, shape = skewed(), (4, 4, 4)
    densities = {"smooth": np.ones(shape), "noise": np.random.default_rng(0).normal(size=shape)}
    for name, values in densities.items():
        Chgcar(crystal, {"total": values}).write_file(str(tmp_path / f"{name}.CHGCAR"))
    text = (tmp_path / "noise.CHGCAR").read_text()
    (tmp_path / "bare.poscar").write_text(text.partition("   4   4   4")[0])
    files, _ = find_structures([str(tmp_path / name) for name in ("smooth.CHGCAR", "noise.CHGCAR", "bare.poscar")])
    predict_structures(PREDICTOR, files, settings)
    written = {(settings.output / f"{name}.CHGCAR").read_bytes() for name in (*densities, "bare")}
    assert len(written) == 1


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_folder_is_finished_by_the_same_command(tmp_path, promolecule_file, sent):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for n in range(8):
        cell = skewed()
        cell.apply_strain(0.01 * n)
        cell.to(filename=str(folder / f"s{n}.cif"))
    words = ["predict", "--promolecule", promolecule_file, "--structure", folder, "--output", out, "--grid"]
    words += [*("40",) * 3, "--valences", "Na=1,F=7"]
    process = Forked(*words)
    try:
        until(lambda: (out / LINES_FILE).exists() or process.poll() is not None, 300.0)
        time.sleep(0.2)
        process.send_signal(sent)
        told, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == (-signal.SIGKILL if sent == signal.SIGKILL else 130), told
    before = {path.name: path.read_bytes() for path in out.glob("*.CHGCAR")}
    assert 1 <= len(before) < 8 and "Traceback" not in told
    if sent == signal.SIGINT:
        assert not list(out.glob(".*"))
    assert main([str(word) for word in words]) == 0
    lines = [json.loads(line) for line in (out / LINES_FILE).read_text().splitlines()]
    assert sorted(line["name"] for line in lines) == [f"s{n}" for n in range(8)] and not list(out.glob(".*"))
    after = {path.name: path.read_bytes() for path in out.glob("*.CHGCAR")}
    assert before.items() <= after.items() and len(after) == 8 and len({len(each) for each in after.values()}) == 1


@pytest.mark.parametrize("name", ["MY_CHGCARS", "MY_CHGCARS.zarr"])
def test_a_folder_of_other_files_is_not_replaced(name, tmp_path):
    kept = tmp_path / name / "mp-1" / "CHGCAR"
    kept.parent.mkdir(parents=True)
    kept.write_text("weeks of DFT")
    density = PREDICTOR.predict(skewed(), (6, 7, 8), **HOW)
    with pytest.raises(TomatError, match="is a folder"):
        density.write(tmp_path / name)
    assert kept.read_text() == "weeks of DFT"


def test_an_empty_folder_and_a_store_are_replaced_by_a_store(tmp_path):
    place = tmp_path / "NaF.zarr"
    place.mkdir()
    for shape in ((6, 7, 8), (6, 7, 9)):
        PREDICTOR.predict(skewed(), shape, **HOW).write(place)
        assert open_density(place).grid_shape == shape


def test_what_is_read_is_not_written_over(tmp_path):
    density = PREDICTOR.predict(skewed(), (6, 7, 8), **HOW)
    density.write(tmp_path / "NaF.CHGCAR")
    before = (tmp_path / "NaF.CHGCAR").read_bytes()
    files, _ = find_structures([str(tmp_path / "NaF.CHGCAR")])
    outcome = predict_structures(
        PREDICTOR, files, Settings(tmp_path, GridChoice(sides=(6, 7, 9)), accept=HOW["accept"])
    )
    assert "expected another --output" in outcome.lines[0]["error"]
    assert (tmp_path / "NaF.CHGCAR").read_bytes() == before


def test_the_save_folder_of_pw_x_is_not_removed(tmp_path):
    save = tmp_path / "NaF.save"
    save.mkdir()
    (save / "data-file-schema.xml").write_text("<x/>")
    density = PREDICTOR.predict(skewed(), (6, 7, 8), **HOW)
    reciprocal = 2 * np.pi * np.linalg.inv(density.lattice / BOHR_A).T
    with FortranFile(save / "charge-density.dat", "w") as file:
        for record in (np.array([0, 1, 1], np.int32), reciprocal, np.zeros((1, 3), np.int32), np.ones(1, complex)):
            file.write_record(record)
    skewed().to(filename=str(tmp_path / "NaF.cif"))
    files, _ = find_structures([str(tmp_path / "NaF.cif")])
    settings = Settings(tmp_path, GridChoice(sides=(6, 7, 8)), "qe", vectors_from=str(tmp_path), accept=HOW["accept"])
    outcome = predict_structures(PREDICTOR, files, settings)
    assert "is a folder" in outcome.lines[0]["error"] and (save / "data-file-schema.xml").exists()


def test_what_lies_in_the_output_is_no_structure(tmp_path):
    (tmp_path / "NaF").mkdir()
    skewed().to(filename=str(tmp_path / "NaF" / "POSCAR"), fmt="poscar")
    for _ in range(2):
        files, _ = find_structures([str(tmp_path)], tmp_path / "out")
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "NaF.CHGCAR").write_text("")
    assert [file.name for file in files] == ["NaF"]
