"""The record of `tomat bench chip`: the CSV of a machine's kernels, and the best rates among them."""

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tomat.base.documents import mapping
from tomat.base.errors import TomatError
from tomat.base.reporting import write_text
from tomat.hardware.chip_table import Chip
from tomat.hardware.chips import chip_for_device_kind
from tomat.measure.bench.chip_rows import Row
from tomat.measure.bench.device_timing import RunTimes
from tomat.perf.timed_kernels.own import TIMED_WITH, OwnProgram, own_program
from tomat.perf.timed_kernels.timings import COLUMNS, cell_value, read_cells

PEAK_MATMULS = ("tomat_matmul", "tomat_matmul_transposed")
PEAK_STREAMS = ("tomat_add", "tomat_adam", "tomat_copy", "tomat_row_sum", "tomat_swiglu")
"""Operations that read or write each array once, as their count of bytes assumes."""
SMALLEST_STREAM_BYTES = 2**29
"""For smaller arrays, a large part may stay in the memory on the chip (v6e: 128 MiB; H200: 50 MiB)."""

type CsvRow = dict[str, str]
"""Column -> cell."""


@dataclass(frozen=True)
class Machine:
    device: Any
    chip: Chip | None
    """None: not in the table of chips."""
    versions: str
    """Versions of JAX and the runtime, as they stand in each row."""
    memory_bytes: int | None
    """None: the device does not report its memory, such as a CPU."""

    @property
    def name(self) -> str:
        """Name of the chip in the column `chip`."""
        return self.chip.name if self.chip is not None else self.device.device_kind

    @classmethod
    def here(cls) -> "Machine":
        device = jax.local_devices()[0]
        chip = chip_for_device_kind(device.device_kind)
        # On a TPU this is "PJRT C API\nTFRT TPU v6 lite\nBuilt on ...", which names the build of libtpu.
        runtime = " ".join(device.client.platform_version.split())
        memory = (device.memory_stats() or {}).get("bytes_limit")
        return cls(device, chip, f"jax {jax.__version__}, {runtime}", memory)


def row_name(row: Row) -> str:
    """`tomat_matmul x bf16[8,16] w bf16[16,32]`, followed by the settings if there are any."""
    op, arguments, settings = row
    words = [f"{name} {value}" for name, value in {**arguments, **settings}.items()]
    return " ".join([op, *words])


def traffic_bytes(program: OwnProgram) -> tuple[int, int]:
    results = jax.eval_shape(program.run, program.arrays)
    operands, given = (
        sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(tree))
        for tree in (program.arrays, results)
    )
    return operands, given


class Record:
    """The CSV of a machine's kernels. Rows of other chips and programs stay; a row with other versions is replaced."""

    def __init__(self, path: Path, machine: Machine) -> None:
        self.path, self.machine = path, machine
        self.rows = [cells for _, cells in read_cells(path)] if path.exists() else []

    def has(self, row: Row) -> bool:
        """Whether the row was timed with this machine's versions."""
        return _key(self._cells(row)) in map(_key, self.of_machine())

    def add(self, row: Row, times: RunTimes, memory_bytes: int) -> None:
        """Add a row and write the file."""
        cells = self._cells(row) | {
            "ms_median": f"{1e3 * times.seconds_median:.6g}",
            "ms_min": f"{1e3 * times.seconds_min:.6g}",
            "ms_max": f"{1e3 * times.seconds_max:.6g}",
            "runs": str(times.runs),
            "peak_memory_mb": f"{memory_bytes / 1e6:.6f}" if memory_bytes else "",
        }
        self.rows = [there for there in self.rows if _key(there) != _key(cells)] + [cells]
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerows([COLUMNS, *([row[name] for name in COLUMNS] for row in self.rows)])
        write_text(self.path, text.getvalue())

    def of_machine(self) -> list[CsvRow]:
        """Rows that were timed with this machine's versions, without damaged ones."""
        here = self.machine.name, self.machine.versions
        rows = [row for row in self.rows if (row["chip"], mapping(cell_value(row["settings"])).get(TIMED_WITH)) == here]
        return [row for row in rows if _is_whole(row)]

    def _cells(self, row: Row) -> CsvRow:
        op, arguments, settings = row
        whole = {**settings, TIMED_WITH: self.machine.versions}
        return {"chip": self.machine.name, "op": op, "shapes": json.dumps(arguments), "settings": json.dumps(whole)}


def _key(cells: CsvRow) -> tuple[str, str]:
    """Identifies a chip and a program, without the versions that timed it."""
    return cells["chip"], json.dumps(row_of(cells), sort_keys=True)


def row_of(cells: CsvRow) -> Row:
    """The program of a row of the file, without the versions that timed it."""
    arrays, settings = (mapping(cell_value(cells[name])) for name in ("shapes", "settings"))
    return cells["op"], dict(arrays), {name: value for name, value in settings.items() if name != TIMED_WITH}


def _is_whole(cells: CsvRow) -> bool:
    try:
        own_program(*row_of(cells))
        return float(cells["ms_median"]) > 0
    except (TomatError, ValueError):
        return False


def measured_peaks(chip: Chip | None, rows: Sequence[CsvRow]) -> dict[str, Any]:
    """The best rates among `rows` and their shares of one device's peaks in the table of chips; None if not known."""
    flops: dict[str, float] = {}
    streams: dict[str, float] = {}
    for cells in rows:
        op, arguments, settings = row_of(cells)
        name = row_name((op, arguments, settings))
        seconds = float(cells["ms_median"]) / 1e3
        if op in PEAK_MATMULS and "f32" not in cells["shapes"]:
            x, other = own_program(op, arguments, settings).arrays.values()
            rate = 2 * math.prod(x.shape) * other.shape[1] / seconds
            flops[name] = max(rate, flops.get(name, 0.0))
        elif op in PEAK_STREAMS and not settings:
            moved = sum(traffic_bytes(own_program(op, arguments, settings)))
            if moved >= SMALLEST_STREAM_BYTES:
                streams[name] = max(moved / seconds, streams.get(name, 0.0))
    hbm = chip and chip.hbm_bytes_per_second and chip.hbm_bytes_per_second / chip.jax_devices_per_chip
    report: dict[str, Any] = {}
    for kind, unit, rates, nominal in (
        ("matmul", "flops_per_second", flops, chip and chip.peak_of("bf16")),
        ("hbm", "bytes_per_second", streams, hbm),
    ):
        fastest = max(rates, key=lambda row: rates[row], default=None)
        best = rates[fastest] if fastest else None
        share = best / nominal if best and nominal else None
        report[f"best_{kind}"] = {unit: best, f"nominal_{unit}": nominal, "share": share, "row": fastest}
    return report
