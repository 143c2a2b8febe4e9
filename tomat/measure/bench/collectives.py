"""Times the collectives of a sharded step over all devices of a slice, and fits a start time and a rate to them."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tomat.base.report.terminal import show
from tomat.base.reporting import readable_bytes
from tomat.measure.bench.device_timing import time_runs

AXIS = "devices"
SIZES_BYTES = (2**16, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)
QUICK_SIZES_BYTES = (2**14, 2**16, 2**18)
LANES = 128
TILE_BYTES = 4 * 8 * LANES
"""Parts are whole float32 tiles, split by rows: with one long row, XLA:TPU makes a reduce-scatter an all-reduce."""
ROUNDS = 2
"""Rounds in the body of a loop: the second writes where the first has read. With a single round, XLA:TPU copies the
result of a permute back for the next iteration."""
LOOP_BYTES = 2**33
QUICK_LOOP_BYTES = 2**18
"""All executions in a program move about this many bytes: 32 of the largest size, at most 1,000. The loop begins with a
copy of its operand through HBM: 0.4 % of its time at a v6e's nominal bandwidth and an all-reduce at 200 GB/s."""
IN_A_ROW, RUNS = 4, 5
"""Fixed counts in place of a time, because all processes of a slice must dispatch the same number."""


@dataclass(frozen=True)
class CollectiveKind:
    """One kind of collective, on an array of S bytes per device (the result of an all-gather, else the operand)."""

    step: Callable[[jax.Array, int], jax.Array]
    """(Device's part `[R, 128]`, number of devices) -> result of one execution, with the shape of the part."""
    moved: Callable[[int], float]
    """Number of devices -> bytes that each device must send, divided by S."""
    sharded_operand: bool = False
    """The operand is a device's share: S divided by the number of devices."""


def _with_last(x: jax.Array, result: jax.Array) -> jax.Array:
    """`x` with one element of `result`, so that the next round depends on this one; costs one or two tiny kernels."""
    return lax.dynamic_update_slice(x, result[-1:, -1:], (0, 0))


KINDS: Mapping[str, CollectiveKind] = {
    # Bytes moved, counted as for the bus bandwidth of nccl-tests (its doc/PERFORMANCE.md).
    "all-gather": CollectiveKind(
        lambda x, n: _with_last(x, lax.all_gather(x, AXIS, tiled=True)), lambda n: (n - 1) / n, sharded_operand=True
    ),
    "reduce-scatter": CollectiveKind(
        lambda x, n: _with_last(x, lax.psum_scatter(x, AXIS, tiled=True)), lambda n: (n - 1) / n
    ),
    "all-reduce": CollectiveKind(lambda x, n: lax.psum(x, AXIS), lambda n: 2 * (n - 1) / n),
    "collective-permute": CollectiveKind(
        lambda x, n: lax.ppermute(x, AXIS, [(i, (i + 1) % n) for i in range(n)]), lambda n: 1.0
    ),
    "all-to-all": CollectiveKind(
        lambda x, n: lax.all_to_all(x, AXIS, split_axis=0, concat_axis=0, tiled=True), lambda n: (n - 1) / n
    ),
}

_OPCODE = re.compile(rf" ({'|'.join(KINDS)})(?:-start)?\(")
"""Matches a collective in the text of a compiled program."""


def time_collectives(devices: Sequence[Any], *, quick: bool) -> list[dict[str, Any]]:
    """Time every kind at every size over all `devices`, in float32, and show each. The devices have the order of JAX's
    mesh with one axis (on TPUs, neighbours in it are neighbours on the links). Sizes for which a device's share is less
    than a tile of 8 x 128 are left out. `quick`: small sizes, fewer repetitions.

    Each program repeats its collective in a loop, so that its dispatch does not count.
    """
    mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    sizes, loop_bytes = (QUICK_SIZES_BYTES, QUICK_LOOP_BYTES) if quick else (SIZES_BYTES, LOOP_BYTES)
    rows = []
    for name, kind in KINDS.items():
        for size in sizes:
            if size < TILE_BYTES * len(devices):
                continue
            row = _timed(mesh, name, kind, size, loop_bytes)
            show(f"{name}, {readable_bytes(row['bytes_per_device'])}: {1e3 * row['seconds_median']:.4g} ms")
            rows.append(row)
    return rows


def _timed(mesh: Mesh, name: str, kind: CollectiveKind, size_bytes: int, loop_bytes: int) -> dict[str, Any]:
    n = mesh.size
    share_rows = 8 * (size_bytes // (n * TILE_BYTES))
    whole_bytes = n * share_rows * TILE_BYTES // 8
    loop = min(500, max(1, loop_bytes // whole_bytes // ROUNDS))
    spec = PartitionSpec(AXIS)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, spec))
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def repeated(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, loop, lambda _, part: kind.step(kind.step(part, n), n), x)

    operand = (n * share_rows * (1 if kind.sharded_operand else n), LANES)
    # Zeros stay finite, no matter how often they are summed.
    x = jax.jit(lambda: jnp.zeros(operand, jnp.float32), out_shardings=NamedSharding(mesh, spec))()
    compiled = repeated.lower(x).compile()
    times = time_runs(lambda: compiled(x), in_flight=IN_A_ROW, in_a_row=IN_A_ROW, runs=RUNS)
    return {
        "kind": name,
        "compiled_to": sorted(set(_OPCODE.findall(compiled.as_text() or ""))),
        "n_devices": n,
        "mesh_shape": list(mesh.devices.shape),
        "bytes_per_device": whole_bytes,
        "bytes_moved_per_device": kind.moved(n) * whole_bytes,
        "seconds_median": times.seconds_median / (ROUNDS * loop),
        "seconds_min": times.seconds_min / (ROUNDS * loop),
        "seconds_max": times.seconds_max / (ROUNDS * loop),
        "rounds": ROUNDS * loop,
        "runs": times.runs,
    }


def fit_collectives(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Fit `seconds = start_seconds + bytes_moved_per_device / bytes_per_second` for each kind, by least squares of the
    relative error, so that small and large sizes have the same weight.

    Only rows whose collective the compiler did not replace count: libtpu 0.0.46 turns a reduce-scatter of 256 MiB over
    a v6e-8 into an all-reduce. A kind with fewer than two rows has no fit. Standard errors follow from the residuals.
    The rate is None if the slope is not positive; the errors are None for a fit through two sizes.
    """
    fits = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind and row["compiled_to"] == [kind]]
        if len(of_kind) < 2:
            continue
        seconds = np.array([row["seconds_median"] for row in of_kind])
        moved = np.array([row["bytes_moved_per_device"] for row in of_kind])
        per_byte, start = np.polyfit(moved, seconds, 1, w=1 / seconds).tolist()
        per_byte_error = start_error = None
        if len(of_kind) > 2:
            _, covariance = np.polyfit(moved, seconds, 1, w=1 / seconds, cov=True)
            per_byte_error, start_error = np.sqrt(np.diag(covariance)).tolist()
        residuals = (start + per_byte * moved) / seconds - 1.0
        rated = per_byte > 0
        fits[kind] = {
            "start_seconds": start,
            "start_seconds_error": start_error,
            "bytes_per_second": 1.0 / per_byte if rated else None,
            "bytes_per_second_error": per_byte_error / per_byte**2 if rated and per_byte_error is not None else None,
            "relative_error_rms": float(np.sqrt(np.mean(np.square(residuals)))),
            "relative_error_largest": float(np.max(np.abs(residuals))),
        }
    return fits
