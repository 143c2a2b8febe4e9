"""Sums over the atoms around a voxel of radial functions times spherical harmonics, by element.

Shapes: B row, G group of its places, P place, N atom near the group, E element, K radial function, M harmonic.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tomat.data.density.promolecule import RadialBasis
from tomat.model.environment import radial_functions

BLOCK_POSITIONS = 512
"""Places whose functions and harmonics exist at a time: with 128 atoms of 4 elements 20 MB in float32."""

ATOMS_AT_A_TIME = 32
"""Atoms of a group that are summed at a time on a CPU; 16 or 64 are no faster."""

SOFT_A = 0.2
"""Directions are d / sqrt(r^2 + this^2): at a nucleus, where there is none, harmonics above l = 0 vanish smoothly."""


def real_harmonics(x: jax.Array, y: jax.Array, z: jax.Array, max_l: int) -> list[jax.Array]:
    """The (max_l + 1)^2 real solid harmonics of vectors, by degree, times sqrt(4 pi): for unit vectors the squares of
    degree l sum to 2 l + 1 (Varshalovich, Quantum Theory of Angular Momentum, 1988, 5.1)."""
    s = [float(root) for root in np.sqrt([3, 15, 5 / 4, 15 / 4, 35 / 8, 105, 21 / 8, 7 / 4, 105 / 4])]
    xx, yy, zz = x * x, y * y, z * z
    rr = xx + yy + zz
    degrees = [
        [jnp.ones_like(x)],
        [s[0] * x, s[0] * y, s[0] * z],
        [s[1] * x * y, s[1] * y * z, s[2] * (3 * zz - rr), s[1] * x * z, s[3] * (xx - yy)],
        [
            s[4] * y * (3 * xx - yy),
            s[5] * x * y * z,
            s[6] * y * (5 * zz - rr),
            s[7] * z * (5 * zz - 3 * rr),
            s[6] * x * (5 * zz - rr),
            s[8] * z * (xx - yy),
            s[4] * x * (xx - 3 * yy),
        ],
    ]
    return [one for degree in degrees[: max_l + 1] for one in degree]


def angular_functions(basis: RadialBasis) -> int:
    """Number of radial functions for the harmonics above l = 0: sums of two neighbouring functions of `basis`. The
    density's direction varies less with the distance than its amount, and these sums are most of the work."""
    return -(-basis.n // 2)


def sums_by_kind(
    basis: RadialBasis, max_l: int, positions: jax.Array, of_kind: jax.Array, places: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sums over atoms of radial functions, float32 [B, G, P, K, E], and of those of `angular_functions` times harmonics
    above l = 0, [B, G, P, M, K, E]; both without a gradient.

    `places` [B, G, P, 3] has the places of each group, in A. The atoms near a group are in `positions` [B, G, N, 3], in
    A, and `of_kind` [B, G, N, E], 1 where an atom is of a kind, else 0.
    """

    def of_group(positions: jax.Array, of_kind: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        apart = positions - places[:, None]
        squared = jnp.sum(apart * apart, axis=-1)
        functions = radial_functions(basis, jnp.sqrt(squared))
        # bfloat16 would round the promolecule, which is a sum of these, by 0.4 %.
        spherical = jnp.einsum("pkn,ne->pke", functions, of_kind, precision="high")
        soft = apart * jax.lax.rsqrt(squared + SOFT_A**2)[..., None]
        _, *harmonics = real_harmonics(soft[..., 0], soft[..., 1], soft[..., 2], max_l)
        paired = jnp.pad(functions, ((0, 0), (0, basis.n % 2), (0, 0)))
        paired = paired.reshape(len(places), -1, 2, paired.shape[-1]).sum(axis=2)
        by_kind = (paired[:, :, None] * of_kind.T).reshape(len(places), -1, paired.shape[-1])
        directed = jnp.stack(harmonics, axis=1) if harmonics else jnp.zeros((len(places), 0, paired.shape[-1]))
        angular = jnp.einsum("pmn,pqn->pmq", directed, by_kind, precision="high")
        return spherical, angular.reshape(*angular.shape[:2], paired.shape[1], of_kind.shape[-1])

    def rows_at_once(*arrays: jax.Array) -> Sequence[jax.Array]:
        """Groups in turn, rows at once: rows may be spread over devices."""
        rows, _, size = places.shape[:3]
        groups = max(1, BLOCK_POSITIONS // (rows * size))
        by_group = tuple(each.swapaxes(0, 1) for each in arrays)
        sums = jax.lax.map(lambda each: jax.vmap(of_group)(*each), by_group, batch_size=groups)
        return tuple(each.swapaxes(0, 1) for each in sums)

    def one_by_one(*arrays: jax.Array) -> Sequence[jax.Array]:
        """One group after another, `ATOMS_AT_A_TIME` of its atoms at a time until only padding is left."""

        def some_of_group(positions: jax.Array, of_kind: jax.Array, places: jax.Array) -> Sequence[jax.Array]:
            most = -(-len(positions) // ATOMS_AT_A_TIME) * ATOMS_AT_A_TIME
            padded = [jnp.pad(each, ((0, most - len(each)), (0, 0))) for each in (positions, of_kind)]
            last = jnp.max(jnp.where(of_kind.any(axis=-1), jnp.arange(len(of_kind)) + 1, 0))

            def add(turn: jax.Array, sums: Sequence[jax.Array]) -> Sequence[jax.Array]:
                start = turn * ATOMS_AT_A_TIME
                atoms, kinds = (jax.lax.dynamic_slice_in_dim(each, start, ATOMS_AT_A_TIME) for each in padded)
                return tuple(map(jnp.add, sums, of_group(atoms, kinds, places)))

            shapes = jax.eval_shape(of_group, positions, of_kind, places)
            nothing = tuple(jnp.zeros(each.shape, each.dtype) for each in shapes)
            return jax.lax.fori_loop(0, -(-last // ATOMS_AT_A_TIME), add, nothing)

        flat = tuple(each.reshape(-1, *each.shape[2:]) for each in arrays)
        sums = jax.lax.map(lambda each: some_of_group(*each), flat)
        return tuple(each.reshape(*places.shape[:2], *each.shape[1:]) for each in sums)

    # A group has 48 atoms on average in the embedded cells, and room for 224: 9.8 ms instead of 47 for 1,536 places.
    sums = jax.lax.platform_dependent(positions, of_kind, places, cpu=one_by_one, default=rows_at_once)
    spherical, angular = map(jax.lax.stop_gradient, sums)
    return spherical, angular


def degree_slices(max_l: int) -> Sequence[slice]:
    """Which of the harmonics above l = 0 are of each degree."""
    return [slice(degree**2 - 1, (degree + 1) ** 2 - 1) for degree in range(1, max_l + 1)]
