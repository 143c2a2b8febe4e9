"""Reads a file of kernel timings: programs that were timed on a chip.

The format is CSV with the columns of `COLUMNS`: openxla/tokamax's autotuning data (`tokamax/data/autotuning` at commit
783ea95, 2026-08-21, Apache-2.0) put into one table. `shapes` holds the arguments of the call as tokamax writes them,
`settings` its tiles. An invalid row is reported and left out; the others count.
"""

import csv
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from tomat.base.errors import TomatError
from tomat.base.records import Positive, typed
from tomat.hardware.chip_table import TPUS

if TYPE_CHECKING:
    import jax

COLUMNS = ("chip", "op", "shapes", "settings", "ms_median", "ms_min", "ms_max", "runs", "peak_memory_mb")
CHIP_NAMES = {"v7x": "tpu7x"}
"""Names of chips in the file that differ from those of `chip_table.py`."""
OWN = "tomat_"
"""Operations with this prefix are tomat's own (`own.py`), the others tokamax's."""

ARRAY = re.compile(r"(bool|[a-z]+\d+)\[((?:[1-9]\d*(?:,[1-9]\d*)*)?)\]")
"""An array as the file writes it: `bf16[1024,4096]`. No axis is empty."""

Milliseconds = Annotated[float, Meta(ge=0.001, le=60_000)]
"""A kernel takes between a microsecond and a minute. A time outside is in another unit: the shortest of tokamax's 1,948
rows is 0.009 ms, the longest 16,626 ms."""


@dataclass(frozen=True)
class KernelTiming:
    line: int
    """Line in the file; the header is line 1."""
    chip: str
    op: str
    arguments: Mapping[str, Any]
    """Arguments of the call; arrays as `bf16[1024,4096]`."""
    settings: Mapping[str, Any]
    """Tiles and layouts; empty where the operation has none."""
    seconds: float
    """Time of the median run."""
    peak_memory_bytes: int | None
    """Peak memory that the compiler stated; None if the file has none."""

    @cached_property
    def key(self) -> str:
        """Identifies the program, whatever its measured time."""
        words = json.dumps([self.chip, self.op, self.arguments, self.settings], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()[:24]

    @cached_property
    def shape_key(self) -> str:
        """Identifies operation and array shapes, for any settings and chip. Cross-validation keeps them together."""
        arrays = ARRAY.findall(json.dumps(self.arguments, sort_keys=True))
        words = json.dumps([self.op.removeprefix("pallas_mosaic_tpu_").removeprefix("xla_chunked_"), arrays])
        return hashlib.sha256(words.encode()).hexdigest()[:12]


@dataclass(frozen=True)
class RefusedRow:
    line: int
    reason: str


@dataclass(frozen=True)
class _Row:
    chip: str
    op: str
    shapes: dict[str, Any]
    settings: dict[str, Any]
    ms_median: Milliseconds
    ms_min: Milliseconds
    ms_max: Milliseconds
    runs: Positive
    peak_memory_mb: Annotated[float, Meta(ge=0, lt=1e6)] | None

    def __post_init__(self) -> None:
        known = [each.name for each in TPUS]
        if CHIP_NAMES.get(self.chip, self.chip) not in known:
            raise ValueError(f"chip {self.chip!r} is not known; expected one of {', '.join(known)}")
        if not self.ms_min <= self.ms_median <= self.ms_max:
            raise ValueError("expected ms_min, ms_median and ms_max in this order")


def read_timings(path: Path) -> tuple[list[KernelTiming], list[RefusedRow]]:
    """The valid rows of a file of timings, and the refused ones, each with its reason."""
    timings: list[KernelTiming] = []
    refused: list[RefusedRow] = []
    for line, cells in read_cells(path):
        values = {name: text if name in ("chip", "op") else cell_value(text) for name, text in cells.items()}
        try:
            row = typed(values, _Row, "the row", "Correct or delete it; is a figure in another unit?")
        except TomatError as error:
            refused.append(RefusedRow(line, str(error)))
            continue
        memory = None if row.peak_memory_mb is None else round(1e6 * row.peak_memory_mb)
        chip = CHIP_NAMES.get(row.chip, row.chip)
        timings.append(KernelTiming(line, chip, row.op, row.shapes, row.settings, row.ms_median / 1e3, memory))
    if not timings:
        first = f"line {refused[0].line}: {refused[0].reason}" if refused else "there is none below the header"
        raise TomatError(f"{path} has no row that can be used; {first}")
    return timings, refused


def read_cells(path: Path) -> list[tuple[int, dict[str, str]]]:
    """The rows of a file of timings as text, each with its line number."""
    columns, rows = csv_rows(path, "kernel timings")
    if columns != COLUMNS:
        raise TomatError(f"{path} has the columns {', '.join(columns) or 'none'}; expected {', '.join(COLUMNS)}.")
    return rows


def csv_rows(path: Path, what: str) -> tuple[tuple[str, ...], list[tuple[int, dict[str, str]]]]:
    """The columns of a CSV file, and its rows, each with its line number. A missing cell is an empty text."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            table = csv.DictReader(file)
            columns = tuple(table.fieldnames or ())
            return columns, [(table.line_num, {name: row[name] or "" for name in columns}) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TomatError(f"{path} cannot be read as CSV of {what} ({error}).") from None


def cell_value(text: str) -> Any:
    """The value of a cell: a number, a JSON object, None, or else its text."""
    try:
        value = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return text
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 5.0 runs, as spreadsheets write


def described(text: object, dtypes: Mapping[str, Any]) -> "jax.ShapeDtypeStruct | None":
    """The shape and dtype of `bf16[8,4]`; None if the text is no array, or has a type that is not in `dtypes`."""
    import jax

    found = ARRAY.fullmatch(text) if isinstance(text, str) else None
    if found is None or found[1] not in dtypes:
        return None
    return jax.ShapeDtypeStruct(tuple(int(size) for size in found[2].split(",") if size), dtypes[found[1]])
