"""The embedded densities themselves: what is shipped is held to what is promised."""

import math

import numpy as np
import pytest
import spglib

from tomat.base.errors import TomatError
from tomat.data.density.demo.embedded import (
    CRYSTALS,
    GROUPS,
    SPLITS,
    demo_index,
    demo_materials,
    load_demo,
    load_stored,
)

CELLS = demo_index()["cells"]
SAMPLE = [cell for n, cell in enumerate(CELLS) if cell["recipe"]["group"] == CRYSTALS or n % 8 == 0]
"""The cells of the demo, and some of the others, whose refined grids are large."""


def test_whole_compounds_are_held_out():
    train, validation = ([c["recipe"] for c in CELLS if c["recipe"]["split"] == split] for split in SPLITS)
    for recipes, split in ((train, "train"), (validation, "validation")):
        assert [m.material_id for m in demo_materials(split, GROUPS)] == [recipe["material_id"] for recipe in recipes]
    assert len({recipe["structure_type"] for recipe in validation}) >= 3
    # In whatever group and form.
    train, validation = ({recipe["compound"] for recipe in recipes} for recipes in (train, validation))
    assert train.isdisjoint(validation) and {"GaP", "MgO", "AlN", "SrF2"} <= validation


def test_groups_are_asked_for_and_the_demo_has_the_first():
    every = [material.material_id for material in demo_materials(groups=GROUPS)]
    assert sorted(every) == sorted(m.material_id for group in GROUPS for m in demo_materials(groups=[group]))
    assert len(every) == len(set(every)) == len(CELLS)
    assert {m.material_id for m in demo_materials()} == {m.material_id for m in demo_materials(groups=[CRYSTALS])}
    assert len(demo_materials("validation")) == 10
    with pytest.raises(TomatError, match="no group 'gas'; expected some of crystals, further-crystals"):
        demo_materials(groups=[CRYSTALS, "gas"])
    with pytest.raises(TomatError, match="expected one of train, validation"):
        demo_materials("test")
    with pytest.raises(TomatError, match="no embedded density 'nothing'"):
        load_demo("nothing")


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell["material_id"])
def test_each_density(cell):
    grid = load_demo(cell["material_id"])
    assert grid.electron_count == pytest.approx(cell["calculation"]["valence_electrons"], rel=1e-6)
    assert max(grid.spacing_a) <= 0.065 and list(grid.grid_shape) == cell["refined_shape"]
    assert grid.spacing_a == pytest.approx(cell["refined_spacing_a"])
    for side in grid.grid_shape:
        assert math.gcd(side, 2**12 * 3**8 * 5**6) == side
    # A plane-wave density is a sum of squares, so its exact interpolation is nowhere negative. Aliasing, or a grid too
    # coarse for the Fourier series, would ring below zero; the rounding of what is stored does where nothing is.
    assert grid.clipped_electrons < 1e-3
    assert grid.clipped_voxels == 0 or cell["recipe"]["group"] != CRYSTALS


def test_a_cut_off_belongs_to_the_elements():
    """Two cut-offs for one element are two densities for one structure: 1.5 % NMAE for MgO at 45 and 55 hartree."""
    least: dict[str, float] = {}
    for recipe in (cell["recipe"] for cell in CELLS):
        for symbol in recipe["symbols"]:
            least[symbol] = min(least.get(symbol, math.inf), recipe["e_cut_hartree"])
    for recipe in (cell["recipe"] for cell in CELLS):
        assert recipe["e_cut_hartree"] == max(least[symbol] for symbol in recipe["symbols"]), recipe["material_id"]


def test_a_mesh_reaches_across_a_cell_as_along_its_axes():
    """The supercell of a mesh with Gamma has no short lattice vector. Layered cells of 3x3x3 points, long and thin, had
    one of 9 A and were up to 0.8 % NMAE off; their axes alone are 15 A then."""
    sums = np.array([signs for signs in np.ndindex(3, 3, 3) if signs != (1, 1, 1)]) - 1
    for recipe in (cell["recipe"] for cell in CELLS if cell["recipe"]["group"] not in ("vacuum", "large")):
        vectors = sums * recipe["k_mesh"] @ np.array(recipe["lattice_a"])
        shortest = np.linalg.norm(vectors, axis=1).min()
        assert any(recipe["k_shift"]) or shortest > 9.9, (recipe["material_id"], shortest)


def test_nothing_lies_beyond_the_cut_off_of_the_stored_grids():
    """The Fourier coefficients outside the sphere |G| <= 2 sqrt(2 E) vanish to float32 rounding: nothing is aliased."""
    for cell in CELLS[::7]:
        native = load_stored(cell["material_id"])
        reciprocal = 2 * np.pi * np.linalg.inv(native.lattice / 0.529177210903).T
        index = np.stack(np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in native.grid_shape], indexing="ij"), axis=-1)
        g = np.linalg.norm(index @ reciprocal, axis=-1)
        spectrum = np.abs(np.fft.fftn(native.rho.astype(np.float64))) / native.rho.size
        beyond = g > 2 * math.sqrt(2 * cell["recipe"]["e_cut_hartree"]) * (1 + 1e-9)
        assert beyond.any() and spectrum[beyond].max() < 3e-8 * native.rho.max(), cell["material_id"]


@pytest.mark.parametrize("material_id", [cell["material_id"] for cell in CELLS])
def test_each_density_has_the_symmetry_of_its_crystal(material_id):
    """Of a rotation R and a shift t that leave the crystal as it is: c[R^T h] = c[h] exp(2 pi i h.t). The root of the
    mean square of the difference to the mean over all operations is never less than its mean."""
    grid = load_stored(material_id)
    cell = (grid.lattice.tolist(), grid.frac_coords.tolist(), grid.atomic_numbers.tolist())
    found = spglib.get_symmetry(cell, symprec=1e-4)
    assert found is not None
    spectrum = np.fft.fftn(grid.rho.astype(np.float64)) / grid.rho.size
    # Of h and -h one says all; the small ones that are 0.001 % together are left out.
    half = np.abs(spectrum[..., : spectrum.shape[2] // 2 + 1]) ** 2
    order = np.argsort(half, axis=None)
    kept = order[2 * np.cumsum(half.ravel()[order]) > (1e-5 * spectrum[0, 0, 0].real) ** 2]
    index = np.column_stack(np.unravel_index(kept, half.shape))
    shape = np.array(grid.grid_shape)
    h = index - shape * (2 * index > shape)
    c = spectrum[tuple(index.T)]
    mean = np.zeros_like(c)
    for rotation, shift in zip(found["rotations"], found["translations"], strict=True):
        mean += spectrum[tuple((h @ rotation).T)] * np.exp(-2j * np.pi * (h @ shift))
    mean /= len(found["rotations"])
    left = np.sqrt(2 * np.sum(np.abs(c - mean) ** 2)) / spectrum[0, 0, 0].real
    assert left < 2e-4, f"{100 * left:.3f} % of the density, {len(found['rotations'])} operations"
