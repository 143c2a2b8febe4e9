"""The atoms near the voxels of a row: all of those within reach, few others, in arrays of one size."""

import numpy as np
from haliax import Axis
from small_field import BASIS, CELL, GRID, PROMOLECULE

from tomat.data.density.crystal import Crystal
from tomat.model.nearby_atoms import (
    Room,
    ScatteredAtoms,
    atoms_of_cell,
    filled_cell,
    named_atoms,
    places_in_cell,
    stacked_atoms,
)


def test_scattered_voxels_see_every_atom_within_reach_of_them():
    voxels = np.append(np.random.default_rng(0).permutation(np.prod(GRID))[:11], -1)
    numbers, positions = atoms_of_cell(CELL, BASIS.cutoff_a)
    places = places_in_cell(CELL, GRID, voxels)
    assert places.dtype == np.float32 and not places[-1].any()
    # The sum of atoms at each place, by the loop over images that needs no box.
    distance = np.linalg.norm(positions[None] - places[:-1, None], axis=-1)
    found = np.zeros(len(voxels) - 1)
    for number, coefficients in PROMOLECULE.coefficients.items():
        found += (BASIS(distance[:, numbers == number]) @ coefficients).sum(axis=1)
    np.testing.assert_allclose(found, PROMOLECULE.density(CELL, GRID).ravel()[voxels[:-1]], rtol=2e-5)
    rows = [filled_cell(numbers, positions, places, 0.5, Room(160, 4), BASIS.cutoff_a, "skewed")] * 2
    atoms = named_atoms(stacked_atoms(rows))
    assert isinstance(atoms, ScatteredAtoms)
    sizes = {key: axis[1:] for key, axis in Room(160, 4).shapes(ScatteredAtoms, len(voxels)).items()}
    assert {key: getattr(atoms, key).array.shape[1:] for key in sizes} == sizes
    assert atoms.places.axes == (Axis("batch", 2), Axis("position", 12), Axis("xyz", 3))
    assert atoms.mean_density.axes == (Axis("batch", 2),)


def test_a_slab_takes_no_atoms_beyond_the_faces_of_its_cell():
    slab = Crystal(np.diag([5.0, 5.0, 60.0]), np.array([14, 14]), np.array([[0.0, 0.0, 0.5], [0.5, 0.5, 0.52]]))
    numbers, positions = atoms_of_cell(slab, 4.0)
    assert len(numbers) < 40 and (np.abs(positions) < [6.5, 6.5, 34.0]).all()
    assert len(slab.near_box(np.zeros(3), slab.lattice, 4.0)[0]) > 200
