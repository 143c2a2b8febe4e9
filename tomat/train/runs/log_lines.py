"""The lines of `metrics.jsonl` and `history.jsonl`: whole ones, damaged ones, and those that a resume drops."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from tomat.base.documents import read_bytes
from tomat.base.errors import TomatError
from tomat.base.reporting import write_text

Row = dict[str, Any]
"""A line: one JSON object."""

MAX_STEP = 10**9
"""Of a run: 30 years of one step a second. A larger number is damage."""


def parse_metrics(text: str) -> tuple[list[Row], tuple[int, ...]]:
    """The rows of a `metrics.jsonl` in the order they stand, and the numbers, from 1, of lines that are none."""
    return _parsed(text, metrics_row)


def parse_events(text: str) -> tuple[list[Row], tuple[int, ...]]:
    """The events of a `history.jsonl`, as `parse_metrics`."""
    return _parsed(text, _event)


def parse_log(text: str) -> tuple[list[Row], tuple[int, ...]]:
    """The lines of a `log.jsonl`, as `parse_metrics`."""
    return _parsed(text, _log_line)


def read_metrics(path: Path) -> list[Row]:
    """The lines of a `metrics.jsonl` in order of step; a last line cut short is left out, any other damage refused."""
    rows, unreadable = parse_metrics(read_bytes(path).decode(errors="replace"))
    damaged = [number for number in unreadable if number < len(rows) + len(unreadable)]
    if damaged:
        raise TomatError(
            f"{path}: line {damaged[0]} is no JSON object with a step ({len(damaged)} such in all). Delete what is "
            "damaged, or restore the file; `tomat runs verify` names every line."
        )
    return sorted(rows, key=lambda row: row["step"])


def truncate_metrics(path: Path, first_step: int) -> int:
    """Drop the lines of `path` at and after `first_step`, and damaged ones, so that a resumed run logs every step
    exactly once; says how many."""
    if not path.exists():
        return 0
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    kept = [line for line in lines if (row := metrics_row(line)) is not None and row["step"] < first_step]
    if len(kept) < len(lines):
        write_text(path, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept)


def metrics_row(line: str) -> Row | None:
    """A line of a `metrics.jsonl`; None where it is no JSON object with a step from 0 to `MAX_STEP`."""
    row = _json_object(line)
    return row if row is not None and _is_step(row.get("step")) else None


def _parsed(text: str, parse: Callable[[str], Row | None]) -> tuple[list[Row], tuple[int, ...]]:
    rows = [parse(line) for line in text.splitlines()]
    unreadable = tuple(number for number, row in enumerate(rows, start=1) if row is None)
    return [row for row in rows if row is not None], unreadable


def _event(line: str) -> Row | None:
    row = _json_object(line)
    return row if row is not None and isinstance(row.get("event"), str) and _is_step(row.get("step", 0)) else None


def _log_line(line: str) -> Row | None:
    row = _json_object(line)
    names = ("time", "kind", "name", "event")
    return row if row is not None and all(isinstance(row.get(name), str) for name in names) else None


def _json_object(line: str) -> Row | None:
    try:
        # A line of 22 metrics takes a quarter of the time that json takes: 3 s of a million steps, not 13.
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        # NaN, infinity and halves of surrogate pairs, which Python writes and JSON has not.
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return None
    return row if isinstance(row, dict) else None


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP
