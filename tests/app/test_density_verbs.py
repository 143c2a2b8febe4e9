"""`tomat density`: what is shown, every format into every other, and two files compared."""

import numpy as np
import pytest
from reported import reported
from small_promolecule import skewed_density

from tomat.app import density_verbs, predict_verbs
from tomat.app.cli import main
from tomat.data.density.demo.embedded import load_stored
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid
from tomat.data.density.io import open_density
from tomat.data.density.outputs import FORMATS, write_density

NAMES = ("CHGCAR", "a.cube.gz", "a.zarr", "a.json.gz")


def density(*words: object) -> int:
    return main(["density", *map(str, words)])


def told(capsys) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def grid() -> DensityGrid:
    return skewed_density()


@pytest.mark.parametrize("first", NAMES[:2])
def test_every_format_becomes_every_other_and_back(tmp_path, first):
    """To 1e-6 of the largest value, and as exact in electrons."""
    assert density("convert", "--demo", "AlP-zinc-blende-ideal", "--output", tmp_path / "in" / first) == 0
    truth = load_stored("AlP-zinc-blende-ideal")
    for second in NAMES:
        there = tmp_path / "there" / second
        assert density("convert", "--input", tmp_path / "in" / first, "--output", there) == 0
        back = tmp_path / "back" / first
        assert density("convert", "--input", there, "--output", back) == 0
        for path in (there, back):
            found = open_density(path)
            assert np.abs(found.rho - truth.rho).max() <= 1e-6 * truth.rho.max()
            assert found.electron_count == pytest.approx(truth.electron_count, rel=1e-6)
            assert np.abs(found.lattice - truth.lattice).max() < 1e-6
            assert found.atomic_numbers.tolist() == truth.atomic_numbers.tolist()


AUGMENTATION = "augmentation occupancies   1   2\n  0.25E-04  0.26E-21\naugmentation occupancies   2   1\n  0.66E-04\n"


@pytest.fixture
def polarised(tmp_path, grid):
    """A CHGCAR with augmentation occupancies, a spin density and the POTCAR of its calculation."""
    folder = tmp_path / "calc"
    write_density(grid, folder / "CHGCAR", "chgcar")
    spin = "".join(f" {each:.10E}\n" for each in np.zeros(120))
    with (folder / "CHGCAR").open("a") as file:
        file.write(AUGMENTATION + f"  0.0 0.0\n   6   5   4\n{spin}")
    (folder / "POTCAR").write_text(" VRHFIN =Na: x\n ZVAL = 1.0\n VRHFIN =F: x\n ZVAL = 7.0\n")
    return folder


def test_show_says_what_a_folder_holds(tmp_path, polarised, grid, capsys):
    write_density(grid, polarised / "b.cube", "cube")
    (polarised / "c.json").write_text("{}")
    first, second = reported(tmp_path, "density", "show", polarised, status=1)["densities"]
    words = told(capsys)
    assert "8.000000; expected 8 (the POTCAR beside it)" in words and "spin densities 1" in words
    assert "2 read, 1 failed, 1 ignored: calc/POTCAR (pseudopotentials without a density)" in words
    assert "failed: " in words and "c.json" in words
    assert (first["name"], first["augmentation"], first["spin_densities"]) == ("calc", True, 1)
    assert (second["format"], second["augmentation"], second["grid"]) == ("cube", False, [6, 5, 4])
    assert second["electrons"] == pytest.approx(8, rel=1e-6)
    assert second["largest_e_per_a3"] == pytest.approx(float(grid.rho.max()), rel=1e-6)


def test_a_picture_is_of_one_density(tmp_path, polarised, grid, capsys):
    assert density("show", polarised / "CHGCAR", "--valences", "Na=1,F=7", "--picture", tmp_path / "a.png") == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    write_density(grid, polarised / "b.cube", "cube")
    assert density("show", polarised, "--picture", tmp_path / "a.png") == 2
    assert density("show", tmp_path / "calc" / "POTCAR") == 2
    errors = capsys.readouterr().err
    assert "--picture draws one density, and 2 were found" in errors
    assert "POTCAR is there, but its name is of no known kind" in errors


def test_what_is_not_kept_is_said(tmp_path, polarised, capsys):
    assert density("convert", "--input", polarised / "CHGCAR", "--output", tmp_path / "out.CHGCAR") == 0
    words = told(capsys)
    assert "calc: 1 spin density(s) not kept" in words and "augmentation" not in words
    assert (tmp_path / "out.CHGCAR").read_text().endswith(AUGMENTATION)
    assert density("convert", "--input", polarised, "--output", tmp_path / "out", "--format", "cube") == 0
    words = told(capsys)
    assert "augmentation occupancies not kept" in words and "1 ignored: calc/POTCAR" in words
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["calc.cube"]
    words = ["--input", tmp_path / "out" / "calc.cube", "--output", tmp_path / "again.CHGCAR"]
    assert density("convert", *words, "--augmentation_from", polarised / "CHGCAR") == 0
    assert (tmp_path / "again.CHGCAR").read_text().endswith(AUGMENTATION)


def test_augmentation_of_a_chgcar_of_vasp_4_is_kept(tmp_path, polarised):
    lines = (polarised / "CHGCAR").read_text().splitlines(keepends=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "CHGCAR").write_text("".join(lines[:5] + lines[6:]))
    words = ["convert", "--input", tmp_path / "in" / "CHGCAR", "--species", "Na", "F", "--output"]
    assert density(*words, tmp_path / "out.CHGCAR") == 0
    assert density(*words, tmp_path / "b.CHGCAR", "--augmentation_from", tmp_path / "in" / "CHGCAR") == 0
    for name in ("out", "b"):
        assert (tmp_path / f"{name}.CHGCAR").read_text().endswith(AUGMENTATION)


def test_augmentation_of_another_cell_is_said(tmp_path, polarised, grid, caplog):
    larger = DensityGrid(grid.rho / 1.02**3, 1.02 * grid.lattice, grid.atomic_numbers, grid.frac_coords)
    write_density(larger, tmp_path / "b.cube", "cube")
    words = ["--input", tmp_path / "b.cube", "--output", tmp_path / "out.CHGCAR"]
    assert density("convert", *words, "--augmentation_from", polarised / "CHGCAR") == 0
    assert "belong to atoms or axes" in caplog.text


def test_an_input_is_not_replaced(tmp_path, polarised, grid, capsys):
    before = (polarised / "CHGCAR").read_bytes()
    write_density(grid, tmp_path / "b.cube", "cube")
    for words in (
        ["--input", polarised / "CHGCAR", "--output", polarised / "CHGCAR"],
        ["--input", tmp_path / "b.cube", "--output", polarised / "CHGCAR", "--augmentation_from", polarised / "CHGCAR"],
        ["--input", tmp_path / "b.cube", "--output", tmp_path, "--format", "cube"],
    ):
        assert density("convert", *words) == 2 and "which is also an input" in capsys.readouterr().err
    assert (polarised / "CHGCAR").read_bytes() == before


def test_wrong_words_are_refused(tmp_path, polarised, grid, capsys):
    write_density(grid, polarised / "b.cube", "cube")
    one = ["--input", polarised / "b.cube", "--output"]
    for words, message in (
        (["--input", polarised, "--output", tmp_path / "x.cube"], "2 densities for one file"),
        ([*one, tmp_path / "x.txt"], "says no format"),
        ([*one, tmp_path / "x.CHGCAR.cube.xz"], "says no format"),
        ([*one, polarised / "b.cube", "--format", "zarr"], "is a file; --format needs a folder"),
        ([*one, tmp_path / "x.cube", "--augmentation_from", polarised / "CHGCAR"], "is for CHGCARs"),
        (["--demo", "nothing", "--output", tmp_path / "x.cube"], "no embedded density 'nothing'"),
    ):
        assert density("convert", *words) == 2 and message in capsys.readouterr().err
    assert not list(tmp_path.glob("x*"))
    assert tuple(FORMATS) == (*density_verbs.FORMATS, "qe") == predict_verbs.FORMATS


def test_species_are_for_the_files_of_a_folder_that_name_none_and_ghosts_are_said(tmp_path, grid, capsys):
    for name, numbers in (("a", [11, 9]), ("b", [12, 8])):
        each = DensityGrid(grid.rho, grid.lattice, np.array(numbers), grid.frac_coords, name)
        write_density(each, tmp_path / "in" / f"{name}.CHGCAR", "chgcar")
    nameless = tmp_path / "in" / "a.CHGCAR"
    nameless.write_text(nameless.read_text().replace("Na   F    \n", "", 1))
    words = "convert", "--input", tmp_path / "in", "--output", tmp_path / "out", "--format", "cube"
    assert density(*words) == 1 and density(*words, "--species", "Na", "F") == 0
    found = {name: open_density(tmp_path / "out" / f"{name}.cube").atomic_numbers.tolist() for name in "ab"}
    assert found == {"a": [11, 9], "b": [12, 8]}
    cube = tmp_path / "out" / "a.cube"
    lines = cube.read_text().splitlines()
    lines[2] = lines[2].replace("2", "3", 1)
    cube.write_text("\n".join([*lines[:8], "0 0.0 1.0 1.0 1.0", *lines[8:]]) + "\n")
    capsys.readouterr()
    assert density("show", cube) == 0 and "ghost atoms 1 (Z = 0), left out" in told(capsys)
    assert density("convert", "--input", cube, "--output", tmp_path / "CHGCAR") == 0
    assert "1 ghost atom(s) (Z = 0) not kept" in told(capsys)


def test_two_files_are_compared(tmp_path, polarised, grid, capsys):
    scaled = DensityGrid(grid.rho * 1.05, grid.lattice, grid.atomic_numbers, grid.frac_coords, "scaled")
    write_density(scaled, tmp_path / "scaled.cube", "cube")
    words = ["compare", polarised / "CHGCAR", tmp_path / "scaled.cube", "--accept", "fractional_electrons"]
    report = reported(tmp_path, "density", *words, "--picture", tmp_path / "c.svg")
    assert report["nmae_fraction"] == pytest.approx(0.05, rel=1e-4) and report["nmae_scaled_fraction"] < 1e-6
    assert "NMAE 5 %" in told(capsys) and "calc/CHGCAR" in (tmp_path / "c.svg").read_text()
    assert density("compare", polarised / "CHGCAR", tmp_path / "nothing") == 2


def test_electrons_at_odds_end_show_and_convert(tmp_path, capsys):
    cell = load_stored("GaAs-zinc-blende-ideal")
    for name, factor in (("good", 1.0), ("charged", 9 / 8), ("unit", BOHR_A**-3)):
        each = DensityGrid(cell.rho * factor, cell.lattice, cell.atomic_numbers, cell.frac_coords)
        write_density(each, tmp_path / f"{name}.cube", "cube")
    for name, rule, words in (
        ("charged", "electrons", "9.0000 electrons, which no pseudo"),
        ("unit", "cube_e_per_a3", "this cube is in e/Å³"),
    ):
        path, target = tmp_path / f"{name}.cube", tmp_path / f"{name}.CHGCAR"
        convert = ("convert", "--input", path, "--output", target)
        assert density("show", path) == density(*convert) == 2
        assert " ".join(capsys.readouterr().err.split()).count(words) == 2 and not target.exists()
        assert density(*convert, "--accept", rule) == 0
    # In a folder the others are shown, and the one at odds is named.
    (tmp_path / "charged.CHGCAR").unlink()
    assert density("show", tmp_path, "--accept", "cube_e_per_a3") == 1
    words = told(capsys)
    assert "charged.cube: 9.0000 electrons" in words and "3 read, 1 failed" in words
    assert "one function per element around them leaves 6" in words
    # Valences that are given, or of a POTCAR beside, are the only ones.
    assert density("show", tmp_path / "charged.cube", "--valences", "Ga=4,As=5") == 0
    assert density("show", tmp_path / "good.cube", "--valences", "Ga=13,As=5") == 2
    (tmp_path / "POTCAR").write_text(" VRHFIN =Ga: x\n ZVAL = 13.0\n VRHFIN =As: x\n ZVAL = 5.0\n")
    assert density("show", tmp_path / "good.cube") == 2
