import dataclasses

import numpy as np
import pytest
from ionic_density import caesium_iodide, gallium_arsenide, rock_salt

from tomat.base.errors import TomatError
from tomat.data.density.checks import (
    ELECTRON_TOLERANCE,
    check_electron_count,
    check_finite,
    check_rho_times_volume,
    check_zeros,
    density_of,
    earned_tolerance,
)
from tomat.data.density.crystal import Crystal
from tomat.data.density.cube import read_cube, write_cube
from tomat.data.density.geometry import BOHR_A
from tomat.data.density.rules import ACCEPTABLE, ReadRules


def of(grid, name="file"):
    return Crystal(grid.lattice, grid.atomic_numbers, grid.frac_coords, name)


def test_values_are_those_of_a_density_in_its_unit(grid):
    values = grid.rho_times_volume()
    values[0, 0, 0] = -1e-3
    check_rho_times_volume(values, of(grid))
    both_signs = values.copy()
    both_signs[::2] *= -1
    for wrong, message in (
        (grid.rho, r"look like e/Å³; multiply them by the cell volume"),
        (grid.rho * BOHR_A**3, r"look like e/bohr\^3"),
        (values * 1e4, "damaged or belongs to another structure"),
        (both_signs, "spin or difference density"),
    ):
        with pytest.raises(TomatError, match=f"file: .*{message}"):
            check_rho_times_volume(wrong, of(grid))
    check_finite(values, "file")
    for bad in (np.nan, -np.inf, 1e30):
        infinite = values.copy()
        infinite[1, 1, 1:3] = bad
        with pytest.raises(TomatError, match="file: 2 of 120 values are NaN, infinite or beyond .* fetch it again"):
            check_finite(infinite, "file")


def slab(shape=(24, 20, 60), clip=0.0):
    """rho x V of 8 electrons in a layer, decaying into vacuum, with ringing of 1e-4 of the mean, as VASP writes it."""
    z = np.abs(np.arange(shape[2]) / shape[2] - 0.5) * 24  # A from the layer
    values = np.broadcast_to(np.exp(-2.0 * np.maximum(z - 2.0, 0.0)), shape).copy()
    values *= np.random.default_rng(0).uniform(0.8, 1.2, shape)
    values *= 8 / values.mean()
    values += 8e-4 * np.random.default_rng(1).normal(size=shape)
    return np.where(values < clip, 0.0, values) if clip is not None else values


@pytest.mark.parametrize("clip", [None, 0.0, 1e-3])
def test_vacuum_that_is_zero_after_clipping_or_rounding_passes(clip):
    values = slab(clip=clip)
    if clip is not None:
        assert np.mean(values == 0) > 0.15
    check_zeros(values, "slab")
    check_zeros(np.moveaxis(values, 2, 0), "slab")


def test_some_zeros_at_a_nucleus_pass_and_no_chunk_run_or_scatter():
    values = np.random.default_rng(0).uniform(0.5, 2, (40, 40, 40))
    nucleus, scattered, chunk = values.copy(), values.copy(), values.copy()
    nucleus[10, 10, 5:10] = 0
    check_zeros(nucleus, "file")
    scattered[np.random.default_rng(1).uniform(size=values.shape) < 0.01] = 0
    chunk[16:32, 16:32, 16:32] = 0
    wrong = [scattered, chunk]
    for length in (16, 4096):
        for order in ("C", "F"):
            run = values.ravel().copy()
            run[20_000 : 20_000 + length] = 0
            wrong.append(run.reshape(values.shape, order=order))
    for each in wrong:
        with pytest.raises(TomatError, match="file: .* of 64,000 values are exactly zero.*in a row.*fetch it again"):
            check_zeros(each, "file")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("distances", {"lattice": 10}, "A.3 per atom|closest atoms"),
        ("zeros", {"zeros": 30}, "exactly zero"),
        ("fractional_electrons", {"factor": 1.05}, "whole number"),
        ("electrons", {"factor": 1.1}, "no pseudopotentials in use"),
    ],
)
def test_every_refusal_is_lifted_by_its_name(grid, name, damage, message):
    values = grid.rho_times_volume() * damage.get("factor", 1)
    if "zeros" in damage:
        values[0, :, :] = 0
        values *= 10 / values.mean()
    parts = values, grid.lattice * damage.get("lattice", 1), grid.atomic_numbers, grid.frac_coords

    def read(*accept):
        return density_of(*parts, source="file", material_id="LiF", rules=ReadRules(accept=accept))

    for others in ((), [other for other in ACCEPTABLE if other != name]):
        with pytest.raises(TomatError, match=message):
            read(*others)
    np.testing.assert_allclose(read(name).rho_times_volume(), values, rtol=1e-5)


def test_rules_that_do_not_exist():
    with pytest.raises(TomatError, match="--species names 'Xx', which is no element"):
        ReadRules(species=("Na", "Xx"))
    with pytest.raises(TomatError, match="--accept names 'all'; expected some of not_total, distances"):
        ReadRules(accept=("all",))


def counted(values, grid, **words):
    return check_electron_count(values, of(grid), **words)


@pytest.mark.parametrize(("crystal", "electrons"), [(gallium_arsenide, 8), (caesium_iodide, 16), (rock_salt, 32)])
def test_a_cube_in_e_per_a3_is_refused_by_unit_and_read_by_its_flag(tmp_path, crystal, electrons):
    grid, rules = crystal(), ReadRules(accept=("cube_e_per_a3",))
    good, bad = tmp_path / "good.cube", tmp_path / "bad.cube"
    for path, factor in ((good, 1.0), (bad, BOHR_A**-3)):
        with path.open("wb") as file:
            write_cube(dataclasses.replace(grid, rho=grid.rho * factor), file)
    assert read_cube(good).electron_count == pytest.approx(electrons, abs=1e-3)
    # The flag is for those whose electrons say so: a good one in the same folder stays as it is.
    assert read_cube(good, rules=rules).electron_count == pytest.approx(electrons, abs=1e-3)
    with pytest.raises(TomatError, match=r"in e/Å³, not in e/bohr\^3.*`--accept cube_e_per_a3`"):
        read_cube(bad)
    found = read_cube(bad, rules=rules)
    np.testing.assert_allclose(found.rho, grid.rho, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("cells", [1, 2])
def test_whole_means_0_05_electrons_whatever_the_size(cells):
    grid = rock_salt((20, 20, 20))
    values = np.tile(grid.rho_times_volume(), (cells,) * 3) * cells**3
    coords = np.concatenate([grid.frac_coords + step for step in np.ndindex(cells, cells, cells)]) / cells
    crystal = Crystal(grid.lattice * cells, np.tile(grid.atomic_numbers, cells**3), coords)
    n = 32 * cells**3
    assert check_electron_count(values, crystal)[0].electrons == n
    for off in (0.2, -0.3, 0.45):
        with pytest.raises(TomatError, match=f"{n + off:.4f} electrons.* off a whole number, expected 0.05"):
            check_electron_count(values * (1 + off / n), crystal)


def test_both_end_points():
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
        counted(one, grid)


def test_a_voxel_over_one_less():
    grid = rock_salt((40, 40, 40))
    lattice = grid.lattice * 40 / 39
    values = grid.rho * abs(np.linalg.det(lattice))
    with pytest.raises(TomatError, match=r"voxels along x, y, z were a side over N.* would hold 32 \(Na 1, Cl 7\)"):
        check_electron_count(values, Crystal(lattice, grid.atomic_numbers, grid.frac_coords))


@pytest.mark.parametrize(("axis", "place"), [(0, 0), (1, 9), (2, 39)])
def test_a_plane_missing(axis, place):
    grid = rock_salt((40, 40, 40))
    values = np.delete(grid.rho_times_volume(), place, axis)
    with pytest.raises(TomatError, match=rf"plane.* along {'xyz'[axis]} .*(missing|may be missing)"):
        counted(values * 39 / 40, grid)


def test_a_whole_number_that_no_potentials_give():
    grid = gallium_arsenide()
    values = grid.rho_times_volume()
    for electrons in (7, 9, 22, 54, 63):
        with pytest.raises(TomatError, match=f"{electrons}.0000 electrons, which no pseudopotentials in use"):
            counted(values * electrons / 8, grid)
    assert counted(values * 9 / 8, grid, accept=("electrons",)) == ()
    # Each refusal has its own flag: one that is no whole number is not lifted by the other name alone.
    assert counted(values * 1.05, grid, accept=("fractional_electrons",)) == ()


def test_valences_that_are_given_are_the_only_ones():
    grid = gallium_arsenide()
    values = grid.rho_times_volume()
    assert counted(values * 8.5 / 8, grid, given={31: 3, 33: 5.5})[0].electrons == 8.5
    with pytest.raises(TomatError, match=r"8.0000 electrons, -10 off the sum of the valences given .*, 18 "):
        counted(values, grid, given={31: 13, 33: 5})
    with pytest.raises(TomatError, match=r"beside it\), 8 "):
        counted(values * 7 / 8, grid, given={31: 3, 33: 5}, accept=("fractional_electrons",))
    assert counted(values * 7 / 8, grid, given={31: 3, 33: 5}, accept=("electrons",)) == ()


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
