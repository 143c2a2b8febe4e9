"""The loss by Pallas kernels: value and gradients without logits in HBM.

The rows (positions of all sequences on a device) are taken some thousands at a time. For these one kernel walks over
the head and gives each row's sums; from them come the losses, the metrics and a dozen scalars for each row; with those
a second kernel walks over the head again and gives both gradients. So the logits are computed twice, four matmuls
instead of the three of `xla.py`, and what moves through HBM is the head and its gradient, once for each group of rows.

Shapes: B batch, P positions, E embedding, R rows of the head in use, K density bins, S rows resident, N rows of this
device rounded up to a multiple of S; C ids of the kernels' two sections (`pallas_kernels.py`), padding included.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from tomat.model.devices import traced_device_kind
from tomat.model.loss import pallas_kernels as kernels
from tomat.model.loss.interface import (
    BinTables,
    BlockSpec,
    LossInputs,
    LossSums,
    PositionTerms,
    PositionWeights,
    weighted_sums,
)
from tomat.model.loss.pallas_kernels import KernelPlan, gradients, n_statistics, row_statistics
from tomat.model.tiles import tuned_tiles


class _Rows(NamedTuple):
    """What is known of each row before its logits, `[N]` or `[S]`."""

    target: jax.Array
    """Id of the target among the kernels' ids, float32 (exact up to 2^24); -1: none of them."""
    rho: jax.Array
    weights: PositionWeights
    scale: jax.Array | None
    """As in `LossInputs`. The kernels know ratios alone; each row's sums of these are multiplied by it here."""


def pallas_loss_sums(
    spec: BlockSpec, differentiate: bool, inputs: LossInputs
) -> tuple[LossSums, tuple[jax.Array, ...]]:
    """As `xla_loss_sums`, for all rows of this device."""
    hidden, head, rows, weights, tables, scale = inputs
    n = hidden.shape[0] * hidden.shape[1]
    dtype = jnp.result_type(hidden, head)
    plan = _plan(spec, n, head.shape, dtype)
    last = spec.first_bin + spec.n_bins
    n_groups = -(-n // plan.resident_rows)

    def flat(x: jax.Array) -> jax.Array:
        x = x.reshape(n, *x.shape[2:])
        return jnp.pad(x, ((0, n_groups * plan.resident_rows - n), *((0, 0),) * (x.ndim - 1)))

    flat_hidden = flat(hidden.astype(dtype))
    flat_weights = PositionWeights(*(flat(w) for w in weights))
    flat_scale = None if scale is None else flat(scale)
    all_rows = _rows(spec, plan, flat(rows), head.shape[0], flat_weights, tables, flat_scale)
    sorted_head = _by_section(spec, plan, head.astype(dtype))
    table = _id_table(spec, plan, head.shape[0], tables)

    def step(carry: tuple[LossSums, tuple[jax.Array, ...]], index: jax.Array):
        sums, so_far = carry
        start = index * plan.resident_rows
        group_hidden, group = jax.tree.map(
            lambda x: lax.dynamic_slice_in_dim(x, start, plan.resident_rows), (flat_hidden, all_rows)
        )
        given = {kernels.TARGET: group.target, kernels.RHO: group.rho}
        statistics = row_statistics(plan, _scalars(given, plan.resident_rows), table, group_hidden, sorted_head)
        terms, columns = _terms(spec, plan, statistics, group)
        sums = LossSums(*(a + b for a, b in zip(sums, weighted_sums(group.weights, terms), strict=True)))
        if differentiate:
            by_hidden, by_head = so_far
            scalars = _scalars(given | columns, plan.resident_rows)
            by_group, by_head = gradients(plan, scalars, table, group_hidden, sorted_head, by_head)
            so_far = (lax.dynamic_update_slice_in_dim(by_hidden, by_group, start, axis=0), by_head)
        return (sums, so_far), None

    zero = jnp.zeros((), jnp.float32)
    none_yet = (jnp.zeros_like(flat_hidden), jnp.zeros(sorted_head.shape, jnp.float32)) if differentiate else ()
    initial = (LossSums(*(zero,) * len(LossSums._fields)), none_yet)
    (sums, found), _ = lax.scan(step, initial, jnp.arange(n_groups))
    if not differentiate:
        return sums, ()
    by_hidden, by_sorted = found
    density, others = by_sorted[: spec.n_bins], by_sorted[plan.density_ids :]
    by_head = jnp.concatenate(
        [others[: spec.first_bin], density, others[spec.first_bin : head.shape[0] - spec.n_bins]]
        if plan.other_ids
        else [jnp.zeros((spec.first_bin, head.shape[1])), density, jnp.zeros((head.shape[0] - last, head.shape[1]))]
    )
    return sums, (by_hidden[:n].reshape(hidden.shape).astype(hidden.dtype), by_head)


def _plan(spec: BlockSpec, n: int, head_shape: tuple[int, ...], dtype: jnp.dtype) -> KernelPlan:
    from tomat.model.vmem import check_vmem

    config, (n_rows, width) = spec.config, head_shape
    device_kind = traced_device_kind()
    tiles = config.tiles.filled(tuned_tiles(device_kind, width, n_rows, jnp.dtype(dtype).name))
    assert tiles.resident_rows and tiles.block_rows and tiles.block_ids and tiles.chunk_rows  # `filled` sees to it
    n_others = n_rows - spec.n_bins if config.vocabulary == "full" or config.preamble_weight > 0 else 0
    density_ids, other_ids = (-(-count // tiles.block_ids) * tiles.block_ids for count in (spec.n_bins, n_others))
    resident = min(tiles.resident_rows, -(-n // tiles.block_rows) * tiles.block_rows)
    vmem_bytes = check_vmem(tiles, resident, width, jnp.dtype(dtype).itemsize, n_statistics(config), device_kind)
    return KernelPlan(
        config=config,
        has_values=spec.has_values,
        density_ids=density_ids,
        other_ids=other_ids,
        has_padding=(density_ids, other_ids) != (spec.n_bins, n_others),
        resident_rows=resident,
        block_rows=tiles.block_rows,
        block_ids=tiles.block_ids,
        chunk_rows=tiles.chunk_rows,
        vmem_bytes=vmem_bytes,
    )


def _by_section(spec: BlockSpec, plan: KernelPlan, x: jax.Array) -> jax.Array:
    """Rows of the head `[R, ...]` in the order of the kernels' ids `[C, ...]`, zeros where there is no id."""

    def padded(part: jax.Array, size: int) -> jax.Array:
        return jnp.pad(part, ((0, size - part.shape[0]), *((0, 0),) * (x.ndim - 1)))

    last = spec.first_bin + spec.n_bins
    density = padded(x[spec.first_bin : last], plan.density_ids)
    if not plan.other_ids:
        return density
    return jnp.concatenate([density, padded(jnp.concatenate([x[: spec.first_bin], x[last:]]), plan.other_ids)])


def _id_table(spec: BlockSpec, plan: KernelPlan, n_rows: int, tables: BinTables) -> jax.Array:
    ids = jnp.arange(plan.density_ids + plan.other_ids, dtype=jnp.float32)
    is_real = _by_section(spec, plan, jnp.ones(n_rows))
    after = (0, ids.shape[0] - spec.n_bins)
    in_rho = spec.config.target_space == "rho"
    target_weight = tables.widths if in_rho else jnp.ones(spec.n_bins)
    rows = [
        ids,
        jnp.pad(tables.values, after),
        jnp.pad(target_weight, after),
        jnp.where(is_real > 0, 0.0, kernels.MASKED_LOGIT),
    ]
    return jnp.stack(rows + [jnp.zeros_like(ids)] * (kernels.TABLE_ROWS - len(rows)))


def _rows(
    spec: BlockSpec,
    plan: KernelPlan,
    rows: jax.Array,
    n_rows: int,
    weights: PositionWeights,
    tables: BinTables,
    scale: jax.Array | None,
) -> _Rows:
    """The `_Rows` of targets `rows` `[N]`, which are rows of the head and get the kernels' numbers."""
    bins = rows - spec.first_bin
    is_density = (bins >= 0) & (bins < spec.n_bins)
    others = plan.density_ids + jnp.where(bins < 0, rows, rows - spec.n_bins)
    is_other = (rows >= 0) & (rows < n_rows) & (plan.other_ids > 0)
    target = jnp.where(is_density, bins, jnp.where(is_other, others, -1))
    rho = tables.values[jnp.clip(bins, 0, spec.n_bins - 1)]
    return _Rows(target.astype(jnp.float32), rho, weights, scale)


def _scalars(columns: dict[int, jax.Array], n_rows: int) -> jax.Array:
    """The rows' scalars, `[S, 16]` float32; a column that a loss does not use is zero."""
    zero = jnp.zeros(n_rows, jnp.float32)
    return jnp.stack([columns.get(number, zero) for number in range(kernels.ROW_COLUMNS)], axis=-1)


def _terms(
    spec: BlockSpec, plan: KernelPlan, statistics: jax.Array, rows: _Rows
) -> tuple[PositionTerms, dict[int, jax.Array]]:
    """Terms of S rows and the gradient kernel's scalars by column, of statistics `[sections, n_statistics, S, L]`."""
    config = plan.config
    w_density, w_other = rows.weights.density, rows.weights.other
    lanes_maximum = statistics[:, kernels.MAXIMUM]
    maximum = jnp.max(lanes_maximum, axis=-1)
    weight = jnp.exp(lanes_maximum - maximum[..., None])
    # Density first; each section normalised by its own sum, for the reason that `_Softmax` gives.
    total = jnp.sum(weight * statistics[:, kernels.TOTAL], axis=-1)
    log_normaliser = maximum[0] + jnp.log(total[0])
    target_logit = jnp.sum(statistics[:, kernels.TARGET_LOGIT], axis=(0, 2))
    n_best = jnp.sum(jnp.where(lanes_maximum[0] == maximum[0][:, None], statistics[0, kernels.TIES], 0.0), axis=-1)
    top1 = (target_logit == maximum[0]) / n_best
    cross_entropy = log_normaliser - target_logit
    emd = jnp.sum(weight[0] * statistics[0, kernels.DISTANCE], axis=-1) / total[0]

    p = w_density / total[0]
    zero = jnp.zeros_like(p)
    scalars = {kernels.DENSITY_MAXIMUM: maximum[0], kernels.DENSITY_FACTOR: p, kernels.HIT: w_other}
    if config.kind == "cross_entropy":
        loss = cross_entropy
        scalars |= {kernels.HIT: w_density + w_other}
    elif config.kind == "soft_cross_entropy":
        # Zero at positions without a density target, whose weight is zero.
        q_total = jnp.sum(statistics[0, kernels.SOFT_TOTAL], axis=-1)
        q_total = jnp.where(q_total > 0, q_total, 1.0)
        loss = log_normaliser - jnp.sum(statistics[0, kernels.EXTRA], axis=-1) / q_total
        scalars |= {kernels.SOFT: w_density / q_total}
    elif config.kind == "ce_emd":
        loss = cross_entropy + config.emd_weight * emd
        scalars |= {kernels.HIT: w_density + w_other, kernels.TERM: config.emd_weight * p, kernels.CENTRE: emd}
    elif config.kind == "emd":
        loss = emd
        scalars |= {kernels.DENSITY_FACTOR: zero, kernels.TERM: p, kernels.CENTRE: emd}
    else:  # l1_mean
        error = jnp.sum(weight[0] * statistics[0, kernels.EXTRA], axis=-1) / total[0]
        loss = jnp.abs(error)
        scalars |= {kernels.DENSITY_FACTOR: zero, kernels.TERM: jnp.sign(error) * p, kernels.CENTRE: error}
    rho = rows.rho
    if rows.scale is not None:
        if config.kind == "ce_emd":
            loss = cross_entropy + config.emd_weight * rows.scale * emd
        elif config.kind in ("emd", "l1_mean"):
            loss = rows.scale * loss
        emd, rho = rows.scale * emd, rows.scale * rho - spec.offset_e_per_a3
        if kernels.TERM in scalars:
            scalars |= {kernels.TERM: rows.scale * scalars[kernels.TERM]}

    other_cross_entropy = zero
    if plan.other_ids:
        largest = jnp.max(maximum, axis=0)
        share = jnp.exp(maximum - largest)
        total_of_all = jnp.sum(share * total, axis=0)
        log_normaliser_of_all = largest + jnp.log(total_of_all)
        row_weight = w_other
        if config.vocabulary == "full":
            # -log(probability of any density token): the chain rule of -log p_t.
            not_density = log_normaliser_of_all - log_normaliser
            loss, cross_entropy = loss + not_density, cross_entropy + not_density
            scalars |= {kernels.DENSITY_FACTOR: scalars[kernels.DENSITY_FACTOR] - p}
            row_weight = row_weight + w_density
        if config.preamble_weight > 0:
            other_cross_entropy = log_normaliser_of_all - target_logit
        factor = row_weight * share / total_of_all
        scalars |= {
            kernels.DENSITY_FACTOR: scalars[kernels.DENSITY_FACTOR] + factor[0],
            kernels.OTHER_MAXIMUM: maximum[1],
            kernels.OTHER_FACTOR: factor[1],
        }
    return PositionTerms(loss, cross_entropy, emd, top1, rho, other_cross_entropy), scalars
