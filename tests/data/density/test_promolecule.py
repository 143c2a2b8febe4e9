import dataclasses
import json

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.geometry import void_radius_a
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, PromoleculeFit, RadialBasis, radial_sums

BASIS = RadialBasis(6, 3.0, 0.5)
LATTICE = np.array([[3.4, 0.2, 0.0], [1.2, 3.1, 0.3], [-0.4, 0.9, 3.8]])


@pytest.fixture(scope="module")
def promolecule() -> Promolecule:
    rng = np.random.default_rng(1)
    return Promolecule(BASIS, {z: rng.uniform(0.1, 2.0, BASIS.n) for z in (3, 9, 17)})


def crystal_of(seed: int, numbers: list[int]) -> Crystal:
    rng = np.random.default_rng(seed)
    strain = np.eye(3) + rng.uniform(-0.1, 0.1, (3, 3))
    return Crystal(LATTICE @ strain, np.array(numbers), rng.uniform(-1, 2, (len(numbers), 3)), f"mp-{seed}")


def grid_of(promolecule: Promolecule, crystal: Crystal, shape=(18, 17, 20)) -> DensityGrid:
    """The density that a promolecule gives, from sums over images that take no table."""
    places = np.stack(np.meshgrid(*(np.arange(n) / n for n in shape), indexing="ij"), axis=-1).reshape(-1, 3)
    rho = brute_force(promolecule, crystal, places)
    return DensityGrid(rho.reshape(shape), crystal.lattice, crystal.atomic_numbers, crystal.frac_coords, crystal.name)


def brute_force(promolecule: Promolecule, crystal: Crystal, places: np.ndarray) -> np.ndarray:
    images = np.array(list(np.ndindex(9, 9, 9))) - 4
    total = np.zeros(len(places))
    for number, atom in zip(crystal.atomic_numbers.tolist(), crystal.frac_coords, strict=True):
        for image in atom - np.floor(atom) + images:
            distance = np.linalg.norm((places - image) @ crystal.lattice, axis=1)
            near = distance < BASIS.cutoff_a
            total[near] += BASIS(distance[near]) @ promolecule.coefficients[number]
    return total


CRYSTALS = [(0, [3, 9]), (1, [3, 3, 17]), (2, [9, 17]), (3, [9])]


@pytest.fixture(scope="module")
def densities(promolecule) -> list[DensityGrid]:
    return [grid_of(promolecule, crystal_of(seed, numbers)) for seed, numbers in CRYSTALS]


def fit_to(grids: list[DensityGrid]) -> PromoleculeFit:
    fit = PromoleculeFit(BASIS)
    for grid in grids:
        fit.add(grid, voxels=1500, material_id=grid.material_id)
    return fit


def test_density_and_sums_are_those_of_all_images(promolecule, densities):
    for grid in densities[:2]:
        found = promolecule.density(Crystal.of(grid), grid.grid_shape)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, grid.rho, rtol=2e-5, atol=1e-6)
        assert promolecule.nmae(grid) < 1e-6
    crystal = crystal_of(1, [3, 3, 17])
    places = np.random.default_rng(0).uniform(-3, 3, (1100, 3))
    sums = radial_sums(crystal, places, BASIS)
    assert sorted(sums) == [3, 17]
    total = sum(sums[z] @ promolecule.coefficients[z] for z in sums)
    np.testing.assert_allclose(total, brute_force(promolecule, crystal, places - np.floor(places)), rtol=1e-12)


def test_voxels_on_a_nucleus_and_cells_smaller_than_the_reach(promolecule):
    crystal = Crystal(np.diag([2.0, 1.1, 5.0]), np.array([9]), np.array([[0.5, 0.0, 0.25]]))
    grid = grid_of(promolecule, crystal, (4, 3, 8))
    np.testing.assert_allclose(promolecule.density(crystal, (4, 3, 8)), grid.rho, rtol=2e-5)


def test_a_density_made_of_such_functions_is_found_again(promolecule, densities):
    found = fit_to(densities).solve()
    assert found.elements == (3, 9, 17) and found.n_materials == 4
    for z in found.elements:
        np.testing.assert_allclose(found.coefficients[z], promolecule.coefficients[z], atol=2e-4)
    assert max(found.nmae(grid) for grid in densities) < 1e-5


def test_no_coefficient_is_negative(densities):
    hollow = [dataclasses.replace(each, rho=np.maximum(each.rho - np.median(each.rho), 0)) for each in densities]
    coefficients = np.array(list(fit_to(hollow).solve().coefficients.values()))
    assert coefficients.min() == 0 and (coefficients == 0).sum() > 1


def test_parts_in_a_fixed_order_are_the_same_to_the_bit_however_they_travel(densities):
    parts = [fit_to([grid]) for grid in densities]
    whole = PromoleculeFit(BASIS)
    for part in parts:
        whole.merge(part)
    travelled = PromoleculeFit(BASIS)
    for part in parts:
        content = part.to_bytes()
        travelled.merge(PromoleculeFit.from_bytes(content, "part", "Again."))
        assert PromoleculeFit.from_bytes(content, "part", "Again.").to_bytes() == content
    assert travelled.solve().to_text() == whole.solve().to_text()
    voids_a = [void_radius_a(grid.lattice, grid.frac_coords) for grid in densities]
    assert Promolecule.from_text(whole.solve().to_text(), "p").void_radius_a == max(voids_a)
    travelled.void_radii_a.pop()  # as where an earlier tomat surveyed a part
    assert travelled.solve().void_radius_a is None
    assert travelled.material_ids == [f"mp-{seed}" for seed, _ in CRYSTALS]
    # One by one in one process: the same sums but for rounding.
    for key, values in fit_to(densities).products.items():
        np.testing.assert_allclose(whole.products[key], values, rtol=1e-12)
    with pytest.raises(TomatError, match="different radial functions"):
        whole.merge(PromoleculeFit())
    fit, one = PromoleculeFit(), densities[0]
    with pytest.raises(TomatError, match="mp-0 is zero at all 100 voxels"):
        fit.add(dataclasses.replace(one, rho=0 * one.rho), voxels=100)
    assert not fit.products and not fit.n_materials
    with pytest.raises(TomatError, match="no density"):
        fit.solve()


def test_text_round_trip_table_and_electrons(promolecule, tmp_path):
    crystal = crystal_of(5, [3, 17])
    rho, electrons = promolecule.density(crystal, (48, 48, 48)), promolecule.electrons()
    assert rho.mean(dtype=np.float64) * crystal.volume_a3 == pytest.approx(electrons[3] + electrons[17], rel=1e-3)
    path = tmp_path / "promolecule.json"
    path.write_text(promolecule.to_text())
    found = Promolecule.load(path)
    assert found.sha256 == promolecule.sha256 and found.to_text() == promolecule.to_text()
    table = found.table()
    assert table.shape == (119, BASIS.n) and np.flatnonzero(table.any(axis=1)).tolist() == [3, 9, 17]
    with pytest.raises(TomatError, match="none.json: cannot be read .*tomat promolecule fit"):
        Promolecule.load(tmp_path / "none.json")
    with pytest.raises(TomatError, match="mp-7 has Na, which no training density had; the model knows Li F Cl"):
        promolecule.density(crystal_of(7, [3, 11, 17]), (4, 4, 4))


def test_damage_is_refused(promolecule):
    content = json.loads(promolecule.to_text())
    changes = [{"n_materials": 7}, {"format": "other"}, {"basis": {"n": 1}}, {"basis": content["basis"] | {"n": 2}}]
    changes += [{"coefficients_e_per_a3": {"Li": [10**400]}}, {"coefficients_e_per_a3": {"Xx": [1.0]}}]
    texts = [json.dumps(each) for each in ({}, [], 3, *(content | change for change in changes))]
    texts += ["", "{", promolecule.to_text()[:-40], "[" * 100_000]
    for text in texts:
        with pytest.raises(TomatError, match="p.json is (not a promolecule|damaged).* Fit it again"):
            Promolecule.from_text(text, "p.json")
    part = fit_to([]).to_bytes()
    for content in (b"", part[: len(part) // 2], part[:100] + b"\0\0\0\0" + part[104:], b"[1, 2]"):
        with pytest.raises(TomatError, match="part.npz is .*Again."):
            PromoleculeFit.from_bytes(content, "part.npz", "Again.")


def test_a_very_skewed_cell_has_the_density_of_the_plain_one(promolecule):
    """100,000 steps of a along b, on a grid of which each voxel has its place in the plain cell's."""
    plain = crystal_of(0, [3, 9])
    whole = np.array([[1, 0, 0], [100_000, 1, 0], [0, -7, 1]])
    back = np.round(np.linalg.inv(whole))
    skewed = Crystal(whole @ plain.lattice, plain.atomic_numbers, plain.frac_coords @ back)
    shape = (8, 7, 9)
    places = np.stack(np.meshgrid(*(np.arange(n) / n for n in shape), indexing="ij"), axis=-1).reshape(-1, 3)
    expected = brute_force(promolecule, plain, places @ whole % 1)
    found = promolecule.density(skewed, shape)
    np.testing.assert_allclose(found.ravel(), expected, rtol=1e-5, atol=1e-5)
    sums, theirs = (radial_sums(*at, BASIS) for at in ((skewed, places), (plain, places @ whole)))
    for number in (3, 9):
        np.testing.assert_allclose(sums[number], theirs[number], atol=1e-5)


def test_a_sum_of_the_first_functions_ends_where_they_do(densities):
    crystal, grid = Crystal.of(densities[0]), (7, 8, 9)
    for kept in (0, 1, 3, BASIS.n):
        coefficients = np.where(np.arange(BASIS.n) < kept, 0.3, 0.0)
        reach_a = BASIS.reach_a(coefficients)
        assert 0 <= reach_a <= BASIS.cutoff_a
        assert not (BASIS(np.linspace(reach_a + 1e-9, BASIS.cutoff_a, 50)) @ coefficients).any()
        assert not kept or (BASIS(np.array([0.98 * reach_a])) @ coefficients > 0).all()
        found = Promolecule(BASIS, dict.fromkeys(set(crystal.atomic_numbers.tolist()), coefficients))
        places = np.stack(np.meshgrid(*(np.arange(n) / n for n in grid), indexing="ij"), axis=-1).reshape(-1, 3)
        expected = brute_force(found, crystal, places)
        np.testing.assert_allclose(found.density(crystal, grid).ravel(), expected, rtol=1e-5, atol=1e-5)


BASES = [RadialBasis(), RadialBasis(4, 2.0, 0.1), RadialBasis(9, 3.0, 5.0)]


@pytest.mark.parametrize("basis", BASES)
def test_four_functions_a_distance_are_all_and_add_up_to_one_but_for_the_end(basis):
    r = np.concatenate([[0.0], np.linspace(1e-9, basis.cutoff_a * (1 - 1e-12), 3001)])
    dense = np.zeros((len(r), basis.n))
    for function, values in basis.nonzero(r):
        assert function.min() >= 0 and function.max() < basis.n
        np.add.at(dense, (np.arange(len(r)), function), values)
    np.testing.assert_allclose(dense, basis(r), atol=1e-14)
    inner = basis.stretch_a * np.expm1((basis.n - 2) / basis.scale)
    np.testing.assert_allclose(basis(np.linspace(0, inner, 100)).sum(axis=1), 1.0, atol=1e-12)


@pytest.mark.parametrize("basis", BASES)
def test_every_function_ends_smoothly_at_the_cutoff_and_is_flat_at_the_nucleus(basis):
    h = 1e-4 * basis.cutoff_a
    before = basis(basis.cutoff_a - h * np.arange(1, 4))
    # Value, slope and curvature vanish: what is left is the cube of the distance in stretched units.
    per_h = basis.scale * h / basis.stretch_a
    assert (before <= (3 * per_h) ** 3).all() and before[:, -1].max() > 0
    assert not basis(np.array([basis.cutoff_a, 2 * basis.cutoff_a])).any()
    near = basis(np.array([0.0, 1e-6, 2e-6]) * basis.stretch_a)
    # A slope of 1 in stretched units would be 1e-6 x scale.
    assert np.abs(near - near[0]).max() < 1e-8


@pytest.mark.parametrize("values", [(3, 5.0, 0.5), (8, 0.0, 0.5), (8, 5.0, -1.0), (8, float("nan"), 1.0)])
def test_what_is_no_basis_is_refused(values):
    with pytest.raises(TomatError, match="at least 4 functions and positive lengths"):
        RadialBasis(*values)
