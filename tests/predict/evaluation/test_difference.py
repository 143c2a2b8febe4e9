from dataclasses import replace

import numpy as np
import pytest
from small_promolecule import skewed

from tomat.base.errors import TomatError
from tomat.data.density.grid import DensityGrid
from tomat.predict.evaluation.difference import compare_densities


@pytest.fixture
def grid() -> DensityGrid:
    """A band-limited density: one wave along each axis."""
    structure = skewed()
    x, y, z = np.meshgrid(*(np.arange(n) / n for n in (6, 7, 8)), indexing="ij")
    rho = 8 / structure.volume * (1 + 0.3 * np.cos(2 * np.pi * x) + 0.2 * np.sin(2 * np.pi * (y - z)))
    return DensityGrid(rho, structure.lattice.matrix, np.array([11, 9]), structure.frac_coords, "a")


def test_figures_of_a_changed_density(grid):
    other = replace(grid, rho=grid.rho * np.float32(1.1), material_id="b")
    found = compare_densities(grid, other)
    assert found.nmae == pytest.approx(0.1, rel=1e-5) and found.scaled_nmae < 1e-6 and not found.refined
    bumped = grid.rho.copy()
    bumped[1, 2, 3] += 0.5
    largest, place = compare_densities(grid, replace(grid, rho=bumped)).largest
    assert largest == pytest.approx(0.5, rel=1e-5) and place == (1 / 6, 2 / 7, 3 / 8)


def test_grids_that_differ_are_put_on_the_finer_sides(grid):
    found = compare_densities(grid.refined((8, 7, 12)), grid.refined((6, 9, 8)))
    assert found.refined and found.reference.grid_shape == (8, 9, 12) and found.nmae < 1e-6
    # Atoms may be listed in another order.
    turned = replace(grid, atomic_numbers=grid.atomic_numbers[::-1], frac_coords=grid.frac_coords[::-1])
    assert compare_densities(grid, turned).nmae == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"atomic_numbers": np.array([11, 17])}, "a and b differ in atoms: FNa of 2 atoms and ClNa of 2 atoms"),
        ({"lattice": 1.01 * np.array(skewed().lattice.matrix)}, "lattices that differ by 0.037 A"),
        ({"frac_coords": np.array([[0.1, 0.2, 0.3], [0.55, 0.75, 0.83]])}, "at different places: one is 0.11. A away"),
    ],
)
def test_another_crystal_is_refused(grid, change, message):
    with pytest.raises(TomatError, match=message):
        compare_densities(grid, replace(grid, **change, material_id="b"))
