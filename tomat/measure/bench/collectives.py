"""The collectives that a sharded step uses, timed over all devices of a slice, and their law: a start and a rate."""

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
"""Parts are of whole float32 tiles, split by rows: of one long row, XLA:TPU makes an all-reduce of a reduce-scatter."""
ROUNDS = 2
"""Rounds of a loop's body: the second writes where the first has read. After a single one, XLA:TPU copies the result of
a permute back for the next."""
LOOP_BYTES = 2**33
QUICK_LOOP_BYTES = 2**18
"""Executions of one program move about this together, 32 of the largest, 1,000 at most. The loop begins with a copy of
its operand through HBM: 0.4 % of it by a v6e's nominal bandwidth and an all-reduce at 200 GB/s."""
IN_A_ROW, RUNS = 4, 5
"""Counts, not seconds: the processes of a slice must dispatch the same."""


@dataclass(frozen=True)
class CollectiveKind:
    """One kind, on an array of S bytes a device (of an all-gather its result, of the others their operand)."""

    step: Callable[[jax.Array, int], jax.Array]
    """One execution on a device's part `[R, 128]`, given the number of devices; gives an array of its shape."""
    moved: Callable[[int], float]
    """Devices -> bytes that each device must send, over S."""
    sharded_operand: bool = False
    """The operand is a device's share, S over the number of devices."""


def _with_last(x: jax.Array, result: jax.Array) -> jax.Array:
    """`x` with one element of `result`: the next round depends on this one, at the cost of one or two tiny kernels."""
    return lax.dynamic_update_slice(x, result[-1:, -1:], (0, 0))


KINDS: Mapping[str, CollectiveKind] = {
    # Bytes moved as the bus bandwidth of nccl-tests counts them (doc/PERFORMANCE.md there).
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
"""A collective of a compiled program's text."""


def time_collectives(devices: Sequence[Any], *, quick: bool) -> list[dict[str, Any]]:
    """Time every kind at every size over all `devices`, in float32, in the order in which JAX would lay a mesh of one
    axis over them (neighbours on TPUs are neighbours on the links). Sizes of which a device's share would be less than
    a tile of 8 x 128 are left out. `quick`: small sizes, repeated less. Each is shown.

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
    # Zeros stay finite however often they are summed.
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
    """For each kind `seconds = start_seconds + bytes_moved_per_device / bytes_per_second`, by least squares of the
    relative error, so that small and large weigh the same.

    Only rows count whose collective the compiler left as it is: of a reduce-scatter of 256 MiB over a v6e-8, libtpu
    0.0.46 makes an all-reduce. A kind with fewer than two has no fit. Standard errors follow from the residuals; a
    slope that is not positive has no rate, and a fit through two sizes no error: None.
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
