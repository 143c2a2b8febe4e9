"""Reads a file of kernel timings: programs that somebody timed on a chip.

The format is CSV with the columns of `COLUMNS`: openxla/tokamax's autotuning data (`tokamax/data/autotuning` at commit
783ea95, 2026-08-21, Apache-2.0) put into one table. `shapes` are the arguments of the call as tokamax writes them,
`settings` its tiles. A row that cannot be is named and left out; the others count.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tomat.base.errors import TomatError
from tomat.hardware.chip_table import TPUS

if TYPE_CHECKING:
    import jax

COLUMNS = ("chip", "op", "shapes", "settings", "ms_median", "ms_min", "ms_max", "runs", "peak_memory_mb")
CHIP_NAMES = {"v7x": "tpu7x"}
"""Names of the file that are not those of `chip_table.py`."""

ARRAY = re.compile(r"(bool|[a-z]+\d+)\[(\d*(?:,\d+)*)\]")
"""An array as the file writes it: `bf16[1024,4096]`."""

LONGEST_MS, SHORTEST_MS = 60_000.0, 0.001
"""A kernel takes between a microsecond and a minute. Times outside are in another unit: the shortest of the 1,948 rows
is 0.009 ms, the longest 16,626 ms."""
LARGEST_MEMORY_MB = 1e6


@dataclass(frozen=True)
class KernelTiming:
    """One program that was timed on one chip."""

    line: int
    """Of the file, the header is line 1."""
    chip: str
    op: str
    arguments: Mapping[str, Any]
    """Of the call; arrays as `bf16[1024,4096]`."""
    settings: Mapping[str, Any]
    """Tiles and layouts; empty where the operation has none."""
    seconds: float
    """The median run."""
    seconds_min: float
    seconds_max: float
    runs: int
    peak_memory_bytes: int | None
    """What the compiler said; None if the file does not."""

    @cached_property
    def key(self) -> str:
        """Names the program, whatever it was timed at."""
        words = json.dumps([self.chip, self.op, self.arguments, self.settings], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:24]

    @cached_property
    def shape_key(self) -> str:
        """Names operation and array shapes, for any settings and chip: what cross-validation keeps together."""
        arrays = ARRAY.findall(json.dumps(self.arguments, sort_keys=True))
        words = json.dumps([self.op.removeprefix("pallas_mosaic_tpu_").removeprefix("xla_chunked_"), arrays])
        return hashlib.sha256(words.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class RefusedRow:
    line: int
    reason: str


def read_timings(path: Path) -> tuple[list[KernelTiming], list[RefusedRow]]:
    """The rows of a file of timings that can be, and those that cannot, each with its reason."""
    table = read_cells(path)
    in_mebibytes = {(row["chip"], row["op"]) for _, row in table if _in_mebibytes(row["peak_memory_mb"])}
    timings: list[KernelTiming] = []
    refused: list[RefusedRow] = []
    for line, row in table:
        try:
            timings.append(_timing(row, line, 2**20 if (row["chip"], row["op"]) in in_mebibytes else 10**6))
        except TomatError as error:
            refused.append(RefusedRow(line, str(error)))
    if not timings:
        first = f"line {refused[0].line}: {refused[0].reason}" if refused else "there is none below the header"
        raise TomatError(f"{path} has no row that can be used; {first}")
    return timings, refused


def read_cells(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows of a file of timings as text, each with its line; a cell that is missing is empty."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            if tuple(table.fieldnames or ()) == COLUMNS:
                return [(table.line_num, {name: row[name] or "" for name in COLUMNS}) for row in table]
            found = ", ".join(table.fieldnames or ("none",))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TomatError(f"{path} cannot be read as CSV of kernel timings ({error}).") from None
    raise TomatError(f"{path} has the columns {found}; expected {', '.join(COLUMNS)}.")


def _in_mebibytes(text: str) -> bool:
    """Whether a number of the column `peak_memory_mb` is no whole number of bytes unless it is mebibytes.

    One version of tokamax tunes an operation of a chip, and some wrote mebibytes. In the file of 2026-08-21 all rows of
    six operations of TPU7x, 313, are whole bytes as mebibytes alone; those of all others, 1,635, as megabytes.
    """
    try:
        as_mb, as_mib = (float(text) * unit for unit in (10**6, 2**20))
    except ValueError:
        return False
    return abs(as_mb - round(as_mb)) > 1e-3 and as_mib.is_integer()


def _timing(row: Mapping[str, str], line: int, memory_unit_bytes: int) -> KernelTiming:
    chip = CHIP_NAMES.get(row["chip"], row["chip"])
    known = [each.name for each in TPUS]
    if chip not in known:
        raise TomatError(f"chip {row['chip']!r} is not known; expected one of {', '.join(known)}")
    arguments, settings = (_object(row[name], name) for name in ("shapes", "settings"))
    check_arrays(arguments)
    milliseconds = {name: _number(row[name], name) for name in ("ms_min", "ms_median", "ms_max")}
    for name, value in milliseconds.items():
        if not SHORTEST_MS <= value <= LONGEST_MS:
            expected = f"milliseconds, {SHORTEST_MS} to {LONGEST_MS:,.0f}"
            raise TomatError(f"{name} is {row[name]}; expected {expected}: is it in another unit?")
    low, median, high = milliseconds.values()
    if not low <= median <= high:
        raise TomatError(f"ms_min, ms_median and ms_max are {low}, {median} and {high}; expected them in this order")
    runs = _number(row["runs"], "runs")
    if runs < 1 or runs != int(runs):
        raise TomatError(f"runs is {row['runs']}; expected a whole number from 1")
    memory = _number(row["peak_memory_mb"], "peak_memory_mb") if row["peak_memory_mb"] else None
    if memory is not None and not 0 <= memory < LARGEST_MEMORY_MB:
        raise TomatError(f"peak_memory_mb is {memory}; expected megabytes, below {LARGEST_MEMORY_MB:.0e}")
    return KernelTiming(
        line=line,
        chip=chip,
        op=row["op"],
        arguments=arguments,
        settings=settings,
        seconds=median / 1e3,
        seconds_min=low / 1e3,
        seconds_max=high / 1e3,
        runs=int(runs),
        peak_memory_bytes=None if memory is None else round(memory * memory_unit_bytes),
    )


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise TomatError(f"{name} is {text!r}; expected a finite number")
    return value


def _object(text: str, name: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise TomatError(f"{name} is {text[:60]!r}; expected a JSON object")
    return value


def array_shape(text: object) -> tuple[int, ...] | None:
    """`bf16[1024,4096]` -> (1024, 4096); None for what is no array."""
    found = ARRAY.fullmatch(text) if isinstance(text, str) else None
    return None if found is None else tuple(int(size) for size in found[2].split(",") if size)


def described(text: object, dtypes: Mapping[str, Any]) -> jax.ShapeDtypeStruct | None:
    """`bf16[8,4]` as an array to be; None for what is none, or of another type than `dtypes`."""
    import jax

    shape, dtype = array_shape(text), str(text).partition("[")[0]
    return jax.ShapeDtypeStruct(shape, dtypes[dtype]) if shape is not None and dtype in dtypes else None


def check_arrays(arguments: Mapping[str, Any]) -> None:
    """Refuse arrays that no call can have together."""
    shapes = {name: shape for name, value in arguments.items() if (shape := array_shape(value)) is not None}
    if not shapes:
        raise TomatError("shapes holds no array, such as bf16[1024,4096]")
    for name, shape in shapes.items():
        if 0 in shape:
            raise TomatError(f"{name} is {arguments[name]}, which has an empty axis")
    for one, axis, other, its_axis in SHARED_AXES:
        if one in shapes and other in shapes:
            a, b = shapes[one], shapes[other]
            if len(a) < abs(axis) or len(b) < abs(its_axis) or a[axis] != b[its_axis]:
                raise TomatError(f"{one} {arguments[one]} and {other} {arguments[other]} do not fit together")
    if {"q", "k"} <= shapes.keys() and shapes["q"][-2] % shapes["k"][-2]:
        raise TomatError(f"the heads of q {arguments['q']} are no multiple of those of k {arguments['k']}")


SHARED_AXES = (
    ("q", -1, "k", -1),  # width of a head
    ("k", -3, "v", -3),  # positions
    ("k", -2, "v", -2),  # heads
    ("x", -1, "w", -2),  # hidden width of the loss
    ("labels", -1, "x", -2),
)
"""Pairs of arguments and axes that are of one size: attention `[..., T, H, D]`, loss `x [B, H]`, `w [H, V]`."""
