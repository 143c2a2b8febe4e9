import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tomat.base.errors import TomatError
from tomat.data.density.checks import density_of
from tomat.data.density.grid import DensityGrid
from tomat.data.density.rules import ReadRules

shapes = st.tuples(*[st.integers(1, 7)] * 3)
offsets = st.tuples(*[st.integers(-20, 20)] * 3)
seeds = st.integers(0, 2**32 - 1)


@given(seeds, shapes, offsets, st.tuples(*[st.integers(1, 12)] * 3))
@settings(max_examples=30, deadline=None)
def test_patch_is_the_endless_crystal(make_grid, seed, shape, anchor, sides):
    grid = make_grid(shape, seed)
    patch = grid.patch(anchor, sides)
    assert patch.shape == sides and patch.dtype == np.float32 and patch.flags.c_contiguous
    for index in ((0, 0, 0), tuple(side - 1 for side in sides), (sides[0] // 2, 0, sides[2] - 1)):
        voxel = tuple((a + i) % n for a, i, n in zip(anchor, index, shape, strict=True))
        assert patch[index] == grid.rho[voxel]


@given(seeds, shapes, st.tuples(*[st.integers(2, 3)] * 3))
@settings(max_examples=30, deadline=None)
def test_refining_keeps_every_value_and_the_electrons(make_grid, seed, shape, factors):
    grid = make_grid(shape, seed)
    fine = grid.refined([n * factor for n, factor in zip(shape, factors, strict=True)])
    coarse = fine.rho[tuple(slice(None, None, factor) for factor in factors)]
    np.testing.assert_allclose(coarse, grid.rho, rtol=1e-5, atol=1e-6)
    assert fine.electron_count == pytest.approx(grid.electron_count, rel=1e-5)


@given(seeds, st.tuples(*[st.integers(1, 6)] * 3), st.tuples(*[st.integers(0, 5)] * 3))
@settings(max_examples=30, deadline=None)
def test_refining_is_exact_for_a_finite_fourier_series(seed, reach, extra):
    """A random real Fourier series is known on every grid; refining gives its values on the finer one."""
    rng = np.random.default_rng(seed)
    index = np.stack([rng.integers(-r, r + 1, 8) for r in reach], axis=1)
    amplitude, phase = rng.uniform(0, 1, 8), rng.uniform(0, 2 * np.pi, 8)

    def sample(shape):
        points = np.stack(np.meshgrid(*[np.arange(n) / n for n in shape], indexing="ij"), axis=-1)
        waves = np.cos(2 * np.pi * points @ index.T.astype(float) + phase)
        return 10 + waves @ amplitude

    shape = [2 * r + 1 for r in reach]
    finer = [n + more for n, more in zip(shape, extra, strict=True)]
    grid = DensityGrid(sample(shape), 3 * np.eye(3), np.array([79]), np.zeros((1, 3)))
    np.testing.assert_allclose(grid.refined(finer).rho, sample(finer), rtol=2e-6)


def test_refining_an_even_grid_keeps_the_nyquist_wave_and_cannot_shrink_a_side(grid):
    rho = 5 + np.cos(np.pi * np.arange(4))[:, None, None] * np.ones((1, 2, 3))
    waves = DensityGrid(rho, 3 * np.eye(3), np.array([79]), np.zeros((1, 3)))
    expected = 5 + np.cos(2 * np.pi * 2 * np.arange(8) / 8)[:, None, None] * np.ones((8, 4, 3))
    np.testing.assert_allclose(waves.refined((8, 4, 3)).rho, expected, atol=1e-6)
    with pytest.raises(TomatError, match="no side may shrink"):
        grid.refined((12, 4, 8))


def test_clipping_after_refining_counts_what_it_sets_to_zero():
    rho = np.zeros((5, 1, 1))
    rho[0] = 100.0
    spike = DensityGrid(rho, 3 * np.eye(3), np.array([79]), np.zeros((1, 3)))
    ringing = spike.refined((15, 1, 1)).rho
    fine = spike.refined((15, 1, 1), clip_negative=True)
    assert fine.clipped_voxels == np.count_nonzero(ringing < 0) > 0
    np.testing.assert_array_equal(fine.rho, np.maximum(ringing, 0))
    assert fine.electron_count - fine.clipped_electrons == pytest.approx(spike.electron_count, rel=1e-6)


def test_rho_times_volume_is_the_electron_count_and_negative_values_are_clipped_and_counted(grid):
    parts = (grid.lattice, grid.atomic_numbers, grid.frac_coords)
    how = {"source": "file", "material_id": "LiF", "rules": ReadRules(accept=("fractional_electrons",))}
    values = grid.rho_times_volume()
    assert values.mean(dtype=np.float64) == pytest.approx(10, rel=1e-6)
    again = density_of(values, *parts, **how)
    np.testing.assert_allclose(again.rho, grid.rho, rtol=1e-6)
    assert again.electron_count == pytest.approx(10, rel=1e-6)
    values[0, 0, :2] = -0.01
    clipped = density_of(values, *parts, **how)
    assert clipped.clipped_electrons == pytest.approx(0.02 / values.size, rel=1e-6)
    left = clipped.electron_count - clipped.clipped_electrons
    assert left == pytest.approx(values.mean(dtype=np.float64), abs=1e-5)
    assert clipped.clipped_voxels == 2 and clipped.rho[0, 0, :2].tolist() == [0, 0]


def test_lattice_parameters_and_structure_agree_with_pymatgen(grid):
    from pymatgen.core import Lattice

    lattice = Lattice(grid.lattice)
    assert grid.lattice_parameters == pytest.approx(lattice.parameters)
    assert grid.volume_a3 == pytest.approx(lattice.volume)
    np.testing.assert_allclose(grid.structure.frac_coords, grid.frac_coords)
    assert list(grid.structure.atomic_numbers) == [3, 9] and grid.formula == "FLi"


@pytest.mark.parametrize(
    ("rho", "message"),
    [
        (np.ones((4, 4)), "three sides"),
        (np.ones((0, 4, 4)), "three sides"),
        (np.full((2, 2, 2), np.nan), "8 of 8 values are NaN"),
        (np.full((2, 2, 2), 1e300), "beyond float32"),
        (np.full((2, 2, 2), 2e5), "more than any valence density"),
    ],
)
def test_what_is_no_density_is_refused(grid, rho, message):
    with pytest.raises(TomatError, match=message):
        DensityGrid(rho, grid.lattice, grid.atomic_numbers, grid.frac_coords)


def test_a_worker_imports_the_grid_without_pymatgen_or_jax():
    code = "import sys, tomat.data.density; "
    code += "print(sorted({'pymatgen', 'jax', 'zarr', 'eminus', 'scipy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
