"""Causal attention in two Pallas kernels for TPUs that hold all positions of one head in VMEM.

JAX's splash kernels fetch tiles of queries and keys for each step of a grid, write a gradient of the queries for each
block of keys to HBM, and pass over what the mask empties. Here queries, keys, values and all gradients of a head lie in
VMEM while it is worked on (a v6e has 128 MiB): only blocks on or below the diagonal are visited, only those on it are
masked, and of those only the part that the mask leaves is computed. The norm and the rotary embedding of queries and
keys can be done there too: then they cost no reading and writing of HBM, neither in the forward pass, nor in its
recomputation, nor in the backward pass. Planned for eight sequences of 8,192 and four heads of 256 on one v6e (libtpu
0.0.46, `tomat bench attention-tiles`), forward went from 3.11 to 2.19 ms, backward from 5.97 to 4.48, norms and what
else is around them from 1.49 to 0.04.

The scores are of base 2, softmax(s) = 2^s / sum 2^s: the vector unit has powers of 2, and e^x costs a product more.

Axis letters: B batch, K heads of keys and values, G query heads of each of them, H = K G, S positions, D head size.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tomat.model.checkpoint_policies import ATTENTION_OUTPUT
from tomat.model.norm_rotary import SUBLANES, rotated, rotated_gradients
from tomat.model.tiles import LANES, ROTARY_ROWS, HeadTiles

MASKED = -1e30
"""Score of a pair that the mask forbids: 2^score is 0, and the difference of two such scores is not NaN."""
LN_2 = math.log(2.0)
UNROLL = 4
"""Parts of 64 positions whose norms and rotations may be scheduled together: forward from 0.34 to 0.26 ms, as above."""

_OUTER = (((1,), (1,)), ((), ()))
"""a b^T."""
_INNER = (((1,), (0,)), ((), ()))
"""a b."""
_OF_TRANSPOSED = (((0,), (0,)), ((), ()))
"""a^T b."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    tiles: HeadTiles,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    weights: jax.Array | None = None,
    table: jax.Array | None = None,
) -> jax.Array:
    """Causal attention with the weights 2^(q k) / sum 2^(q k), `[B, H, S, D]` in the type of `q`. Sizes are multiples
    of 128, and the blocks divide S.

    Query heads h of [i G, (i + 1) G) see head i of keys and values, `[B, K, S, D]`; for usual attention, queries come
    divided by sqrt(D) ln 2. `table`, float32 `[S, D]`, has cosines and, in the second half of D, sines of the rotary
    embedding. With it queries and keys are not rotated yet, and `weights`, float32 `[2, 1, D]`, are those of their
    norms; the weights of the queries' norm come divided instead of the queries.
    """
    return _forward(tiles, q, k, v, weights, table)[0]


def _grid_and_specs(
    q: jax.Array, k: jax.Array
) -> tuple[tuple[int, int, int], pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """The grid (B, K, G), and the blocks of a query head, of a head of keys and of a float32 row of a query head."""
    (B, H, S, D), K = q.shape, k.shape[1]
    G = H // K

    def of_query(b, i, g):
        return b, i * G + g, 0, 0

    queries = pl.BlockSpec((1, 1, S, D), of_query)
    keys = pl.BlockSpec((1, 1, S, D), lambda b, i, g: (b, i, 0, 0))
    return (B, K, G), queries, keys, pl.BlockSpec((1, 1, 1, S), of_query)


def _whole(x: jax.Array) -> pl.BlockSpec:
    """All of an array, the same at every step of the grid, in VMEM once."""
    return pl.BlockSpec(x.shape, lambda b, i, g: (0,) * x.ndim, pipeline_mode=pl.Buffered(1))


def _cost(q: jax.Array, k: jax.Array, *, products: int, heads: int) -> pl.CostEstimate:
    """Cost for XLA's scheduler: products over half of the pairs, and `heads` arrays as large as the queries."""
    B, H, S, D = q.shape
    return pl.CostEstimate(
        flops=products * B * H * S * S * D,
        bytes_accessed=heads * q.size * q.dtype.itemsize,
        transcendentals=B * H * S * S // 2,
    )


def _forward(
    tiles: HeadTiles, q: jax.Array, k: jax.Array, v: jax.Array, weights: jax.Array | None, table: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The output, and the base-2 log-sum-exp of each row of scores, float32 `[B, H, 1, S]`."""
    B, H, S, D = q.shape
    grid, queries, keys, row = _grid_and_specs(q, k)
    rotary = () if weights is None or table is None else (weights, table)
    out, lse = pl.pallas_call(
        partial(_forward_kernel, tiles, bool(rotary)),
        grid=grid,
        in_specs=[queries, keys, keys, *map(_whole, rotary)],
        out_specs=[queries, row],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, H, 1, S), jnp.float32)],
        scratch_shapes=[
            *(pltpu.VMEM((S, width), jnp.float32) for width in (LANES, LANES, D)),
            *((pltpu.VMEM((1, 1, S, D), k.dtype),) if rotary else ()),
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=tiles.vmem_bytes),
        cost_estimate=_cost(q, k, products=2, heads=4),
        interpret=tiles.interpret,
        name="whole_head_flash_attention_fwd",
    )(q, k, v, *rotary)
    return checkpoint_name(out, ATTENTION_OUTPUT), checkpoint_name(lse, ATTENTION_OUTPUT)


def _forward_rule(tiles: HeadTiles, q, k, v, weights, table):
    out, lse = _forward(tiles, q, k, v, weights, table)
    return out, (q, k, v, weights, table, out, lse)


def _backward_rule(tiles: HeadTiles, residuals: tuple[jax.Array | None, ...], by_out: jax.Array):
    q, k, v, weights, table, out, lse = residuals
    assert q is not None and k is not None and v is not None
    S, D = q.shape[2:]
    grid, queries, keys, row = _grid_and_specs(q, k)
    rotary = () if weights is None or table is None else (weights, table)
    sums = [jax.ShapeDtypeStruct((2, SUBLANES, D), jnp.float32)] if rotary else []
    by_q, by_k, by_v, *by_weights = pl.pallas_call(
        partial(_backward_kernel, tiles, bool(rotary)),
        grid=grid,
        in_specs=[queries, keys, keys, queries, queries, row, *map(_whole, rotary)],
        out_specs=[queries, keys, keys, *(pl.BlockSpec(x.shape, lambda b, i, g: (0, 0, 0)) for x in sums)],
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), *sums],
        scratch_shapes=[pltpu.VMEM((1, S), jnp.float32), *(pltpu.VMEM((S, D), jnp.float32) for _ in range(3))],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 3, vmem_limit_bytes=tiles.vmem_bytes),
        cost_estimate=_cost(q, k, products=5, heads=8),
        interpret=tiles.interpret,
        name="whole_head_flash_attention_bwd",
    )(q, k, v, by_out, out, lse, *rotary)
    return by_q, by_k, by_v, by_weights[0].sum(axis=1, keepdims=True) if by_weights else None, None


attend.defvjp(_forward_rule, _backward_rule)


def _part(start, size: int) -> pl.Slice:
    """`size` positions from `start`, a multiple of it that the compiler may rely on."""
    return pl.ds(pl.multiple_of(start, size), size)


def _below_diagonal(n_blocks: int, body) -> None:
    """`body(i, j)` for each pair of blocks i > j. The trips of the one loop are known when the kernel is compiled."""

    def step(_, pair):
        i, j = pair
        body(i, j)
        last = j == i - 1
        return jnp.where(last, i + 1, i), jnp.where(last, 0, j + 1)

    lax.fori_loop(0, n_blocks * (n_blocks - 1) // 2, step, (jnp.int32(1), jnp.int32(0)))


def _fold(x: jax.Array) -> jax.Array:
    """`[rows, 128]` whose sum over lanes is that of `x` `[rows, 128 n]`: lanes are summed once, after a head."""
    return sum(x[:, at : at + LANES] for at in range(LANES, x.shape[1], LANES)) + x[:, :LANES]


def _rotate(tiles: HeadTiles, source_ref, weight: jax.Array, table_ref, target_ref) -> None:
    """Write the norm and rotary embedding of a head, `[1, 1, S, D]`, to `target_ref`."""

    def chunk(i, _) -> None:
        rows = _part(i * ROTARY_ROWS, ROTARY_ROWS)
        x = source_ref[0, 0, rows, :].astype(jnp.float32)
        target_ref[0, 0, rows, :] = rotated(x, weight, table_ref[rows, :], tiles.eps).astype(target_ref.dtype)

    lax.fori_loop(0, table_ref.shape[0] // ROTARY_ROWS, chunk, None, unroll=UNROLL)


def _forward_kernel(tiles: HeadTiles, rotate: bool, q_ref, k_ref, v_ref, *refs) -> None:
    if not rotate:
        _attend(tiles, q_ref, k_ref, v_ref, *refs)
        return
    weights_ref, table_ref, out_ref, lse_ref, top_ref, sum_ref, acc_ref, k_rotated = refs

    @pl.when(pl.program_id(2) == 0)
    def _():
        _rotate(tiles, k_ref, weights_ref[1], table_ref, k_rotated)

    # The rotated queries lie where the output is written, which happens last.
    _rotate(tiles, q_ref, weights_ref[0], table_ref, out_ref)
    _attend(tiles, out_ref, k_rotated, v_ref, out_ref, lse_ref, top_ref, sum_ref, acc_ref)


def _attend(tiles: HeadTiles, q_ref, k_ref, v_ref, out_ref, lse_ref, top_ref, sum_ref, acc_ref) -> None:
    """The forward kernel with queries and keys as attention takes them; `q_ref` may be `out_ref`."""
    S, D = acc_ref.shape
    block, rows = tiles.block, tiles.rows

    def scores(at, cols) -> jax.Array:
        return lax.dot_general(q_ref[0, 0, at, :], k_ref[0, 0, cols, :], _OUTER, preferred_element_type=jnp.float32)

    def take_in(s: jax.Array, at, cols, *, first: bool) -> None:
        """Add a part of the scores to the running softmax of its rows, or begin it."""
        top = jnp.broadcast_to(s.max(axis=-1, keepdims=True), (rows, LANES))
        top = top if first else jnp.maximum(top_ref[at, :], top)
        weights = jnp.exp2(s - jnp.tile(top, (1, s.shape[1] // LANES)))
        values = v_ref[0, 0, cols, :]
        by_value = lax.dot_general(weights.astype(values.dtype), values, _INNER, preferred_element_type=jnp.float32)
        total = _fold(weights)
        if not first:
            shrink = jnp.exp2(top_ref[at, :] - top)
            total += shrink * sum_ref[at, :]
            by_value += jnp.tile(shrink, (1, D // LANES)) * acc_ref[at, :]
        top_ref[at, :], sum_ref[at, :], acc_ref[at, :] = top, total, by_value

    def on_diagonal(i, _) -> None:
        for above in range(0, block, rows):  # no row of a part sees beyond the part's last column
            at, cols = _part(i * block + above, rows), pl.ds(pl.multiple_of(i * block, block), above + rows)
            s = scores(at, cols)
            row, col = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (0, 1))
            take_in(jnp.where(row + above >= col, s, MASKED), at, cols, first=True)

    def below_diagonal(i, j) -> None:
        cols = _part(j * block, block)
        parts = [_part(i * block + above, rows) for above in range(0, block, rows)]
        # The scores of the next part are asked for before this one's are used, so that the matrix units work on them
        # while the vector unit raises powers: 1.79 to 1.71 ms of bundles.
        following = scores(parts[0], cols)
        for n, at in enumerate(parts):
            s = following
            if n + 1 < len(parts):
                following = scores(parts[n + 1], cols)
            take_in(s, at, cols, first=False)

    def finish(i, _) -> None:
        at = _part(i * rows, rows)
        total = jnp.broadcast_to(sum_ref[at, :].sum(axis=-1, keepdims=True), (rows, LANES))
        out_ref[0, 0, at, :] = (acc_ref[at, :] * jnp.tile(1 / total, (1, D // LANES))).astype(out_ref.dtype)
        lse_ref[0, 0, :, at] = (top_ref[at, :] + jnp.log2(total)).T[:1]

    lax.fori_loop(0, S // block, on_diagonal, None)
    _below_diagonal(S // block, below_diagonal)
    lax.fori_loop(0, S // rows, finish, None)


def _backward_kernel(tiles: HeadTiles, rotate: bool, q_ref, k_ref, v_ref, by_out_ref, out_ref, lse_ref, *refs) -> None:
    *arrays, taken_off_ref, q_acc, k_acc, v_acc = refs
    # Norm weights, `[2, 1, D]`, rotary table, `[S, D]`, and the gradients of the weights, `[2, 8, D]`.
    weights_ref: Any = None
    table_ref: Any = None
    by_weights_ref: Any = None
    if rotate:
        weights_ref, table_ref, by_q_ref, by_k_ref, by_v_ref, by_weights_ref = arrays
    else:
        by_q_ref, by_k_ref, by_v_ref = arrays
    S = q_acc.shape[0]
    block, keys = tiles.block_bwd, tiles.keys_bwd
    group = pl.program_id(2)

    # Gradients of keys and values are summed over the query heads that share them.
    @pl.when(group == 0)
    def _():
        k_acc[...] = jnp.zeros_like(k_acc)
        v_acc[...] = jnp.zeros_like(v_acc)

    q_acc[...] = jnp.zeros_like(q_acc)

    q_taken, k_taken = q_ref, k_ref
    if rotate:
        # Rotated queries and keys lie where their gradients are written, which happens last.
        q_taken, k_taken = by_q_ref, by_k_ref

        @pl.when(group == 0)
        def _():
            _rotate(tiles, k_ref, weights_ref[1], table_ref, k_taken)

        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0) & (group == 0))
        def _():
            by_weights_ref[...] = jnp.zeros_like(by_weights_ref)

        _rotate(tiles, q_ref, weights_ref[0], table_ref, q_taken)

    def take_off(i, _) -> None:
        """Compute what the softmax takes off each gradient of a weight: sum_d out_d by_out_d of its row."""
        at = _part(i * LANES, LANES)
        out, by_out = (ref[0, 0, at, :].astype(jnp.float32) for ref in (out_ref, by_out_ref))
        summed = (out * by_out).sum(axis=-1, keepdims=True)
        taken_off_ref[:, at] = jnp.broadcast_to(summed, (LANES, LANES)).T[:1]

    def part(at, cols, *, masked: bool) -> None:
        """Add to the gradients what the pairs of queries `at` and keys `cols` give; the scores lie keys by queries, so
        that what belongs to a query is a row."""
        q, by_out, k, v = q_taken[0, 0, at, :], by_out_ref[0, 0, at, :], k_taken[0, 0, cols, :], v_ref[0, 0, cols, :]
        s = lax.dot_general(k, q, _OUTER, preferred_element_type=jnp.float32)
        weights = jnp.exp2(s - lse_ref[0, 0, :, at])
        if masked:
            key, query = (lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in (0, 1))
            weights = jnp.where(key <= query, weights, 0.0)
        v_acc[cols, :] += lax.dot_general(
            weights.astype(by_out.dtype), by_out, _INNER, preferred_element_type=jnp.float32
        )
        by_weight = lax.dot_general(v, by_out, _OUTER, preferred_element_type=jnp.float32)
        by_s = ((by_weight - taken_off_ref[:, at]) * weights).astype(q.dtype)
        k_acc[cols, :] += lax.dot_general(by_s, q, _INNER, preferred_element_type=jnp.float32)
        q_acc[at, :] += lax.dot_general(by_s, k, _OF_TRANSPOSED, preferred_element_type=jnp.float32)

    def on_diagonal(i, _) -> None:
        for above in range(0, block, keys):  # no key of a part is seen by a query before the part
            cols = _part(i * block + above, keys)
            part(pl.ds(pl.multiple_of(i * block + above, keys), block - above), cols, masked=True)

    def below_diagonal(i, j) -> None:
        for above in range(0, block, keys):
            part(_part(i * block, block), _part(j * block + above, keys), masked=False)

    lax.fori_loop(0, S // LANES, take_off, None)
    lax.fori_loop(0, S // block, on_diagonal, None)
    _below_diagonal(S // block, below_diagonal)

    def finish(which: int, acc_ref, source_ref, by_ref) -> None:
        """Write the gradient of queries (0) or keys (1). The derivative of 2^s is ln 2 2^s."""
        size = ROTARY_ROWS if rotate else keys

        def chunk(i, _) -> None:
            at = _part(i * size, size)
            by_x = LN_2 * acc_ref[at, :]
            if rotate:
                x = source_ref[0, 0, at, :].astype(jnp.float32)
                by_x, more = rotated_gradients(by_x, x, weights_ref[which], table_ref[at, :], tiles.eps)
                by_weights_ref[which] += more
            by_ref[0, 0, at, :] = by_x.astype(by_ref.dtype)

        lax.fori_loop(0, S // size, chunk, None, unroll=UNROLL)

    def finish_values(i, _) -> None:
        at = _part(i * keys, keys)
        by_v_ref[0, 0, at, :] = v_acc[at, :].astype(by_v_ref.dtype)

    finish(0, q_acc, q_ref, by_q_ref)

    @pl.when(group == pl.num_programs(2) - 1)
    def _():
        finish(1, k_acc, k_ref, by_k_ref)
        lax.fori_loop(0, S // keys, finish_values, None)
