import numpy as np
import pytest

from tomat.base.errors import TomatError
from tomat.data.codec.histogram import DensityHistogram
from tomat.data.codec.lloyd_max import fit_lloyd_max
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.tokens.layouts import SequenceLayout
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import open_shards
from tomat.model.environment import EnvironmentConfig
from tomat.train.row_atoms import RowAtoms

LAYOUT = SequenceLayout("v3-p3", "v3", 3, 96)


def density(name: str) -> DensityGrid:
    rng = np.random.default_rng(len(name))
    lattice = np.diag([3.0, 3.5, 4.0]) + 0.2 * rng.random((3, 3))
    return DensityGrid(rng.random((8, 9, 10)), lattice, np.array([6, 14]), rng.random((2, 3)), name)


def test_rows_get_every_atom_that_their_patch_sees(tmp_path):
    histogram = DensityHistogram()
    histogram.add(np.linspace(0, 1, 1000, dtype=np.float32))
    codec = fit_lloyd_max(histogram, n_bins=16)
    write_shards(
        tmp_path, ["a", "bb"], density, layout=LAYOUT, codec=codec, patches_per_material=5, seed=1, block_rows=4
    )
    shards, config = open_shards(tmp_path), EnvironmentConfig(max_atoms=160)
    rows = RowAtoms(shards, config)
    for row in (0, 4, 7):
        material = shards.material_of_row(row)
        grid = density(material.material_id)
        crystal, anchor, found = Crystal.of(grid), np.array(shards.anchor_of_row(row)), rows(row)
        assert found.kinds.array.tolist() == [6, 14, *[0] * 6]
        steps = grid.lattice / np.array(grid.grid_shape)[:, None]
        assert np.allclose(found.steps.array, steps, atol=1e-6) and found.shape.array.tolist() == [3, 3, 3]
        images = np.array(list(np.ndindex(9, 9, 9))) - 4
        atoms = (crystal.frac_coords[:, None] + images).reshape(-1, 3) @ crystal.lattice - anchor @ steps
        voxels = np.array(list(np.ndindex(3, 3, 3))) @ steps
        near = np.linalg.norm(atoms[:, None] - voxels, axis=-1).min(axis=1) < config.basis.cutoff_a
        mine = np.asarray(found.positions.array)[np.asarray(found.numbers.array) > 0]
        for atom in atoms[near]:
            assert np.linalg.norm(mine - atom, axis=1).min() < 1e-4, "an atom within reach is missing"
        assert len(np.unique(np.round(mine, 3), axis=0)) == len(mine)
    with pytest.raises(TomatError, match="a patch of a of 27 voxels has .* set it to .* or more"):
        RowAtoms(shards, EnvironmentConfig(max_atoms=8))(0)
    with pytest.raises(TomatError, match=r"has 2 elements near it .*max_elements is 1; set it to 2 or more"):
        RowAtoms(shards, EnvironmentConfig(max_atoms=160, max_elements=1))(0)
