"""Atoms sit on their density in whatever is real, and nowhere else."""

import numpy as np
import pytest
from ionic_density import FCC, caesium_iodide, gallium_arsenide, gaussians, rock_salt, skewed_oxide

from tomat.base.errors import TomatError
from tomat.data.density.atoms_on_density import (
    LARGEST_MISFIT,
    check_atoms_on_density,
    electrons_within,
    misfit_of,
    thomas_fermi_electrons,
)
from tomat.data.density.crystal import Crystal
from tomat.data.density.demo.embedded import demo_materials, load_stored
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.valence_table import readings


def check(grid, values=None, numbers=None, coords=None):
    values = grid.rho_times_volume() if values is None else values
    numbers = grid.atomic_numbers if numbers is None else np.array(numbers)
    coords = grid.frac_coords if coords is None else np.asarray(coords)
    meanings = [each for each in readings(numbers) if abs(each.electrons - float(values.mean())) < 0.05]
    check_atoms_on_density(values, Crystal(grid.lattice, numbers, coords, "file"), meanings)


def test_no_embedded_density_is_refused_and_all_are_with_their_atoms_moved():
    shares, moved = [], []
    for index, material in enumerate(demo_materials()):
        grid = load_stored(material.material_id)  # which its reader checks
        if index % 3 == 0:
            shares.append(misfit_of(grid.rho, Crystal.of(grid)).share)
            elsewhere = Crystal(grid.lattice, grid.atomic_numbers, grid.frac_coords + [0.13, 0.21, 0.37])
            moved.append(misfit_of(grid.rho, elsewhere).share)
    assert max(shares) < 0.12 and min(moved) > LARGEST_MISFIT


@pytest.mark.parametrize("crystal", [gallium_arsenide, caesium_iodide, rock_salt, skewed_oxide])
def test_whole_densities(crystal):
    check(crystal())


def test_molecules_slabs_empty_ions_holes_and_coarse_grids():
    places = np.array([[4, 4, 4], [4, 4.757, 4.587], [4, 3.243, 4.587]]) / 8
    for n in (40, 12):  # with 0.67 A a voxel there is nothing to judge by
        check(gaussians(8 * np.eye(3), [8, 1, 1], places, {8: 6, 1: 1}, (n, n, n)))
    slab = np.diag([4.0, 4.0, 20.0])
    check(gaussians(slab, [12, 8], [[0, 0, 0.4], [0.5, 0.5, 0.5]], {12: 2, 8: 6}, (20, 20, 100)))
    check(gaussians(4.02 * FCC, [3, 9 - 1], [[0, 0, 0], [0.5] * 3], {3: 1e-9, 8: 7}, (20, 20, 20)))
    metal = gaussians(4.05 * FCC, [13], [[0, 0, 0]], {13: 3}, (20, 20, 20))
    hole = gaussians(4.05 * FCC, [12], [[0, 0, 0]], {12: 0.2}, (20, 20, 20))
    values = metal.rho_times_volume() - hole.rho_times_volume() * 0.9
    check(metal, values * 3 / values.mean())


@pytest.mark.parametrize("shape", [(18, 21, 23), (20, 20, 20)])
def test_the_other_order_of_axes(shape):
    grid = skewed_oxide(shape)
    values = grid.rho_times_volume()
    scrambled = values.ravel().reshape(shape, order="F")
    with pytest.raises(TomatError, match="other order of axes, z fastest where x is expected"):
        check(grid, scrambled)
    with pytest.raises(TomatError, match="other order of axes, . fastest"):
        check(grid, values.ravel(order="F").reshape(shape))


def test_atoms_in_another_unit_are_told():
    grid = skewed_oxide()
    with pytest.raises(TomatError, match="atoms are in A in a cell in bohr, expected 1.89 times"):
        check(grid, coords=grid.frac_coords * BOHR_A)
    with pytest.raises(TomatError, match="atoms are in bohr in a cell in A, expected 0.5292 times"):
        check(grid, coords=grid.frac_coords / BOHR_A)
    with pytest.raises(TomatError, match="off by half the cell"):
        check(grid, coords=grid.frac_coords + 0.5)


def test_missing_and_exchanged_atoms_and_electrons_without_cores():
    grid = skewed_oxide()
    with pytest.raises(TomatError, match=r"file: the density does not lie on the atoms.* A from the nearest"):
        check(grid, numbers=grid.atomic_numbers[:2], coords=grid.frac_coords[:2])  # an oxygen is gone
    with pytest.raises(TomatError, match="file: the density does not fit the elements of its atoms"):
        check(rock_salt(), numbers=[17] * 4 + [11] * 4)
    grid = caesium_iodide()
    with pytest.raises(TomatError, match=r"108 \(I 53, Cs 55\) would be all electrons, but .* within 0.5 A"):
        check(grid, values=grid.rho_times_volume() * 108 / 16)


def test_electrons_within_a_sphere_and_of_thomas_and_fermi():
    grid = gaussians(8 * np.eye(3), [14], [[0.3, 0.4, 0.5]], {14: 4}, (50, 50, 50))
    # Of a Gaussian of width s: 1 - the tail of a chi distribution; 0.1987 within s, 0.7385 within 2 s.
    for radius, share in ((0.7, 0.1987), (1.4, 0.7385)):
        found = electrons_within(grid.rho_times_volume(), grid.lattice, grid.frac_coords[0], radius)
        assert found == pytest.approx(4 * share, rel=0.03)
    assert thomas_fermi_electrons(55, 50.0) == pytest.approx(55, rel=1e-3)
    assert thomas_fermi_electrons(55, 1e-6) == pytest.approx(0, abs=1e-3)
    assert 36 < thomas_fermi_electrons(55, 0.5) < 46  # the 46 of krypton's shells and 4d lie mostly within
