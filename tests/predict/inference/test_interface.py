import dataclasses
import doctest
import gzip
import json
import warnings

import numpy as np
import pytest
from pymatgen.core import Lattice, Structure
from pymatgen.io.vasp import Chgcar
from small_promolecule import promolecule, skewed

from tomat.app.cli import main
from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.geometry import nearest_atom_a
from tomat.data.density.io import open_density
from tomat.data.density.outputs import write_density
from tomat.data.density.promolecule import Promolecule
from tomat.predict.inference.interface import SPACING_A, GridChoice, Prediction, Predictor, choose_grid, electron_count
from tomat.predict.inference.structures import crystal_of
from tomat.predict.inference.sum_of_atoms import PromoleculePredictor, load_promolecule

SUM_OF_ATOMS = PromoleculePredictor(dataclasses.replace(promolecule(), valences={9: 7.0, 11: 1.0}))
HOW = {"accept": ("normalisation", "distances")}
CRYSTAL = Crystal(np.diag([3.0, 3.2, 3.4]), np.array([11, 9]), np.array([[0, 0, 0], [0.5, 0.5, 0.5]]), "NaF")


def test_it_is_a_predictor_whose_density_has_the_electrons_asked_for():
    predictor: Predictor = PromoleculePredictor(promolecule())
    told = []
    free = predictor.predict(CRYSTAL, (20, 21, 22), electrons=None)
    asked = predictor.predict(CRYSTAL, (20, 21, 22), electrons=8.0, on_patches=lambda *each: told.append(each))
    assert asked.electron_count == pytest.approx(8.0, rel=1e-6) and told == [(1, 1)]
    assert free.electron_count == pytest.approx(free.electrons_before, rel=1e-6)
    assert asked.electrons_before == free.electrons_before != 8.0
    assert np.allclose(asked.rho / free.rho, 8.0 / free.electrons_before, rtol=1e-5)
    assert predictor.valences is None, "its functions hold a part of their neighbours' electrons"
    with pytest.warns(UserWarning, match="NaF: electrons not known"):
        said = predictor.predict(CRYSTAL, (20, 21, 22))
    assert np.array_equal(said.rho, free.rho) and [flag["kind"] for flag in said.flags] == ["electrons"]


def test_a_promolecule_of_before_is_read_and_says_that_vacuum_is_not_checked(tmp_path, promolecule_file, capsys):
    assert "void_radius_a" not in promolecule_file.read_text(), "its hash is that of an earlier tomat"
    loaded = load_promolecule(promolecule_file)
    assert loaded.promolecule.void_radius_a is None and loaded.identity == f"promolecule {promolecule().sha256}"
    assert "vacuum is not flagged" in " ".join(capsys.readouterr().out.split())
    later = tmp_path / "later.json"
    later.write_text(dataclasses.replace(promolecule(), void_radius_a=2.5).to_text())
    assert load_promolecule(later).promolecule.void_radius_a == 2.5 and "vacuum" not in capsys.readouterr().out


BOX = Crystal(np.diag([3.0, 4.0, 7.0]), np.array([11]), np.zeros((1, 3)), "x")


def test_a_spacing_is_a_bound_and_its_sides_have_small_factors():
    smooth = {2**a * 3**b * 5**c for a in range(8) for b in range(5) for c in range(4)}
    for spacing_a in (0.065, 0.1, 0.31):
        shape = choose_grid(None, spacing_a, None, None).shape(BOX)
        for side, length in zip(shape, (3.0, 4.0, 7.0), strict=True):
            assert side == min(n for n in smooth if length / n <= spacing_a)


def test_sides_and_those_of_another_density(tmp_path, structure):
    assert choose_grid((5, 6, 7), None, None, 0.2).shape(BOX) == (5, 6, 7)
    assert choose_grid(None, None, None, 0.2) == GridChoice(spacing_a=0.2, why="0.2 A, the median of the training")
    assert choose_grid(None, None, None, None).spacing_a == SPACING_A
    path = tmp_path / "CHGCAR"
    Chgcar(structure, {"total": np.ones((4, 5, 6))}).write_file(str(path))
    path.write_text(path.read_text().partition("   4   5   6\n")[0] + "   4   5   6\n noise")
    assert choose_grid(None, None, str(path), None).shape(BOX) == (4, 5, 6)
    path.write_text("x")
    with pytest.raises(TomatError, match="not a complete"):
        choose_grid(None, None, str(path), None)


def test_a_grid_beyond_all_memory_is_refused():
    for choice in (GridChoice(sides=(2000, 2000, 2000)), GridChoice(spacing_a=1e-4)):
        with pytest.raises(TomatError, match="Ask for a coarser one"):
            choice.shape(BOX)


SRF2 = Crystal(np.eye(3) * 4, np.array([38, 9, 9]), np.random.default_rng(0).random((3, 3)), "SrF2")


def test_given_valences_go_before_learnt_ones_and_both_are_named():
    assert electron_count(SRF2, None, None)[0] is None
    assert electron_count(SRF2, None, {38: 10, 9: 7, 8: 6}) == (24.0, "learnt from the training set")
    assert electron_count(SRF2, {38: 10, 9: 7}, None) == (24.0, "--valences")
    assert electron_count(SRF2, {38: 2}, {38: 10, 9: 7}) == (16.0, "--valences and learnt from the training set")


def test_what_is_missing_or_cannot_be_is_refused():
    with pytest.raises(TomatError, match="no valence electrons of Sr are known.*Sr=N"):
        electron_count(SRF2, {9: 7}, None)
    with pytest.raises(TomatError, match="its 3 atoms 76 electrons; expected"):
        electron_count(SRF2, {38: 62, 9: 7}, None)


LEARNT = dataclasses.replace(
    promolecule(),
    valences={9: 7.0, 11: 1.0},
    shortest_distance_a={(9, 9): 2.8, (9, 11): 2.2, (11, 11): 2.8},
    void_radius_a=2.1,
)
SHAPE = (12, 14, 16)


@dataclasses.dataclass
class Fills(Predictor):
    """A model that puts this much everywhere beside the sum of atoms, e/Å³, as one does that knows no vacuum."""

    promolecule: Promolecule
    everywhere: float
    usual_deviation = 0.01
    identity = "fills"

    def density(self, crystal, grid_shape, on_patches=None):
        rho = self.promolecule.density(crystal, grid_shape)
        held = float(rho.mean()) * crystal.volume_a3
        whole = 8.0 * (len(crystal.atomic_numbers) // 2) / held
        return rho * np.float32(whole) + np.float32(self.everywhere), None


def cell() -> Crystal:
    return crystal_of(skewed())[0]


def slab(vacuum_a: float) -> Crystal:
    """The same atoms with a vacuum along c."""
    crystal = cell()
    lattice = np.array(crystal.lattice)
    lattice[2] *= 1 + vacuum_a / np.linalg.norm(lattice[2])
    return Crystal(lattice, crystal.atomic_numbers, crystal.frac_coords @ crystal.lattice @ np.linalg.inv(lattice), "x")


def kinds(prediction: Prediction) -> set[str]:
    return {flag["kind"] for flag in prediction.flags}


def test_an_ordinary_crystal_passes_silently_and_a_strained_one_too():
    for predictor in (PromoleculePredictor(LEARNT), Fills(LEARNT, 0.0)):
        assert predictor.predict(cell(), SHAPE).flags == ()
        strained = skewed()
        strained.apply_strain([0.02, 0.03, 0.01])
        assert predictor.predict(strained, SHAPE).flags == ()


def test_a_vacuum_is_flagged_with_the_electrons_that_were_put_there():
    crystal = slab(6.0)
    found = Fills(LEARNT, 0.0002).predict(crystal, SHAPE)
    (flag,) = found.flags
    beyond = nearest_atom_a(crystal.lattice, crystal.frac_coords, SHAPE) > 2.1
    assert flag["kind"] == "vacuum" and flag["share"] == pytest.approx(beyond.mean())
    assert flag["electrons"] == pytest.approx(found.rho[beyond].sum() * crystal.volume_a3 / found.rho.size, rel=1e-4)
    assert flag["void_radius_a"] > 3 and flag["trained_a"] == 2.1 and "farther than 2.10 A" in flag["text"]
    unknown = dataclasses.replace(LEARNT, void_radius_a=None)
    assert PromoleculePredictor(unknown).predict(crystal, SHAPE).flags == ()


def test_neighbours_and_grids_unlike_the_training_are_flagged_with_their_figures():
    distances = {(9, 9): 2.0, (9, 11): 9.0}
    trained = Fills(dataclasses.replace(LEARNT, shortest_distance_a=distances, spacing_a=0.05), 0.0)
    flags = {flag["kind"]: flag for flag in trained.predict(cell(), SHAPE).flags}
    assert flags["pair"]["pair"] == "Na-Na" and flags["distance"]["pair"] == "F-Na"
    shortest_a = min(a.distance(b) for a in skewed() for b in skewed() if a.specie != b.specie)
    distance = flags["distance"]
    assert distance["trained_a"] == 9.0 and distance["distance_a"] == pytest.approx(shortest_a, abs=1e-4)
    assert flags["spacing"]["trained_a"] == 0.05 < flags["spacing"]["spacing_a"]
    trained.promolecule = dataclasses.replace(
        LEARNT, shortest_distance_a={(9, 9): 2.8, (9, 11): shortest_a + 0.0005, (11, 11): 2.8}, spacing_a=0.25
    )
    assert trained.predict(cell(), SHAPE).flags == (), "a file's last digit, and a spacing that is no extrapolation"


def test_too_many_electrons_are_flagged_and_more_are_refused_unless_accepted():
    volume_a3 = cell().volume_a3
    assert Fills(LEARNT, 0.009 * 8 / volume_a3).predict(cell(), SHAPE).flags == ()
    (flag,) = Fills(LEARNT, 0.03 * 8 / volume_a3).predict(cell(), SHAPE).flags
    assert flag["kind"] == "normalisation" and flag["deviation"] == pytest.approx(0.03, rel=1e-3)
    assert flag["factor"] == pytest.approx(1 / 1.03, rel=1e-4) and "3.0% too many" in flag["text"]
    much = Fills(LEARNT, 0.12 * 8 / volume_a3)
    with pytest.raises(TomatError, match=r"NaF: 8\.96 electrons were predicted for 8, 12\.0% too many.*normalisation"):
        much.predict(dataclasses.replace(cell(), name="NaF"), SHAPE)
    assert kinds(much.predict(cell(), SHAPE, accept=("normalisation",))) == {"normalisation"}
    with pytest.raises(TomatError, match="too few"):
        much.predict(cell(), SHAPE, electrons=20.0)
    with pytest.raises(TomatError, match="farther than 2.10 A from every atom"):
        much.predict(slab(6.0), SHAPE)


def test_python_has_the_checks_of_the_command(tmp_path):
    """Overlapping atoms, a grid of one voxel, a lattice times 0.8: what a Crystal said was taken in silence."""
    predictor = PromoleculePredictor(LEARNT)
    over = dataclasses.replace(cell(), frac_coords=np.array([[0.1, 0.2, 0.3], [0.12, 0.2, 0.3]]))
    with pytest.raises(TomatError, match="A apart; expected at least"):
        predictor.predict(over, SHAPE)
    lifted = ("distances", "normalisation")
    assert "distance" in kinds(predictor.predict(over, SHAPE, accept=lifted))
    # pymatgen's structures may have them too: an atom alone in a box has no neighbour.
    alone = Structure(Lattice.cubic(9.0), ["F"], [[0, 0, 0]])
    with pytest.raises(TomatError, match="closest atoms are 9 A apart"):
        predictor.predict(alone, SHAPE)
    assert "vacuum" in kinds(predictor.predict(alone, SHAPE, accept=lifted))
    spaced = Fills(LEARNT, 0.0)
    spaced.promolecule = dataclasses.replace(LEARNT, spacing_a=0.25)
    assert kinds(spaced.predict(cell(), (1, 1, 1))) == {"spacing"}
    small = Structure(0.8 * cell().lattice, ["Na", "F"], cell().frac_coords)
    assert "distance" in kinds(predictor.predict(small, SHAPE, accept=("normalisation",)))
    with pytest.raises(TomatError, match="accept names 'zeros'; expected some of distances, normalisation"):
        predictor.predict(cell(), SHAPE, accept=("zeros",))
    # The command's line has the flags of the prediction.
    (tmp_path / "p.json").write_text(LEARNT.to_text())
    vacuum = slab(6.0)
    wide = Structure(vacuum.lattice, ["Na", "F"], vacuum.frac_coords)
    for name, structure in (("small", small), ("slab", wide)):
        structure.to(filename=str(tmp_path / f"{name}.cif"))
    words = ["predict", "--promolecule", tmp_path / "p.json", "--structure", tmp_path, "--output", tmp_path / "out"]
    words += ["--grid", *SHAPE, "--accept", "normalisation"]
    assert main([str(word) for word in words]) == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "predictions.jsonl").read_text().splitlines()]
    for line in lines:
        crystal = {"small": crystal_of(small)[0], "slab": vacuum}[line["name"]]
        same = predictor.predict(crystal, SHAPE, accept=("normalisation",))
        assert [flag["kind"] for flag in line["flags"]] == [flag["kind"] for flag in same.flags]


@pytest.mark.parametrize("name", ["CHGCAR", "x.vasp", "x.cube.gz", "x.zarr", "x.json"])
def test_a_prediction_is_written_by_its_name_and_says_what_made_it(tmp_path, name):
    made = PromoleculePredictor(LEARNT).predict(skewed(), (6, 7, 8))
    again = open_density(made.write(tmp_path / name))
    np.testing.assert_allclose(again.rho, made.rho, rtol=1e-5)
    path = tmp_path / name / "zarr.json" if name.endswith(".zarr") else tmp_path / name
    content = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert f"sum of atoms {LEARNT.sha256[:12]}".encode() in content and b"learnt from the training set" in content
    # One that is far off says so by its flags, and is no file in another unit.
    assert dataclasses.replace(made, rho=0.2 * made.rho).write(tmp_path / f"off-{name}").exists()


def test_a_prediction_is_one_line_a_slice_and_what_other_libraries_have(tmp_path):
    made = PromoleculePredictor(LEARNT).predict(skewed(), (6, 7, 8))
    assert repr(made).startswith("Prediction(FNa, 6 x 7 x 8 voxels, 8.0000 electrons, flags: ")
    shown = made._repr_html_()
    assert "data:image/png;base64," in shown and "sum of atoms" in shown
    chgcar, atoms = made.to_pymatgen(), made.to_ase()
    assert chgcar.data["total"].sum() / chgcar.ngridpts == pytest.approx(8.0, rel=1e-6)
    np.testing.assert_allclose(atoms.get_scaled_positions(), made.frac_coords, atol=1e-12)
    assert atoms.pbc.all() and np.array_equal(atoms.cell, made.lattice)
    finer = dataclasses.replace(made, spread=0.1 * made.rho).refined((12, 14, 16))
    assert finer.made_by == made.made_by and finer.spread is None  # which has the voxels of the coarser grid
    with pytest.raises(TomatError, match="says no format"):
        made.write(tmp_path / "density.txt")
    assert not list(tmp_path.iterdir())


def test_the_example_of_the_docstring_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
        [example] = [each for each in finder.find(Prediction.write, "write", globs={}) if each.examples]
        assert runner.run(example).failed == 0


@pytest.mark.parametrize("grid", [(0, 8, 8), (-1, 8, 8), (8.5, 8, 8), (8, 8), 12, (10**5,) * 3])
def test_a_grid_that_cannot_be_is_refused_in_words(grid):
    with pytest.raises(TomatError, match="expected"):
        SUM_OF_ATOMS.predict(skewed(), grid, **HOW)


@pytest.mark.parametrize("electrons", [0, -8.0, float("nan"), "8"])
def test_electrons_that_cannot_be_are_refused_in_words(electrons):
    with pytest.raises(TomatError, match="electrons is"):
        SUM_OF_ATOMS.predict(skewed(), (6, 7, 8), electrons=electrons, **HOW)


def test_the_path_in_a_title_says_nothing_of_the_quantity(tmp_path):
    density = SUM_OF_ATOMS.predict(skewed(), (6, 7, 8), **HOW)
    for name in ("a.CHGCAR", "a.cube"):
        write_density(
            density, tmp_path / name, name.partition(".")[2].lower(), metadata={"grid": "--like potential/CHGCAR"}
        )
        try:
            open_density(tmp_path / name)
        except TomatError as error:
            assert "its title says" not in str(error)
