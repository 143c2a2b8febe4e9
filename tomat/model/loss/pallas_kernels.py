"""The two Pallas kernels of the loss: sums of each row of logits, and the gradients. Logits exist in VMEM alone.

Both work on S resident rows (positions) and walk over the head in tiles of V ids, the grid; in a step they walk over
the rows in blocks of Q. A block's logits are made in one of two scratch buffers while those of the block before are
worked on in the other: the matrix units and the vector units meet in one basic block, so that the compiler overlaps
them. The head's ids are in one or two *sections*: density bins first, then, where the loss needs them, all others, each
padded to whole tiles. A tile lies in one section.

Shapes: S resident rows, Q rows of a block, V ids of a tile, R ids of all tiles, E embedding, L 128 lanes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tomat.model.loss.config import LossConfig
from tomat.model.tiles import LANES

MASKED_LOGIT = -1e30
"""Logit of an id that pads a section, and first value of the largest logit: finite, so no difference is NaN."""

ID, VALUE, TARGET_WEIGHT, PADDING = range(4)
"""Rows of the table of ids `[8, R]`: number among the tiles' ids; density of the bin, e/Å³; what a soft target's
Gaussian is multiplied with; 0, or `MASKED_LOGIT` for padding."""
TABLE_ROWS = 8
"""Sublanes of a register; the table uses the first four."""

TARGET, RHO, DENSITY_MAXIMUM, OTHER_MAXIMUM, DENSITY_FACTOR, OTHER_FACTOR, HIT, TERM, CENTRE, SOFT = range(10)
"""Columns of the rows' scalars `[S, 16]`. The statistics kernel reads the first two: the target's id among the tiles'
and its density. With x = exp(logit - maximum) and t = 1 at the target's id, the gradient by a logit is

x (FACTOR + TERM (distance - CENTRE)) - HIT t - SOFT q

with distance |v - r| (`l1_mean`: v - r) and q the soft target; TERM counts in the density section alone.
"""
ROW_COLUMNS = 16

MAXIMUM, TOTAL, TARGET_LOGIT, TIES, DISTANCE, EXTRA, SOFT_TOTAL = range(7)
"""Statistics of a row in a section: largest logit m; sum of x = exp(logit - m); the target's logit; how many logits
equal m; sum of x |v - r|; for `l1_mean` the sum of x (v - r), for `soft_cross_entropy` of q times logit; sum of q. Each
lane has the sums of every 128th id, with its own m: they are combined outside, once."""

_NT = (((1,), (1,)), ((), ()))
_NN = (((1,), (0,)), ((), ()))
_TN = (((0,), (0,)), ((), ()))


@dataclass(frozen=True)
class KernelPlan:
    config: LossConfig
    has_values: bool
    density_ids: int
    """Ids of the density section, padding included."""
    other_ids: int
    """The same of the other section; 0: there is none."""
    has_padding: bool
    resident_rows: int
    block_rows: int
    block_ids: int
    chunk_rows: int
    vmem_bytes: int

    @property
    def n_tiles(self) -> int:
        return (self.density_ids + self.other_ids) // self.block_ids

    @property
    def density_tiles(self) -> int:
        return self.density_ids // self.block_ids

    @property
    def is_soft(self) -> bool:
        return self.config.kind == "soft_cross_entropy"


def n_statistics(config: LossConfig) -> int:
    return {"l1_mean": EXTRA + 1, "soft_cross_entropy": SOFT_TOTAL + 1}.get(config.kind, DISTANCE + 1)


def row_statistics(
    plan: KernelPlan, scalars: jax.Array, table: jax.Array, hidden: jax.Array, head: jax.Array
) -> jax.Array:
    """Statistics, `[sections, n_statistics, S, L]` float32, of S resident rows over the whole head: of `hidden` `[S,
    E]`, `head` `[R, E]`, `table` `[8, R]`, and the first two columns of `scalars` `[S, 16]`."""
    rows, n_sums = hidden.shape[0], n_statistics(plan.config)
    return pl.pallas_call(
        partial(_statistics_kernel, plan),
        grid=(plan.n_tiles,),
        in_specs=_input_specs(plan, scalars, hidden),
        out_specs=pl.BlockSpec(
            (1, n_sums, rows, LANES),
            lambda tile: (jnp.where(tile < plan.density_tiles, 0, 1) if plan.other_ids else 0, 0, 0, 0),
        ),
        out_shape=jax.ShapeDtypeStruct((2 if plan.other_ids else 1, n_sums, rows, LANES), jnp.float32),
        scratch_shapes=[pltpu.VMEM((plan.block_rows, plan.block_ids), jnp.float32)] * 2,
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(hidden, head, products=1, moved=head.nbytes + hidden.nbytes),
        interpret=plan.config.interpret,
        name="loss_statistics",
    )(scalars, table, hidden, head)


def gradients(
    plan: KernelPlan, scalars: jax.Array, table: jax.Array, hidden: jax.Array, head: jax.Array, by_head: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of S resident rows: by `hidden`, in its type, and by `head`, added to `by_head`, `[R, E]`."""
    inputs = _input_specs(plan, scalars, hidden)
    logits, by_logits = (pltpu.VMEM((plan.block_rows, plan.block_ids), dtype) for dtype in (jnp.float32, hidden.dtype))
    return pl.pallas_call(
        partial(_gradient_kernel, plan),
        grid=(plan.n_tiles,),
        in_specs=[*inputs, inputs[-1]],
        out_specs=[_resident(hidden.shape), inputs[-1]],
        out_shape=[jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (hidden, by_head)],
        scratch_shapes=[logits, logits, by_logits, pltpu.VMEM(hidden.shape, jnp.float32)],
        input_output_aliases={4: 1},
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(hidden, head, products=3, moved=head.nbytes + 2 * hidden.nbytes + 2 * by_head.nbytes),
        interpret=plan.config.interpret,
        name="loss_gradients",
    )(scalars, table, hidden, head, by_head)


def _input_specs(plan: KernelPlan, scalars: jax.Array, hidden: jax.Array) -> list[pl.BlockSpec]:
    """Blocks of scalars, table, hidden states and head."""
    table = pl.BlockSpec((TABLE_ROWS, plan.block_ids), lambda tile: (0, tile))
    tile = pl.BlockSpec((plan.block_ids, hidden.shape[1]), lambda tile: (tile, 0))
    return [_resident(scalars.shape), table, _resident(hidden.shape), tile]


def _resident(shape: tuple[int, ...]) -> pl.BlockSpec:
    """An array that stays in VMEM for the whole grid."""
    return pl.BlockSpec(shape, lambda tile: (0,) * len(shape), pipeline_mode=pl.Buffered(1))


def _compiler_params(plan: KernelPlan) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=plan.vmem_bytes)


def _cost(hidden: jax.Array, head: jax.Array, products: int, moved: int) -> pl.CostEstimate:
    """Cost for XLA's scheduler and for `tomat plan`, which cannot see into a kernel."""
    n = hidden.shape[0] * head.shape[0]
    return pl.CostEstimate(flops=2 * products * n * hidden.shape[1], transcendentals=n, bytes_accessed=moved)


def _statistics_kernel(plan: KernelPlan, scalars, table, hidden, head, out, *logits) -> None:
    """One tile of ids: its share of the statistics of all rows."""
    config = plan.config
    n_sums = n_statistics(config)
    tile = pl.program_id(0)

    @pl.when((tile == 0) | (tile == plan.density_tiles))
    def _start_section() -> None:
        out[...] = jnp.zeros_like(out)
        out[0, MAXIMUM] = jnp.full(out.shape[2:], MASKED_LOGIT, jnp.float32)

    def add(block: jax.Array | int, slot: int) -> None:
        def add_chunk(chunk: jax.Array, carry: int) -> int:
            groups = _logits(plan, logits[slot], table, chunk)
            rows = _chunk(plan, block, chunk)
            before = out[0, MAXIMUM, rows, :]
            maximum = before
            for _, s in groups:
                maximum = jnp.maximum(maximum, s)
            shrink = jnp.exp(before - maximum)
            total = out[0, TOTAL, rows, :] * shrink
            target_logit = out[0, TARGET_LOGIT, rows, :]
            ties = jnp.where(before == maximum, out[0, TIES, rows, :], 0.0)
            target, rho = _column(scalars, rows, TARGET), _column(scalars, rows, RHO)
            distances = out[0, DISTANCE, rows, :] * shrink
            extra = soft_total = distances
            if n_sums > EXTRA:
                extra = out[0, EXTRA, rows, :] * (1.0 if plan.is_soft else shrink)
            if n_sums > SOFT_TOTAL:
                soft_total = out[0, SOFT_TOTAL, rows, :]
            for lanes, s in groups:
                ids = table[ID : ID + 1, lanes]
                x = jnp.exp(s - maximum)
                total = total + x
                target_logit = jnp.where(ids == target, s, target_logit)
                ties = jnp.where(s == maximum, ties + 1.0, ties)
                if not plan.has_values:
                    continue
                offset = table[VALUE : VALUE + 1, lanes] - rho
                distances = distances + x * jnp.abs(offset)
                if config.kind == "l1_mean":
                    extra = extra + x * offset
                elif plan.is_soft:
                    q = _soft_target(config, ids - target, offset, table[TARGET_WEIGHT : TARGET_WEIGHT + 1, lanes])
                    extra, soft_total = extra + q * s, soft_total + q
            # In the order of the statistics; a loss has the first `n_sums`.
            sums = maximum, total, target_logit, ties, distances, extra, soft_total
            for statistic, value in enumerate(sums[:n_sums]):
                out[0, statistic, rows, :] = value
            return carry

        lax.fori_loop(0, plan.block_rows // plan.chunk_rows, add_chunk, 0, unroll=True)

    _pipelined(plan, hidden, head, logits, add)


def _gradient_kernel(
    plan: KernelPlan, scalars, table, hidden, head, by_head_before, by_hidden, by_head, *scratch
) -> None:
    """One tile of ids: the gradient by its rows of the head, and its share of the gradient by the hidden states."""
    config = plan.config
    weighs_distance = config.kind in ("ce_emd", "emd", "l1_mean")
    has_hit = config.kind in ("cross_entropy", "ce_emd") or config.preamble_weight > 0
    *logits, by_logits, by_hidden_sum = scratch
    tile = pl.program_id(0)
    in_density = tile < plan.density_tiles

    @pl.when(tile == 0)
    def _start() -> None:
        by_hidden_sum[...] = jnp.zeros_like(by_hidden_sum)

    by_head[...] = by_head_before[...]

    def add(block: jax.Array | int, slot: int) -> None:
        def add_chunk(chunk: jax.Array, carry: int) -> int:
            rows = _chunk(plan, block, chunk)
            local = _chunk(plan, 0, chunk)
            column = partial(_column, scalars, rows)
            maximum, common, term = column(DENSITY_MAXIMUM), column(DENSITY_FACTOR), column(TERM)
            if plan.other_ids:
                maximum = jnp.where(in_density, maximum, column(OTHER_MAXIMUM))
                common = jnp.where(in_density, common, column(OTHER_FACTOR))
                term = jnp.where(in_density, term, 0.0)
            target, rho, hit, centre, soft = (column(c) for c in (TARGET, RHO, HIT, CENTRE, SOFT))
            for lanes, s in _logits(plan, logits[slot], table, chunk):
                ids = table[ID : ID + 1, lanes]
                factor = common
                offset = table[VALUE : VALUE + 1, lanes] - rho
                if weighs_distance:
                    distance = offset if config.kind == "l1_mean" else jnp.abs(offset)
                    factor = common + term * (distance - centre)
                gradient = jnp.exp(s - maximum) * factor
                if has_hit:
                    gradient = jnp.where(ids == target, gradient - hit, gradient)
                if plan.is_soft:
                    weight = table[TARGET_WEIGHT : TARGET_WEIGHT + 1, lanes]
                    gradient = gradient - soft * _soft_target(config, ids - target, offset, weight)
                # The matmuls of the backward pass run in the compute type, as those of the forward pass do.
                by_logits[local, lanes] = gradient.astype(by_logits.dtype)
            return carry

        lax.fori_loop(0, plan.block_rows // plan.chunk_rows, add_chunk, 0, unroll=True)
        rows = _block(block, plan.block_rows)
        by_hidden_sum[rows, :] += _dot(by_logits[...], head[...], _NN)
        by_head[...] += _dot(by_logits[...], hidden[rows, :], _TN)

    _pipelined(plan, hidden, head, logits, add)

    @pl.when(tile == plan.n_tiles - 1)
    def _finish() -> None:
        by_hidden[...] = by_hidden_sum[...].astype(by_hidden.dtype)


def _pipelined(plan: KernelPlan, hidden, head, logits, add: Callable[[jax.Array | int, int], None]) -> None:
    """Call `add` on each block of rows. Its logits are made one block ahead, in the two scratch buffers by turns."""

    def multiply(block: jax.Array | int, slot: int) -> None:
        logits[slot][...] = _dot(hidden[_block(block, plan.block_rows), :], head[...], _NT)

    n_blocks = plan.resident_rows // plan.block_rows
    multiply(0, 0)

    def two_blocks(pair: jax.Array, carry: int) -> int:
        multiply(2 * pair + 1, 1)
        add(2 * pair, 0)
        multiply(2 * pair + 2, 0)
        add(2 * pair + 1, 1)
        return carry

    lax.fori_loop(0, (n_blocks - 1) // 2, two_blocks, 0)
    if n_blocks % 2:
        add(n_blocks - 1, 0)
    else:
        multiply(n_blocks - 1, 1)
        add(n_blocks - 2, 0)
        add(n_blocks - 1, 1)


def _logits(plan: KernelPlan, logits, table, chunk: jax.Array) -> list[tuple[slice, jax.Array]]:
    """The logits of one chunk of rows by groups of 128 ids: (which lanes of the tile, `[chunk_rows, L]`)."""
    rows = _chunk(plan, 0, chunk)
    groups = []
    for start in range(0, plan.block_ids, LANES):
        lanes = slice(start, start + LANES)
        s = logits[rows, lanes]
        groups.append((lanes, s + table[PADDING : PADDING + 1, lanes] if plan.has_padding else s))
    return groups


def _soft_target(config: LossConfig, steps: jax.Array, offset: jax.Array, weight: jax.Array) -> jax.Array:
    """The Gaussian target before it is normalised."""
    scaled = (steps if config.target_space == "bin" else offset) * (1.0 / config.target_sigma)
    return weight * jnp.exp(-0.5 * (scaled * scaled))


def _column(scalars, rows, number: int) -> jax.Array:
    """One scalar of each row, in all lanes `[rows, L]`."""
    return jnp.broadcast_to(scalars[rows, number : number + 1], (rows.size, LANES))


def _block(block: jax.Array | int, size: int):
    return pl.ds(block * size if isinstance(block, int) else pl.multiple_of(block * size, size), size)


def _chunk(plan: KernelPlan, block: jax.Array | int, chunk: jax.Array):
    return pl.ds(pl.multiple_of(block * plan.block_rows + chunk * plan.chunk_rows, plan.chunk_rows), plan.chunk_rows)


def _dot(a: jax.Array, b: jax.Array, dimensions) -> jax.Array:
    """Product in float32; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=jnp.float32)
