import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.checks import (
    check_electrons,
    check_rho_times_volume,
    check_zeros,
    density_of,
    plausible_electron_counts,
)
from tomat.data.density.grid import DensityGrid
from tomat.data.density.rules import ACCEPTABLE, ReadRules


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


def test_some_zeros_at_a_nucleus_pass():
    values = np.ones((40, 40, 40))
    values[10, 10, 5:10] = 0
    check_zeros(values, "file")


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("length", [16, 512, 4096])
def test_a_run_of_zeros_in_the_order_of_the_file_is_refused(order, length):
    values = np.random.default_rng(0).uniform(0.5, 2, 40**3)
    values[20_000 : 20_000 + length] = 0
    with pytest.raises(
        TomatError, match=f"file: {length:,} of 64,000 values are exactly zero.*in a row.*fetch it again"
    ):
        check_zeros(values.reshape((40, 40, 40), order=order), "file")


def test_zeros_scattered_and_in_a_chunk_are_refused():
    scattered = np.random.default_rng(0).uniform(0.5, 2, (40, 40, 40))
    scattered[np.random.default_rng(1).uniform(size=scattered.shape) < 0.01] = 0
    chunk = np.random.default_rng(0).uniform(0.5, 2, (64, 64, 64))
    chunk[16:32, 16:32, 16:32] = 0
    for values in (scattered, chunk):
        with pytest.raises(TomatError, match="beside ordinary values"):
            check_zeros(values, "file")


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("distances", {"lattice": 10}, "A.3 for an atom|closest atoms"),
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
    lattice = grid.lattice * damage.get("lattice", 1)

    def read(*accept):
        rules = ReadRules(accept=accept)
        return density_of(
            values, lattice, grid.atomic_numbers, grid.frac_coords, source="file", material_id="LiF", rules=rules
        )

    with pytest.raises(TomatError, match=message):
        read()
    with pytest.raises(TomatError, match=message):
        read(*[other for other in ACCEPTABLE if other != name])
    np.testing.assert_allclose(read(name).rho_times_volume(), values, rtol=1e-5)


def test_rules_that_do_not_exist():
    with pytest.raises(TomatError, match="--species names 'Xx', which is no element"):
        ReadRules(species=("Na", "Xx"))
    with pytest.raises(TomatError, match="--accept names 'all'; expected some of not_total, distances"):
        ReadRules(accept=("all",))
