"""`tomat bench chip`: times kernels and collectives on this machine's TPU or GPU, as a record to calibrate plans on.

The kernels of one device go into a CSV in the format of `tomat/perf/timed_kernels/timings.py`, each row as soon as it
is timed. Everything else goes into a JSON beside it.
"""

import argparse
import math
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tomat.base.errors import TomatError
from tomat.base.progress import progress
from tomat.base.report.terminal import show
from tomat.base.reporting import counted, first_line, is_or_are, readable_bytes, write_json, write_report
from tomat.hardware.chip_table import TPUS
from tomat.measure.bench.chip_record import Machine, Record, measured_peaks, row_name, row_of, traffic_bytes
from tomat.measure.bench.chip_rows import Row, full_rows, quick_rows
from tomat.measure.bench.collectives import fit_collectives, time_collectives
from tomat.measure.bench.device_timing import RunTimes, time_runs
from tomat.model.devices import ignore_absent_tpu
from tomat.model.joining import join_processes
from tomat.perf.timed_kernels.own import SPLASH, own_program

MEMORY_SHARE = 0.9
"""Share of a device's memory that arrays may fill. The rest is for temporaries and fragmentation."""
NEAR_DISPATCH = 5.0
"""A program that takes less time than this many dispatches is reported: its time may be the host's."""


def run(args: argparse.Namespace) -> int:
    """Time the kernels that are not in the record yet, then the collectives, and write both files."""
    show("Looking for devices.")
    # Imported after the message, because the import takes seconds.
    from levanter.distributed import DistributedConfig

    ignore_absent_tpu()
    join_processes(DistributedConfig())
    machine = Machine.here()
    quick = args.quick or machine.device.platform == "cpu"
    n_devices = jax.device_count()
    show(
        f"{machine.name}: {counted(n_devices, 'device')} of {jax.process_count()} host(s), {machine.versions}"
        + ("; small sizes only" if quick else "")
    )
    if machine.chip not in TPUS:
        show(
            f"`tomat plan --calibrate` cannot use these rows: its compiler, libtpu, does not know {machine.name}. They "
            "are of use on their own."
        )
    leads = jax.process_index() == 0
    report: dict[str, Any] = {
        "chip": machine.name,
        "device_kind": machine.device.device_kind,
        "n_devices": n_devices,
        "timed_with": machine.versions,
    }
    if leads:
        report |= _time_kernels(machine, args, quick)
    else:  # this host waits in the first collective
        show("Waiting for the first host, which times the kernels.")
    rows: list[dict[str, Any]] = []
    if n_devices == 1:
        show("Collectives left out: there is one device.")
    else:
        rows = time_collectives(jax.devices(), quick=quick)
    report |= {"collectives": rows, "collective_fits": fit_collectives(rows)}
    if leads:
        # Also written beside the CSV, where `tomat plan --calibrate --kernels` looks for the collectives.
        written = args.output.with_suffix(".json")
        write_json(written, report)
        write_report(args.json, report)
        _show_summary(report)
        show(f"wrote {args.output} and {written}")
    return 0


def _time_kernels(machine: Machine, args: argparse.Namespace, quick: bool) -> dict[str, Any]:
    """Time the rows that the CSV lacks, until the time is up. Returns the figures for the JSON."""
    record = Record(args.output, machine)
    rows = quick_rows() if quick else full_rows()
    if machine.device.platform != "tpu":
        left = [row for row in rows if row[0] in SPLASH]
        rows = [row for row in rows if row[0] not in SPLASH]
        show(f"{counted(len(left), 'row')} of splash attention left out: its kernels run on TPUs only.")
    waiting = [row for row in rows if not record.has(row)]
    if had := len(rows) - len(waiting):
        show(f"{counted(had, 'row')} of {len(rows)} {is_or_are(had)} in {args.output} already.")
    # The time that the host needs to dispatch one program, measured with one that does almost nothing.
    dispatch_seconds = time_row(machine, ("tomat_copy", {"x": "f32[8,128]"}, {}), seconds=0.1)[0].seconds_median
    refused: list[dict[str, Any]] = []
    late: list[str] = []
    began = time.monotonic()
    with progress() as bar:
        task = bar.add_task("Timing kernels", total=len(waiting))
        for row in waiting:
            name = row_name(row)
            if time.monotonic() - began > 60 * args.minutes:
                late.append(name)
                continue
            bar.update(task, description=name)
            try:
                times, memory = time_row(machine, row, seconds=0.02 if quick else 1.0)
            except TomatError as error:
                said = f"left out, {error}"
                refused.append({"row": name, "reason": str(error)})
            else:
                said = f"{1e3 * times.seconds_median:.4g} ms"
                record.add(row, times, memory)
            bar.console.print(f"{name}: {said}", highlight=False, soft_wrap=True)
            bar.advance(task)
    if late:
        show(f"{counted(len(late), 'row')} not begun after {args.minutes:g} minutes; start again to go on.")
    timed = record.of_machine()
    least_ms = NEAR_DISPATCH * 1e3 * dispatch_seconds
    near_dispatch = [row_name(row_of(cells)) for cells in timed if float(cells["ms_median"]) < least_ms]
    if near_dispatch:
        show(
            f"{counted(len(near_dispatch), 'row')} took less than {NEAR_DISPATCH:g} dispatches of "
            f"{1e6 * dispatch_seconds:.3g} us; these times may be the host's."
        )
    return {
        "rows_left_out": refused,
        "rows_not_begun": late,
        "rows_near_dispatch": near_dispatch,
        "dispatch_seconds": dispatch_seconds,
        **measured_peaks(machine.chip, timed),
    }


def time_row(machine: Machine, row: Row, *, seconds: float) -> tuple[RunTimes, int]:
    """Compile a row's program and run it for about `seconds`. Returns its times and the compiler's peak memory in
    bytes, 0 if the backend does not report it.
    """
    program = own_program(*row)
    try:
        operands, results = traffic_bytes(program)
        in_flight = 4
        if machine.memory_bytes is not None:
            room = MEMORY_SHARE * machine.memory_bytes - operands
            # One program runs while the next is dispatched, so at least two results are held beside the operands.
            if room < 2 * results:
                raise TomatError(
                    f"it needs {readable_bytes(operands + 2 * results)}, and {MEMORY_SHARE:.0%} of the device's "
                    f"{readable_bytes(machine.memory_bytes)} may be used"
                )
            in_flight = min(32, int(room / max(1, results)))
        sharding = jax.sharding.SingleDeviceSharding(machine.device)
        compiled = program.lower(sharding).compile()
        memory = compiled.memory_analysis()
        arrays = jax.jit(lambda: _noise(program.arrays), out_shardings=sharding)()
        times = time_runs(lambda: compiled(arrays), seconds=seconds, in_flight=in_flight)
    except TomatError:
        raise
    except Exception as error:  # JaxRuntimeError, of which jax exports no stable name, and what Pallas raises
        raise TomatError(f"the device refuses it: {first_line(error)}") from None
    return times, memory.peak_memory_in_bytes if memory is not None else 0


def _noise(arrays: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Noise-like values, made on the device without temporaries. A chip's clock may depend on the values it multiplies.

    They are between -1 and 1. Those of weights are smaller, so that a chain of products does not vanish or overflow.
    """
    made = {}
    for name, array in arrays.items():
        axes = [jax.lax.broadcasted_iota(jnp.float32, array.shape, axis) for axis in range(len(array.shape))]
        mixed = sum(factor * axis for factor, axis in zip((12.9898, 78.233, 37.719, 93.989, 4.581), axes, strict=False))
        scale = math.sqrt(3 / array.shape[0]) if name in ("up", "down") else 1.0
        made[name] = (scale * (2.0 * jnp.mod(jnp.sin(mixed) * 43758.547, 1.0) - 1.0)).astype(array.dtype)
    return made


def _show_summary(report: Mapping[str, Any]) -> None:
    for name, unit, scale, words in (
        ("matmul", "flops_per_second", 1e12, "TFLOP/s"),
        ("hbm", "bytes_per_second", 1e9, "GB/s"),
    ):
        best = report[f"best_{name}"]
        if best[unit] is not None:
            share = f", {best['share']:.1%} of the table's" if best["share"] is not None else ""
            show(f"best {name}: {best[unit] / scale:.4g} {words}{share} ({best['row']})")
    for kind, fit in report["collective_fits"].items():
        rate = "no rate" if fit["bytes_per_second"] is None else f"{fit['bytes_per_second'] / 1e9:.4g} GB/s"
        show(
            f"{kind}: {1e6 * fit['start_seconds']:.3g} us + bytes moved at {rate}, within "
            f"{fit['relative_error_largest']:.0%}"
        )
