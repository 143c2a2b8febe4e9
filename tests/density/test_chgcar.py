import numpy as np
import pytest

from tomat.density.chgcar import read_chgcar, write_chgcar
from tomat.density.grid import DensityGrid
from tomat.errors import TomatError


@pytest.mark.parametrize("name", ["CHGCAR", "CHGCAR.gz", "CHGCAR.bz2"])
def test_round_trip(tmp_path, grid, name):
    write_chgcar(grid, tmp_path / name)
    back = read_chgcar(tmp_path / name, "LiF")
    np.testing.assert_allclose(back.rho, grid.rho, rtol=1e-5)
    np.testing.assert_allclose(back.lattice, grid.lattice, atol=1e-6)
    np.testing.assert_allclose(back.frac_coords, grid.frac_coords, atol=1e-6)
    assert back.atomic_numbers.tolist() == [3, 9] and back.material_id == "LiF"
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_atoms_in_any_order_keep_their_places(tmp_path, grid):
    swapped = DensityGrid(grid.rho, grid.lattice, grid.atomic_numbers[::-1], grid.frac_coords[::-1])
    write_chgcar(swapped, tmp_path / "CHGCAR")
    back = read_chgcar(tmp_path / "CHGCAR")
    places = {int(z): coords for z, coords in zip(back.atomic_numbers, back.frac_coords, strict=True)}
    for number, coords in zip(grid.atomic_numbers, grid.frac_coords, strict=True):
        np.testing.assert_allclose(places[int(number)], coords, atol=1e-6)


HELIUM = """He
1.0
 3.0 0.0 0.0
 0.0 2.0 0.0
 0.0 0.0 4.0
He
 1
Direct
 0.0 0.0 0.0

 3 2 1
 {} {} {} {} {}
 {}
"""
"""3 x 2 x 1 voxels of helium in a cell of 24 A^3."""


def test_a_chgcar_written_by_hand_runs_x_fastest(tmp_path):
    (tmp_path / "CHGCAR").write_text(HELIUM.format(0.5, 1.0, 2.0, 2.5, 3.0, 4.0))
    grid = read_chgcar(tmp_path / "CHGCAR")
    expected = np.array([[[0.5], [2.5]], [[1.0], [3.0]], [[2.0], [4.0]]]) / 24
    np.testing.assert_allclose(grid.rho, expected, rtol=1e-6)
    assert grid.electron_count == pytest.approx(13 / 6)


def test_a_missing_file(tmp_path):
    with pytest.raises(TomatError, match="no CHGCAR at .*absent"):
        read_chgcar(tmp_path / "absent")


@pytest.mark.parametrize("share", [0.02, 0.2, 0.5, 0.9])
def test_a_file_that_ends_early(tmp_path, grid, share):
    whole = tmp_path / "CHGCAR"
    write_chgcar(grid, whole)
    text = whole.read_text()
    whole.write_text(text[: int(share * len(text))])
    with pytest.raises(TomatError, match="CHGCAR is not a complete CHGCAR"):
        read_chgcar(whole)


@pytest.mark.parametrize("content", [b"", b"\x00\xff" * 300, b"hello\n" * 40, b"\x1f\x8b broken"])
def test_a_file_that_is_none(tmp_path, content):
    for name in ("CHGCAR", "CHGCAR.gz"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TomatError, match="is not a complete CHGCAR"):
            read_chgcar(tmp_path / name)


def test_a_word_among_the_numbers(tmp_path, grid):
    path = tmp_path / "CHGCAR"
    write_chgcar(grid, path)
    lines = path.read_text().splitlines()
    lines[14] = lines[14].replace(lines[14].split()[1], "*" * 17)
    path.write_text("\n".join(lines))
    with pytest.raises(TomatError, match="is not a complete CHGCAR"):
        read_chgcar(path)


def test_values_in_another_unit(tmp_path):
    path = tmp_path / "CHGCAR"
    path.write_text(HELIUM.format(*[value / 24 for value in (0.5, 1.0, 2.0, 2.5, 3.0, 4.0)]))
    with pytest.raises(TomatError, match=r"look like e/A\^3"):
        read_chgcar(path)


def test_a_folder_that_does_not_exist_is_one_error(tmp_path, grid):
    with pytest.raises(TomatError, match="cannot write"):
        write_chgcar(grid, tmp_path / "absent" / "CHGCAR")
