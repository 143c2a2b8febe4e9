"""Angular sums: orthonormal harmonics, sums that are those of the promolecule at l = 0, no jump at a nucleus."""

import jax.numpy as jnp
import numpy as np
import pytest

from tomat.data.density.promolecule import RadialBasis
from tomat.model import angular
from tomat.model.angular import SOFT_A, degree_slices, real_harmonics, sums_by_kind
from tomat.model.environment import MOST_L

BASIS = RadialBasis(6, 4.0)
RNG = np.random.default_rng(3)
ATOMS = RNG.uniform(-3, 3, (1, 7, 3)).astype(np.float32)
OF_KIND = np.eye(2, dtype=np.float32)[[0, 1, 1, 0, 1, 0, 1]][None]
PLACES = RNG.uniform(-1, 1, (1, 9, 3)).astype(np.float32)


def sums(places: np.ndarray) -> list[np.ndarray]:
    found = sums_by_kind(BASIS, MOST_L, *(jnp.asarray(each)[None] for each in (ATOMS, OF_KIND, places)))
    return [np.asarray(each)[0] for each in found]


def test_harmonics_are_orthonormal_on_the_sphere():
    # Gauss-Legendre in cos(theta) times a uniform phi integrates polynomials of degree 2 x 3 exactly.
    cosine, weight = np.polynomial.legendre.leggauss(8)
    phi = np.arange(16) * np.pi / 8
    sine = np.sqrt(1 - cosine**2)[:, None]
    x, y, z = (sine * np.cos(phi)).ravel(), (sine * np.sin(phi)).ravel(), np.repeat(cosine, 16)
    values = np.stack([np.asarray(each) for each in real_harmonics(*map(jnp.asarray, (x, y, z)), MOST_L)])
    products = (values * np.repeat(weight / 32, 16)) @ values.T
    np.testing.assert_allclose(products, np.eye(16), atol=1e-5)
    for degree, each in enumerate(degree_slices(MOST_L), start=1):
        np.testing.assert_allclose((values[1:][each] ** 2).sum(axis=0), 2 * degree + 1, rtol=1e-5)


def test_sums_are_over_all_atoms_of_a_kind():
    apart = ATOMS[0][None] - PLACES[0][:, None]
    distance = np.linalg.norm(apart, axis=-1)
    functions = BASIS(distance)
    spherical, angular = sums(PLACES)
    np.testing.assert_allclose(spherical[0], np.einsum("pnk,ne->pke", functions, OF_KIND[0]), atol=1e-5)
    pairs = functions[..., ::2] + functions[..., 1::2]
    x = np.sqrt(3) * apart[..., 0] / np.sqrt(distance**2 + SOFT_A**2)
    np.testing.assert_allclose(angular[0, :, 0], np.einsum("pnk,pn,ne->pke", pairs, x, OF_KIND[0]), atol=1e-5)


def test_nothing_jumps_at_a_nucleus():
    at = ATOMS[0, 2]
    beside = [at, *(at + 1e-4 * each for each in np.vstack([np.eye(3), -np.eye(3)]))]
    for found in sums(np.array(beside, np.float32)[None]):
        assert np.isfinite(found).all()
        assert np.abs(found[0] - found[0, 0]).max() < 0.01 * np.abs(found).max()


def test_without_harmonics_there_are_the_radial_sums_alone():
    spherical, angular = sums_by_kind(BASIS, 0, *(jnp.asarray(each)[None] for each in (ATOMS, OF_KIND, PLACES)))
    np.testing.assert_allclose(spherical[0], sums(PLACES)[0], rtol=1e-6)
    assert angular.shape[3] == 0


@pytest.mark.parametrize("rows", [1, 3])
def test_groups_keep_to_their_own_atoms(rows, monkeypatch):
    monkeypatch.setattr(angular, "BLOCK_POSITIONS", 20)
    whole = [np.concatenate([each, each[:, ::-1], 2 * each]) for each in (ATOMS, OF_KIND, PLACES)]
    parts = [jnp.asarray(np.stack([each] * rows)) for each in whole]
    for found, alone in zip(sums_by_kind(BASIS, MOST_L, *parts), sums(PLACES), strict=True):
        for row in np.asarray(found):
            np.testing.assert_allclose(row[:2], np.concatenate([alone, alone[:, ::-1]]), atol=1e-5)
