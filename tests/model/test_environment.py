"""The environment: radial sums at the right voxel, a prior that is the promolecule, and a mask that masks."""

import dataclasses
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis, NamedArray
from pymatgen.core.periodic_table import Element
from small_field import BASIS, CELL, PROMOLECULE, learnt, row_of

from tomat.base.errors import TomatError
from tomat.data.density.elements import (
    SYMBOLS,
    atomic_radius_a,
    ionization_energy_ev,
    pauling_electronegativity,
    period_of,
)
from tomat.data.density.promolecule import radial_sums
from tomat.data.tokens.vocabulary import DENSITY_BLOCK_START, DENSITY_START, PAD
from tomat.model import environment as module
from tomat.model.any_decoder import hidden_and_head
from tomat.model.decoder import DensityDecoderConfig
from tomat.model.environment import Environment, EnvironmentConfig, environment_tables, log_densities, prior_columns
from tomat.model.nearby_atoms import (
    Room,
    atoms_of_cell,
    atoms_of_patch,
    filled,
    filled_cell,
    named_atoms,
    stacked_atoms,
)

CONFIG = EnvironmentConfig(channels=3, hidden_dim=16, basis=BASIS, max_atoms=160, prior_anchors=32)
VALUES = np.geomspace(0.02, 8.0, 40).astype(np.float32)
TABLES = environment_tables(PROMOLECULE, VALUES)
GRID, PATCH, ANCHOR, START = (20, 22, 26), (2, 3, 4), np.array([15, 3, 24]), 5
SIZES: Any = dict(max_seq_len=40, hidden_dim=16, intermediate_dim=16, num_layers=1, num_heads=2, num_kv_heads=1)
Embed, Position = Axis("embed", 12), Axis("position", 40)


def batch_of(*anchors: np.ndarray) -> tuple[NamedArray, Any]:
    """Tokens whose density begins at `START`, and the atoms near the patches at `anchors`."""
    rows = [
        filled(*atoms_of_patch(CELL, a, GRID, PATCH, BASIS.cutoff_a), PATCH, Room(160, 4), "skewed") for a in anchors
    ]
    ids = np.full((len(rows), Position.size), PAD, np.int32)
    ids[:, START - 1] = DENSITY_BLOCK_START
    ids[:, START : START + 24] = DENSITY_START + np.arange(24)
    return NamedArray(jnp.asarray(ids), (Axis("batch", len(rows)), Position)), named_atoms(stacked_atoms(rows))


@pytest.fixture(scope="module")
def environment() -> Environment:
    return Environment.init(CONFIG, Embed, key=jax.random.PRNGKey(3))


def test_what_is_known_of_elements_is_pymatgens():
    for number, symbol in enumerate(SYMBOLS[:103], start=1):
        element = Element(symbol)
        assert pauling_electronegativity(number) == (None if symbol in ("He", "Ne", "Ar") else element.X), symbol
        assert (atomic_radius_a(number) or 0.0) == float(element.atomic_radius or 0.0), symbol
        assert ionization_energy_ev(number) == pytest.approx(element.ionization_energy, abs=5.1e-3), symbol
        # Lanthanides and actinides have rows of their own there.
        assert period_of(number) == {8: 6, 9: 7}.get(element.row, element.row), symbol
    assert pauling_electronegativity(118) is atomic_radius_a(118) is ionization_energy_ev(118) is None


def test_sums_are_of_the_voxel_that_a_position_predicts(environment):
    tokens, atoms = batch_of(ANCHOR, ANCHOR + 1)
    sums = environment.sums(tokens, atoms, TABLES)
    density = PROMOLECULE.density(CELL, GRID)
    scale = module.feature_scale(BASIS)
    mixed = TABLES.descriptors[:, :3] @ environment.descriptors.array + environment.elements.array
    for row, anchor in enumerate((ANCHOR, ANCHOR + 1)):
        for v, voxel in enumerate(np.ndindex(*PATCH)):
            place = (anchor + voxel) % GRID
            found = sums.expected.array[row, START - 1 + v]
            assert found == pytest.approx(np.log(density[tuple(place)] + 0.01), abs=1e-4)
            by_element = radial_sums(CELL, (place / GRID)[None], BASIS)
            expected = sum(np.outer(by_element[z][0] * scale, mixed[z]) for z in by_element)
            features = sums.features.array[row, START - 1 + v]
            assert np.allclose(features[:-1].reshape(8, 3), expected, atol=1e-4)
    beyond = np.delete(np.arange(40), np.arange(START - 1, START - 1 + 24))
    assert not np.asarray(sums.features.array[:, beyond]).any(), "positions that predict no voxel"


def test_blocks_of_positions_change_nothing_and_what_is_no_atom_counts_for_nothing(environment, monkeypatch):
    tokens, atoms = batch_of(ANCHOR)
    absent = atoms.numbers.array == 0
    assert absent.any()
    moved = jnp.where(absent[..., None], 0.3, atoms.positions.array)
    other = dataclasses.replace(atoms, positions=NamedArray(moved, atoms.positions.axes))
    one, two = (environment.sums(tokens, each, TABLES) for each in (atoms, other))
    assert np.array_equal(one.features.array, two.features.array)
    monkeypatch.setattr(module, "BLOCK_POSITIONS", 7)
    parts = environment.sums(tokens, atoms, TABLES)
    assert np.allclose(one.features.array, parts.features.array, atol=1e-6)
    assert np.allclose(one.expected.array, parts.expected.array, atol=1e-6)


def test_the_prior_is_a_distribution_around_any_density(environment):
    """Hidden states and head with their additional parts multiply to the logits and the log-density around a shifted
    promolecule, which `prior_columns` gives at anchors alone."""
    tokens, atoms = batch_of(ANCHOR)
    sums = environment.sums(tokens, atoms, TABLES)
    embedding = environment.embedding(tokens, sums, TABLES)
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    Vocab = Axis("vocab", DENSITY_START + len(VALUES) + 3)
    hidden = hax.random.normal(keys[0], (tokens.axes[0], Position, Embed))
    head = hax.random.normal(keys[1], (Vocab, Embed))
    wide, rows = environment.with_prior(hidden, head, embedding, sums, TABLES)
    logits = hax.dot(wide, rows, axis="embed").array
    added = np.asarray(logits - hax.dot(hidden, head, axis="embed").array)
    assert np.abs(added[..., :DENSITY_START]).max() < 1e-4 and np.abs(added[..., -3:]).max() < 1e-4
    anchors, columns = prior_columns(log_densities(VALUES), CONFIG)
    density = added[0, :, DENSITY_START:-3]
    # Untrained, it lies around the promolecule itself.
    nearest = np.abs(log_densities(VALUES) - np.asarray(sums.expected.array[0])[:, None]).argmin(axis=1)
    inside = np.arange(START - 1, START + 23)
    assert (np.abs(density.argmax(axis=1) - nearest)[inside] <= 1).all()
    # Between two anchors: their mean, by nearness.
    place = (np.asarray(sums.expected.array[0, START]) - anchors[0]) / (anchors[1] - anchors[0])
    low = int(place)
    expected = (1 - (place - low)) * columns[:, low] + (place - low) * columns[:, low + 1]
    assert np.allclose(density[START], expected, atol=1e-3)


def test_the_residual_is_that_of_the_voxel_read(environment):
    tokens, atoms = batch_of(ANCHOR)
    sums = environment.sums(tokens, atoms, TABLES)
    unread = NamedArray(jnp.where(tokens.array >= DENSITY_START, PAD, tokens.array), tokens.axes)

    seen: Any = dataclasses.replace(environment, network=lambda x: x)
    read, not_read = (
        np.asarray(seen.embedding(each, sums, TABLES).vector.array[0, :, -2:]) for each in (tokens, unread)
    )
    assert not not_read.any()
    for v in range(24):
        expected = log_densities(VALUES)[v] - float(sums.expected.array[0, START - 1 + v])
        assert read[START + v].tolist() == pytest.approx([expected, 1.0], abs=1e-5)
    assert not read[:START].any() and not read[START + 24 :].any()


def test_of_a_relative_codec_all_is_relative_to_the_promolecule(environment):
    """The residual is the ratio that is read, and the prior lies around it; around 1, where none is."""
    tokens, atoms = batch_of(ANCHOR)
    ratios = np.geomspace(0.1, 8.0, 81).astype(np.float32)
    tables = environment_tables(PROMOLECULE, ratios, 0.02)
    sums = environment.sums(tokens, atoms, tables)
    assert environment.sums(tokens, atoms, TABLES).scale is None and sums.scale is not None
    voxels = [tuple((ANCHOR + v) % GRID) for v in np.ndindex(*PATCH)]
    promolecule = np.array([PROMOLECULE.density(CELL, GRID)[voxel] for voxel in voxels])
    assert np.allclose(np.asarray(sums.scale.array)[0, START - 1 : START + 23], promolecule + 0.02, rtol=1e-4)
    seen: Any = dataclasses.replace(environment, network=lambda x: x)
    read = np.asarray(seen.embedding(tokens, sums, tables).vector.array[0, START : START + 24, -2])
    assert np.allclose(read, np.log(ratios[:24]), atol=1e-5)
    hidden = hax.zeros((tokens.axes[0], Position, Embed))
    head = hax.zeros((Axis("vocab", DENSITY_START + len(ratios)), Embed))
    unread = NamedArray(jnp.where(tokens.array >= DENSITY_START, PAD, tokens.array), tokens.axes)
    for ids, expected in ((tokens, [1.0, *ratios[:23]]), (unread, np.ones(24))):
        embedding = environment.embedding(ids, sums, tables)
        logits = hax.dot(*environment.with_prior(hidden, head, embedding, sums, tables), axis="embed").array
        best = ratios[np.asarray(logits)[0, START - 1 : START + 23, DENSITY_START:].argmax(axis=1)]
        assert np.allclose(best, expected, rtol=0.08)


@pytest.mark.parametrize("relative", [False, True])
def test_a_field_models_density_is_what_a_decoder_expects(relative, monkeypatch):
    """Instead of the promolecule: at every voxel of a patch what the field model says of it in a row of scattered ones,
    which a fresh decoder's logits and residuals lie around; in blocks too, and without a gradient."""
    field, bins = learnt(), np.geomspace(0.05, 20.0, 64).astype(np.float32)
    tables = environment_tables(PROMOLECULE, bins, 0.02 if relative else None)
    Vocab = Axis("vocab", DENSITY_START + len(bins))
    config = DensityDecoderConfig(**SIZES, environment=CONFIG, field=field.config)
    model = dataclasses.replace(config.build(Vocab, key=jax.random.PRNGKey(0)), field=field)
    tokens, atoms = batch_of(ANCHOR)
    monkeypatch.setattr(module, "BLOCK_POSITIONS", 7)
    voxels = [np.ravel_multi_index(tuple((ANCHOR + v) % GRID), GRID) for v in np.ndindex(*PATCH)]
    members, promolecule = eqx.filter_jit(field.densities)(row_of(CELL, GRID, np.array(voxels)), tables)
    density = np.mean([each.array[0] for each in members], axis=0)
    inside = np.arange(START - 1, START + 23)
    expected = np.log(density + 0.01)
    if relative:
        expected = np.log((density + 0.02) / (promolecule.array[0] + 0.02))
    found = eqx.filter_jit(model.atom_sums)(tokens, atoms, tables)
    np.testing.assert_allclose(found.expected.array[0, inside], expected, atol=2e-4)
    assert np.abs(expected - np.log(promolecule.array[0] + (0.02 if relative else 0.01))).max() > 0.02

    unread = NamedArray(jnp.where(tokens.array >= DENSITY_START, PAD, tokens.array), tokens.axes)
    embedding = model.environment.embedding(unread, found, tables)
    hidden, head = hax.zeros((tokens.axes[0], Position, model.Embed)), hax.zeros((Vocab, model.Embed))
    logits = hax.dot(*model.environment.with_prior(hidden, head, embedding, found, tables), axis="embed").array
    nearest = np.abs(tables.bin_logs() - expected[:, None]).argmin(axis=1)
    assert (np.abs(logits[0, inside, DENSITY_START:].argmax(axis=1) - nearest) <= 1).all()

    def total(model):
        hidden, _, _ = hidden_and_head(model, tokens, atoms, tables)
        return hidden.array.astype(jnp.float32).sum()

    gradient = eqx.filter_jit(eqx.filter_grad(total))(model)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient.field))


def test_a_decoder_has_it_and_another_has_not():
    config = DensityDecoderConfig(**SIZES, environment=CONFIG)
    Vocab = Axis("vocab", DENSITY_START + len(VALUES))
    model = config.build(Vocab, key=jax.random.PRNGKey(0))
    plain = dataclasses.replace(config, environment=None).build(Vocab, key=jax.random.PRNGKey(0))
    tables = (each.embeddings.token_embeddings.weight.array for each in (model, plain))
    assert np.array_equal(*tables)
    tokens, atoms = batch_of(ANCHOR)
    with pytest.raises(TomatError, match="was given no atoms"):
        hidden_and_head(model, tokens)
    cell = filled_cell(*atoms_of_cell(CELL, 4.0), np.zeros((40, 3), np.float32), 0.5, Room(160, 4), 4.0, "skewed")
    with pytest.raises(TomatError, match="given scattered voxels; train it on"):
        hidden_and_head(model, tokens, named_atoms(stacked_atoms([cell])), TABLES)
    hidden, head, _ = hidden_and_head(model, tokens, atoms, TABLES)
    assert hidden.resolve_axis("embed").size == head.resolve_axis("embed").size == 16 + CONFIG.prior_anchors
    # The first guess is the promolecule's, far better than an even one.
    logits = hax.dot(hidden, head, axis="embed").array[0, START - 1 : START + 23, DENSITY_START:]
    guess = jax.nn.softmax(logits) @ VALUES
    truth = [PROMOLECULE.density(CELL, GRID)[tuple((ANCHOR + v) % GRID)] for v in np.ndindex(*PATCH)]
    assert np.abs(guess - np.array(truth)).mean() < 0.2 * np.mean(truth)
    hidden, head, _ = hidden_and_head(plain, tokens)
    assert hidden.resolve_axis("embed").size == head.resolve_axis("embed").size == 16


@pytest.mark.parametrize("words", [{"max_atoms": 0}, {"prior_anchors": 3}, {"prior_width": 0.0}])
def test_numbers_that_cannot_be(words):
    with pytest.raises(TomatError, match=f"model.environment.{next(iter(words))} is"):
        EnvironmentConfig(**words)
