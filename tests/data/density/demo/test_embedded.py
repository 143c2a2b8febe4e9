"""The embedded densities themselves: what is shipped is held to what is promised."""

import math

import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import DATA_DIR, SPLITS, demo_index, demo_materials, load_demo
from tomat.data.density.zarr_store import read_zarr

CELLS = demo_index()["cells"]


def test_whole_compounds_are_held_out():
    train, validation = ([c["recipe"] for c in CELLS if c["recipe"]["split"] == split] for split in SPLITS)
    for recipes, split in ((train, "train"), (validation, "validation")):
        assert [m.material_id for m in demo_materials(split)] == [recipe["material_id"] for recipe in recipes]
    assert len({recipe["structure_type"] for recipe in validation}) >= 3
    train, validation = ({recipe["compound"] for recipe in recipes} for recipes in (train, validation))
    assert train.isdisjoint(validation) and len(validation) >= 3
    with pytest.raises(TomatError, match="expected one of train, validation"):
        demo_materials("test")
    with pytest.raises(TomatError, match="no embedded density 'nothing'"):
        load_demo("nothing")


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell["material_id"])
def test_each_density(cell):
    grid = load_demo(cell["material_id"])
    assert grid.electron_count == pytest.approx(cell["calculation"]["valence_electrons"], rel=1e-6)
    assert max(grid.spacing_a) <= 0.065 and list(grid.grid_shape) == cell["refined_shape"]
    assert grid.spacing_a == pytest.approx(cell["refined_spacing_a"])
    for side in grid.grid_shape:
        assert math.gcd(side, 2**12 * 3**8 * 5**6) == side
    # A plane-wave density is a sum of squares, so its exact interpolation is nowhere negative. Aliasing, or a grid too
    # coarse for the Fourier series, would ring below zero.
    assert grid.clipped_voxels == 0


def test_nothing_lies_beyond_the_cut_off_of_the_stored_grids():
    """The Fourier coefficients outside the sphere |G| <= 2 sqrt(2 E) vanish to float32 rounding: nothing is aliased."""
    for cell in CELLS[::7]:
        native = read_zarr(DATA_DIR / f"{cell['material_id']}.zarr")
        reciprocal = 2 * np.pi * np.linalg.inv(native.lattice / 0.529177210903).T
        index = np.stack(np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in native.grid_shape], indexing="ij"), axis=-1)
        g = np.linalg.norm(index @ reciprocal, axis=-1)
        spectrum = np.abs(np.fft.fftn(native.rho.astype(np.float64))) / native.rho.size
        beyond = g > 2 * math.sqrt(2 * cell["recipe"]["e_cut_hartree"]) * (1 + 1e-9)
        assert beyond.any() and spectrum[beyond].max() < 3e-8 * native.rho.max(), cell["material_id"]
