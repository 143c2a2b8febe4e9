"""A count that no potentials give is refused, at any size of the cell, and the likely cause is named."""

import numpy as np
import pytest
from ionic_density import caesium_iodide, gallium_arsenide, rock_salt

from tomat.base.errors import TomatError
from tomat.data.density.checks import density_of
from tomat.data.density.cube import read_cube, write_cube
from tomat.data.density.electron_count import ELECTRON_TOLERANCE, check_electron_count, earned_tolerance
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.grid import DensityGrid
from tomat.data.density.rules import ReadRules


def cube_of(tmp_path, grid, factor=1.0, lattice=None, coords=None):
    path = tmp_path / "x.cube"
    lattice = grid.lattice if lattice is None else lattice
    coords = grid.frac_coords if coords is None else coords
    with path.open("wb") as file:
        write_cube(DensityGrid(grid.rho * factor, lattice, grid.atomic_numbers, coords), file)
    return path


def check(values, grid, **words):
    return check_electron_count(values, grid.lattice, grid.atomic_numbers, "file", **words)


@pytest.mark.parametrize(("crystal", "electrons"), [(gallium_arsenide, 8), (caesium_iodide, 16), (rock_salt, 32)])
def test_a_cube_in_e_per_a3_is_refused_by_unit_and_read_by_its_flag(tmp_path, crystal, electrons):
    grid = crystal()
    good = cube_of(tmp_path, grid)
    assert read_cube(good).electron_count == pytest.approx(electrons, abs=1e-3)
    # The flag is for those whose electrons say so: a good one in the same folder stays as it is.
    rules = ReadRules(accept=("cube_e_per_a3",))
    assert read_cube(good, rules=rules).electron_count == pytest.approx(electrons, abs=1e-3)
    bad = cube_of(tmp_path, grid, factor=BOHR_A**-3)
    with pytest.raises(TomatError, match=r"in e/A\^3, not in e/bohr\^3.*`--accept cube_e_per_a3`"):
        read_cube(bad)
    found = read_cube(bad, rules=rules)
    np.testing.assert_allclose(found.rho, grid.rho, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("cells", [1, 2])
def test_whole_means_0_05_electrons_whatever_the_size(cells):
    grid = rock_salt((20, 20, 20))
    values = np.tile(grid.rho_times_volume(), (cells,) * 3) * cells**3
    numbers = np.tile(grid.atomic_numbers, cells**3)
    n = 32 * cells**3
    assert check_electron_count(values, grid.lattice * cells, numbers, "file")[0].electrons == n
    for off in (0.2, -0.3, 0.45):
        with pytest.raises(TomatError, match=f"{n + off:.4f} electrons.* off a whole number, more than 0.05"):
            check_electron_count(values * (1 + off / n), grid.lattice * cells, numbers, "file")


def test_both_end_points(tmp_path):
    grid = rock_salt((40, 40, 40))
    wrapped = np.pad(grid.rho, (0, 1), mode="wrap")
    lattice = grid.lattice * 41 / 40
    with pytest.raises(TomatError, match=r"along x, y, z are the same.*it holds 32 \(Na 1, Cl 7\)"):
        density_of(
            wrapped * abs(np.linalg.det(lattice)), lattice, grid.atomic_numbers, grid.frac_coords * 40 / 41,
            source="file", material_id="x", rules=ReadRules(),
        )  # fmt: skip
    one = np.pad(grid.rho, ((0, 0), (0, 1), (0, 0)), mode="wrap") * grid.volume_a3
    with pytest.raises(TomatError, match="along y are the same"):
        check(one, grid)


def test_a_voxel_over_one_less():
    grid = rock_salt((40, 40, 40))
    lattice = grid.lattice * 40 / 39
    values = grid.rho * abs(np.linalg.det(lattice))
    with pytest.raises(TomatError, match=r"voxels along x, y, z a side over N .* would hold 32 \(Na 1, Cl 7\)"):
        check_electron_count(values, lattice, grid.atomic_numbers, "file")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("place", [0, 9, 39])
def test_a_plane_missing(axis, place):
    grid = rock_salt((40, 40, 40))
    values = np.delete(grid.rho_times_volume(), place, axis)
    with pytest.raises(TomatError, match=rf"plane.* along {'xyz'[axis]} .*(missing|may be missing)"):
        check(values * 39 / 40, grid)


def test_a_whole_number_that_no_potentials_give():
    grid = gallium_arsenide()
    values = grid.rho_times_volume()
    for electrons in (7, 9, 22, 54, 63):
        with pytest.raises(TomatError, match=f"{electrons}.0000 electrons, which no pseudopotentials in use"):
            check(values * electrons / 8, grid)
    assert check(values * 9 / 8, grid, accept=("electrons",)) == ()
    # Each refusal has its own flag: one that is no whole number is not lifted by the other name alone.
    assert check(values * 1.05, grid, accept=("fractional_electrons",)) == ()


def test_valences_that_are_given_are_the_only_ones():
    grid = gallium_arsenide()
    values = grid.rho_times_volume()
    assert check(values * 8.5 / 8, grid, given={31: 3, 33: 5.5})[0].electrons == 8.5
    with pytest.raises(TomatError, match=r"8.0000 electrons, -10 off what the valences given .* add up to, 18 "):
        check(values, grid, given={31: 13, 33: 5})
    with pytest.raises(TomatError, match="add up to, 8 "):
        check(values * 7 / 8, grid, given={31: 3, 33: 5}, accept=("fractional_electrons",))
    assert check(values * 7 / 8, grid, given={31: 3, 33: 5}, accept=("electrons",)) == ()


def test_what_a_file_earns():
    grid = gallium_arsenide()
    values = grid.rho_times_volume()
    assert earned_tolerance(values, grid.lattice, cube=False) == ELECTRON_TOLERANCE
    # A thousand cells' electrons in sides of six decimals.
    assert 0.001 < earned_tolerance(1000 * values, grid.lattice, cube=True) - ELECTRON_TOLERANCE < 0.1
    # Negative values that a writer set to zero: what was lost is less than what stands beside.
    dipped = values - 1.2 * values[12, 12, 12]
    clipped = np.maximum(dipped, 0)
    assert clipped.mean() - dipped.mean() < earned_tolerance(clipped, grid.lattice, cube=False) < 1
