"""The atoms of a row: all that its voxels see, and where these are."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from fitted_codec import fitted_codec
from haliax import Axis

from tomat.base.errors import TomatError
from tomat.data.density.crystal import Crystal
from tomat.data.density.grid import DensityGrid
from tomat.data.density.promolecule import Promolecule, RadialBasis
from tomat.data.tokens.layouts import BlockShuffleConfig, SequenceLayout
from tomat.data.tokens.pipeline.driver import write_shards
from tomat.data.tokens.shards import ShardSet, open_shards
from tomat.data.tokens.vocabulary import DENSITY_START
from tomat.model.environment import EnvironmentConfig
from tomat.model.nearby_atoms import NearbyAtoms, PatchAtoms, Room, ScatteredAtoms, atoms_of_cell, filled_cell
from tomat.train.loader import ShardDataset, token_loader
from tomat.train.row_atoms import RowAtoms


def two_atoms(name: str) -> DensityGrid:
    """Carbon and silicon in a skewed cell of 4 Å; another density for every name."""
    rng = np.random.default_rng(int(name[1:]))
    lattice = np.eye(3) * 4.0 + 0.2 * rng.random((3, 3))
    return DensityGrid(rng.random((8, 9, 10)), lattice, np.array((6, 14)), rng.random((2, 3)), name)


def written(folder, layout: SequenceLayout, **settings) -> ShardSet:
    settings |= {"patches_per_material": 5, "seed": 1, "block_rows": 4}
    codec = fitted_codec(16, np.linspace(0, 1, 1000))
    write_shards(folder, ["m1", "m2"], two_atoms, layout=layout, codec=codec, **settings)
    return open_shards(folder)


def batches(shards: ShardSet, rows: RowAtoms) -> Any:
    """Batches of 4 rows, as a run reads them."""
    shuffle = BlockShuffleConfig(io_block_size=4, window_blocks=2)
    dataset = ShardDataset(shards, shuffle, seq_len=rows.seq_len, epochs=1, atoms=rows)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    return token_loader(dataset, 4, mesh=mesh, axis_resources={"batch": "data"})


def check_all_within_reach(found, crystal: Crystal, origin: np.ndarray, voxels: np.ndarray, reach_a: float) -> None:
    """By images in every direction, each held against all voxels; both from `origin`, A."""
    images = np.array(list(np.ndindex(9, 9, 9))) - 4
    atoms = (crystal.frac_coords[:, None] + images).reshape(-1, 3) @ crystal.lattice - origin
    near = np.linalg.norm(atoms[:, None] - voxels, axis=-1).min(axis=1) < reach_a
    mine = np.asarray(found.positions.array)[np.asarray(found.numbers.array) > 0]
    for atom in atoms[near]:
        assert np.linalg.norm(mine - atom, axis=1).min() < 1e-4, "an atom within reach is missing"
    assert len(np.unique(np.round(mine, 3), axis=0)) == len(mine)
    assert found.kinds.array.tolist() == [6, 14, *[0] * 6]


def test_rows_get_every_atom_that_their_patch_sees(tmp_path):
    shards, config = written(tmp_path, SequenceLayout("v3-p3", "v3", 3, 96)), EnvironmentConfig(max_atoms=160)
    rows = RowAtoms(shards, config)
    for row in (0, 4, 7):
        grid = two_atoms(shards.material_of_row(row).material_id)
        anchor, (found, order) = np.array(shards.anchor_of_row(row)), rows(row)
        assert isinstance(found, PatchAtoms) and order is None
        steps = grid.lattice / np.array(grid.grid_shape)[:, None]
        assert np.allclose(found.steps.array, steps, atol=1e-6) and found.shape.array.tolist() == [3, 3, 3]
        voxels = np.array(list(np.ndindex(3, 3, 3))) @ steps
        check_all_within_reach(found, Crystal.of(grid), anchor @ steps, voxels, config.basis.cutoff_a)
    with pytest.raises(TomatError, match="a patch of m1 of 27 voxels has .* set it to .* or more"):
        RowAtoms(shards, EnvironmentConfig(max_atoms=8))(0)
    with pytest.raises(TomatError, match=r"has 2 elements near it .*max_elements is 1. set it to 2 or more"):
        RowAtoms(shards, EnvironmentConfig(max_atoms=160, max_elements=1))(0)


def test_scattered_rows_get_every_atom_of_their_cell_and_their_places(tmp_path):
    basis = RadialBasis(8, 4.0)
    known = {6: np.linspace(0.3, 0.0, 8), 14: np.linspace(0.9, 0.1, 8)}
    promolecule = Promolecule(basis, known, 1, {6: 4.0, 14: 4.0})
    layout = SequenceLayout("few", "scattered", 0, 200)
    shards = written(tmp_path / "known", layout, promolecule=promolecule)
    config = EnvironmentConfig(basis=basis, max_atoms=240)
    rows = RowAtoms(shards, config, seq_len=150)
    assert shards.rows == 8  # 720 voxels: three rows and one of 120
    for row in (0, 3, 6):
        grid, (found, order) = two_atoms(shards.material_of_row(row).material_id), rows(row)
        assert isinstance(found, ScatteredAtoms) and order is not None
        assert sorted(order) == [*range(150)]
        crystal, centre = Crystal.of(grid), grid.lattice.sum(axis=0) / 2
        held = 120 if row == 3 else 150
        index = np.stack(np.unravel_index(shards.voxels_of_row(row)[:held], grid.grid_shape), axis=1)
        expected = (index / grid.grid_shape) @ grid.lattice - centre
        grouped, places = np.asarray(found.places.array), np.zeros((150, 3))
        places[order] = grouped
        assert places.shape == (150, 3) and np.allclose(places[:held], expected, atol=1e-5) and not places[held:].any()
        assert found.mean_density.array == pytest.approx(8.0 / crystal.volume_a3)
        near = zip(found.positions.array, found.numbers.array, strict=True)
        for group, (positions, numbers) in enumerate(near):
            alone = NearbyAtoms.of({"positions": positions, "numbers": numbers, "kinds": found.kinds.array})
            of_group = grouped[32 * group : 32 * (group + 1)]
            check_all_within_reach(alone, crystal, centre, of_group, basis.cutoff_a)
            apart = np.linalg.norm(positions[numbers > 0][:, None] - of_group, axis=-1).min(axis=1)
            assert apart.max() < basis.cutoff_a
    batch = next(iter(batches(shards, rows)))
    assert batch.tokens.axes == (Axis("batch", 4), Axis("position", 150))
    assert batch.atoms.places.axes == (Axis("batch", 4), Axis("position", 150), Axis("xyz", 3))
    assert batch.atoms.mean_density.axes == (Axis("batch", 4),)
    # A token is the density at the very place beside it; padding is at the origin.
    density = {each: two_atoms(each) for each in ("m1", "m2")}
    for ids, atoms in zip(batch.tokens.array, batch.atoms.places.array, strict=True):
        held = np.asarray(ids) >= DENSITY_START
        assert not np.asarray(atoms)[~held].any()
        fits = []
        for grid in density.values():
            fractions = (np.asarray(atoms) + grid.lattice.sum(axis=0) / 2) @ np.linalg.inv(grid.lattice)
            index = np.round(fractions * grid.grid_shape).astype(int) % grid.grid_shape
            fits.append(np.array_equal(shards.codec.encode(grid.rho)[tuple(index.T)][held], ids[held] - DENSITY_START))
        assert sum(fits) == 1
    with pytest.raises(TomatError, match=r"32 voxels of m1 that lie together have .*max_atoms is 8; set it to"):
        RowAtoms(shards, EnvironmentConfig(basis=basis, max_atoms=8))(0)
    with pytest.raises(TomatError, match="the cell of m1 has 2 elements near it .*max_elements is 1; set it to 2"):
        cell, away = atoms_of_cell(crystal, basis.cutoff_a), np.full((32, 3), 1e3)  # near no atom
        filled_cell(*cell, away, 1.0, Room(240, 1), basis.cutoff_a, "m1")
    without = written(tmp_path / "without", layout)
    with pytest.raises(TomatError, match="scattered voxels and no promolecule"):
        RowAtoms(without, config)
    half = replace(shards, promolecule=Promolecule(basis, {6: known[6]}, 1, {6: 4.0}))
    patches = written(tmp_path / "patches", SequenceLayout("v3-p3", "v3", 3, 96), promolecule=half.promolecule)
    for each in (half, patches):
        with pytest.raises(TomatError, match="m1 has Si, which the set's promolecule does not know"):
            RowAtoms(each, config)
