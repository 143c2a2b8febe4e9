"""A small field model that is as if it had learnt something, a skewed cell, and rows of scattered voxels of it."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis

from tomat.data.density.crystal import Crystal
from tomat.data.density.promolecule import Promolecule, RadialBasis
from tomat.model.environment import environment_tables
from tomat.model.field import FieldConfig, FieldModel
from tomat.model.nearby_atoms import Room, ScatteredAtoms, atoms_of_cell, filled_cell, places_in_cell, stacked_atoms

BASIS = RadialBasis(8, 4.0)
CONFIG = FieldConfig(max_seq_len=12, basis=BASIS, channels=3, products=4, hidden_dim=16, hidden_layers=2, members=2)
CELL = Crystal(
    np.array([[3.1, 0.2, 0.0], [0.4, 3.4, 0.1], [0.0, 0.3, 4.0]]), np.array([12, 8]),
    np.array([[0.1, 0.2, 0.3], [0.6, 0.55, 0.8]]), "skewed",
)  # fmt: skip
PROMOLECULE = Promolecule(BASIS, {12: np.linspace(0.3, 0.0, 8), 8: np.linspace(0.9, 0.1, 8)}, 1, {12: 2.0, 8: 6.0})
TABLES = environment_tables(PROMOLECULE, np.zeros(2, np.float32))
GRID = (6, 7, 8)
VOXELS = np.arange(0, 336, 28)


def row_of(cell: Crystal, grid_shape: tuple[int, int, int], voxels: np.ndarray, room: int = 512) -> ScatteredAtoms:
    near = atoms_of_cell(cell, BASIS.cutoff_a)
    places = places_in_cell(cell, grid_shape, voxels)
    row = filled_cell(*near, places, 0.2, Room(room, 3), BASIS.cutoff_a, cell.name)
    return ScatteredAtoms.of(stacked_atoms([row]), Axis("batch", 1))


def fresh() -> FieldModel:
    return CONFIG.build(Axis("vocab", 10), key=jax.random.PRNGKey(0))


def learnt() -> FieldModel:
    """With weights in its last layer, which begin as zero, and its statistics."""
    model = fresh()
    every = np.ones((1, len(VOXELS)), bool)
    model = model.with_moments(eqx.filter_jit(model.moments)(row_of(CELL, GRID, VOXELS), TABLES, every))
    members = []
    for turn, member in enumerate(model.members):
        *layers, last = member.network.layers
        numbers = 0.3 * jnp.sin(jnp.arange(last.weight.size, dtype=jnp.float32) + turn)
        layers.append(dataclasses.replace(last, weight=dataclasses.replace(last.weight, array=numbers)))
        members.append(dataclasses.replace(member, network=dataclasses.replace(member.network, layers=layers)))
    return dataclasses.replace(model, members=members)
