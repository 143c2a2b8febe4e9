import numpy as np
import pytest

from tomat.density.checks import check_electrons, check_rho_times_volume, plausible_electron_counts
from tomat.density.grid import DensityGrid
from tomat.errors import TomatError


def check(values, grid):
    check_rho_times_volume(values, grid.lattice, grid.atomic_numbers, "file")


def test_a_density_in_the_right_unit_passes(grid):
    values = grid.rho_times_volume()
    values[0, 0, 0] = -1e-3
    check(values, grid)


def test_the_message_names_the_unit_found(grid):
    with pytest.raises(TomatError, match=r"file: .*look like e/A\^3; multiply them by the cell volume"):
        check(grid.rho, grid)
    with pytest.raises(TomatError, match=r"look like e/bohr\^3"):
        check(grid.rho * 0.529177210903**3, grid)
    with pytest.raises(TomatError, match="damaged or belongs to another structure"):
        check(grid.rho_times_volume() * 1e4, grid)


def test_what_has_both_signs_is_no_total_density(grid):
    difference = grid.rho_times_volume()
    difference[::2] *= -1
    with pytest.raises(TomatError, match="spin or difference density"):
        check(difference, grid)


def test_values_that_are_not_finite_are_counted(grid):
    values = grid.rho_times_volume()
    values[1, 1, 1:3] = np.inf
    with pytest.raises(TomatError, match=f"2 of {values.size} values are NaN or infinite"):
        check(values, grid)


def test_all_electron_and_valence_counts_are_plausible():
    least, most = plausible_electron_counts(np.array([3, 9]))
    assert least < 8 and 12 < most  # Li-q1 + F-q7 to all electrons


def test_check_electrons_refuses_rho_times_volume_taken_for_rho(grid):
    wrong = DensityGrid(grid.rho * grid.volume_a3, grid.lattice, grid.atomic_numbers, grid.frac_coords)
    check_electrons(grid, "good")
    with pytest.raises(TomatError, match="bad: the density integrates to"):
        check_electrons(wrong, "bad")
