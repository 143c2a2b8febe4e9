import numpy as np
import pytest
from embedded_set_cells import CellRecipe, Distortion
from embedded_set_dft import calculate, time_reversal_mesh
from embedded_set_recipes import cell_recipes
from hypothesis import given, settings
from hypothesis import strategies as st

SILICON = CellRecipe(
    material_id="Si-test", compound="Si", structure_type="diamond", split="train", variant="ideal",
    lattice_a=((0.0, 2.7155, 2.7155), (2.7155, 0.0, 2.7155), (2.7155, 2.7155, 0.0)), symbols=("Si", "Si"),
    valence=(4, 4), frac_coords=((0.0, 0.0, 0.0), (0.25, 0.25, 0.25)), e_cut_hartree=6.0, k_mesh=(2, 2, 2),
    k_shift=(1, 1, 1), distortion=Distortion(), group="crystals", engine="eminus", smearing_hartree=0.0,
)  # fmt: skip
"""A calculation of about a second: four bands, a low cut-off, four k-points."""


def test_a_real_calculation_converges_to_the_valence_electrons_and_has_its_bonds():
    calculation = calculate(SILICON)
    record = calculation.record
    assert not calculation.reason and record["converged"]
    assert record["electron_count"] == pytest.approx(8, abs=1e-9)
    assert record["pseudopotentials"] == ["Si GTH-PBE-q4"]
    assert abs(record["last_energy_change_hartree"]) < record["energy_tolerance_hartree"]
    # No coefficient was lost to the smallest grid.
    assert record["fourier_truncation_nmae"] < 1e-12
    # A density of orbitals is nowhere negative, also after it was cut to the smallest grid. Diamond and the mesh are
    # unchanged by exchanging the axes; the start of the minimisation, random, is not.
    rho = calculation.rho
    assert rho.min() > 0
    for axes in ((1, 0, 2), (2, 1, 0), (1, 2, 0)):
        assert np.abs(rho - rho.transpose(axes)).sum() < 1e-3 * rho.sum()
    # Between two neighbours, at (1/8, 1/8, 1/8), stands the bond; the empty site (5/8, 5/8, 5/8) is nearly void.
    index = np.stack(np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in rho.shape], indexing="ij"), axis=-1)
    spectrum = np.fft.fftn(rho) / rho.size
    bond, void = (np.sum(spectrum * np.exp(2j * np.pi * index @ np.full(3, at))).real for at in (0.125, 0.625))
    assert bond > 0.8 * rho.max() and void < 0.1 * bond


@given(st.tuples(*[st.integers(1, 5)] * 3), st.tuples(*[st.integers(0, 1)] * 3))
@settings(max_examples=40, deadline=None)
def test_time_reversal_mesh_is_the_whole_mesh(mesh, shift):
    """Summing a function of k that is even and periodic gives the same as over the full mesh."""
    k_points, weights = time_reversal_mesh(mesh, shift)
    full = (np.indices(mesh).reshape(3, -1).T + np.array(shift) / 2) / np.array(mesh)

    def even(k):
        return np.cos(2 * np.pi * k @ np.array([1, 2, -1])) + np.cos(2 * np.pi * k @ np.array([3, 0, 1]))

    assert weights.sum() == pytest.approx(1)
    assert weights @ even(k_points) == pytest.approx(even(full).mean(), abs=1e-12)
    assert len(k_points) <= len(full) // 2 + 4 and np.abs(k_points).max() <= 0.5


def test_every_recipe_can_be_computed():
    recipes = cell_recipes()
    assert len({recipe.material_id for recipe in recipes}) == len(recipes) >= 40
    # No compound is in both halves, in whatever structure.
    train, held_out = ({one.compound for one in recipes if one.split == half} for half in ("train", "validation"))
    assert held_out and held_out.isdisjoint(train)
    for recipe in recipes:
        if recipe.engine == "eminus":
            k_points, weights = time_reversal_mesh(recipe.k_mesh, recipe.k_shift)
            np.testing.assert_allclose(weights, 1 / len(k_points), err_msg=recipe.material_id)
        assert sum(recipe.valence) % 2 == 0 or recipe.smearing_hartree, recipe.material_id
        # A misplaced atom or a wild rattle would bring two together: the shortest bond of the crystals, of diamond, is
        # 1.54 A, that of a hydrogen 0.96 A; the longest, of CsI, 3.96 A, and of what stands alone its box is wider.
        coords, images = np.array(recipe.frac_coords), np.indices((3, 3, 3)).reshape(3, -1).T - 1
        difference = coords[:, None, None, :] - coords[None, :, None, :] + images
        distances = np.linalg.norm(difference @ np.array(recipe.lattice_a), axis=-1)
        least, most = (0.9, 4.1) if "H" in recipe.symbols else (1.0, 4.7) if len(recipe.symbols) > 1 else (2.6, 9.1)
        assert least < distances[distances > 1e-6].min() < most, recipe.material_id
