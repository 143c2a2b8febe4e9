"""Cubes of others are read as they mean them, and whole; what pymatgen writes and reads is the judge."""

import numpy as np
import pytest
from pymatgen.io.common import VolumetricData

from tomat.base.errors import TomatError
from tomat.data.density.cube import read_cube, read_cube_parts, write_cube
from tomat.data.density.geometry import BOHR_A


@pytest.fixture
def text(tmp_path, grid) -> str:
    with (tmp_path / "a.cube").open("wb") as file:
        write_cube(grid, file)
    return (tmp_path / "a.cube").read_text()


def same(found, grid, rtol=1e-6):
    assert np.abs(found.rho - grid.rho).max() <= rtol * grid.rho.max()
    assert found.electron_count == pytest.approx(grid.electron_count, rel=rtol)
    np.testing.assert_allclose(found.lattice, grid.lattice, rtol=10 * rtol)
    away = found.frac_coords - grid.frac_coords
    assert np.abs(away - np.round(away)).max() < 10 * rtol
    assert found.atomic_numbers.tolist() == grid.atomic_numbers.tolist()


def test_what_pymatgen_writes_is_read(tmp_path, grid):
    values = grid.rho.astype(np.float64) * BOHR_A**3
    VolumetricData(grid.structure, {"total": values}).to_cube(str(tmp_path / "p.cube"))
    same(read_cube(tmp_path / "p.cube"), grid, rtol=1e-5)  # six decimals of a voxel's side


def test_lengths_in_angstrom_and_another_origin(tmp_path, text, grid):
    lines = text.splitlines()
    shift = np.array([0.3, -0.2, 0.5])
    lines[2] = "2 " + " ".join(map(str, shift)) + " 1"
    for index in (3, 4, 5):
        side, *vector = lines[index].split()
        lines[index] = f"-{side} " + " ".join(str(float(word) * BOHR_A) for word in vector)
    for index in (6, 7):
        number, charge, *place = lines[index].split()
        moved = np.array(place, float) * BOHR_A + shift
        lines[index] = f"{number} {charge} " + " ".join(map(str, moved))
    (tmp_path / "b.cube").write_text("\n".join(lines))
    same(read_cube(tmp_path / "b.cube"), grid)


def data_sets(text, *names):
    """With a negative number of atoms, and the data sets after them."""
    lines = text.splitlines()
    lines[2] = lines[2].replace("2", "-2", 1)
    lines.insert(8, " ".join(map(str, (len(names), *names))))
    return "\n".join(lines)


def test_a_negative_number_of_atoms_with_one_data_set_is_one_density(tmp_path, text, grid):
    (tmp_path / "one.cube").write_text(data_sets(text, 7))
    same(read_cube(tmp_path / "one.cube"), grid)
    for names in ((), (7, 8), tuple(range(30))):
        (tmp_path / "many.cube").write_text(data_sets(text, *names))
        with pytest.raises(TomatError, match=r"holds orbitals, or several data sets: .* Write each data set"):
            read_cube(tmp_path / "many.cube")


def test_ghost_atoms_are_left_out_and_said(tmp_path, text, grid, caplog):
    lines = text.splitlines()
    lines[2] = lines[2].replace("2", "4", 1)
    # On top of an atom, as in a counterpoise correction, and alone.
    lines[7:7] = ["0 0.0 " + lines[6].split(maxsplit=2)[2], "0 0.0 1.0 1.0 1.0"]
    (tmp_path / "g.cube").write_text("\n".join(lines))
    same(read_cube(tmp_path / "g.cube"), grid)
    assert "2 ghost atom(s) (Z = 0)" in caplog.text
    assert read_cube_parts(tmp_path / "g.cube").ghost_atoms == 2
    lines[6], lines[9] = ("0" + lines[index].lstrip()[1:] for index in (6, 9))
    (tmp_path / "g.cube").write_text("\n".join(lines))
    with pytest.raises(TomatError, match="atomic numbers .0, 0, 0, 0.; expected 1..118"):
        read_cube(tmp_path / "g.cube")


def test_exponents_of_fortran_and_a_last_line_in_full(tmp_path, text, grid):
    head, values = text.splitlines()[:8], text.split("\n", 8)[8].split()
    head[3:8] = [line + "D0" for line in head[3:8]]
    words = [word.replace("E", "D") for word in values] + ["0.0D+00"] * 3
    rows = [" ".join(words[start : start + 7]) for start in range(0, len(words), 7)]
    assert len(words) > len(values) and len(rows[-1].split()) == 4
    (tmp_path / "d.cube").write_text("\n".join([*head, *rows]) + "\n")
    same(read_cube(tmp_path / "d.cube"), grid)


def test_what_is_no_whole_density_is_refused(tmp_path, text):
    lines = text.splitlines()
    for bad, message in (
        (lines[:-1], "is not a complete cube: the end after 1.. of 120 values of the grid 6 x 5 x 4"),
        ([*lines, " 1.0"], "goes on after the 120 values"),
        ([*lines[:2], "2 0 0 0 3", *lines[3:]], "3 values a voxel"),
        ([*lines[:8], *[""] * 1200, *lines[8:]], "blank lines after 0 of 120 values"),
        ([*lines[:3], "-6 1 0 0", *lines[4:]], "expected three of one sign"),
    ):
        (tmp_path / "bad.cube").write_text("\n".join(bad))
        with pytest.raises(TomatError, match=message):
            read_cube(tmp_path / "bad.cube")
