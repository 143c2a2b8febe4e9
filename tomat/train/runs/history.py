"""What a run writes line by line, each a JSON object: `metrics.jsonl`, a line for each step, and `history.jsonl`.

The history is only ever appended to. It says when the run started, resumed and stopped, and what was changed under its
name. An event has `time` (UTC, ISO 8601), `event`, `step`, and what it needs besides.
"""

import contextlib
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tomat.base.documents import append_whole_line, read_bytes
from tomat.base.errors import TomatError
from tomat.base.layout import HISTORY_FILE
from tomat.base.reporting import to_jsonable, write_text, writing
from tomat.base.storage import READ_REMEDY, explaining_storage, files_at

Row = dict[str, Any]
Event = Row
"""A line, one JSON object. An event has `time`, `event`, `step`, and its details."""

MAX_STEP = 10**9
"""Largest step of a run: 30 years of one step a second. A larger number is damage."""

DATA_EVENT = "data"
SUBJECT_EVENT = "subject"
"""The event that says what is trained in place of a model, by content."""

Contents = dict[str, str | None]
"""Content hash by key of the configuration, `data.train` and `data.validation`; None where there is no such set."""


def file_content(url: str) -> bytes | None:
    """What a file of a run holds, in a folder or in a bucket; None where there is none."""
    files, path = files_at(url)
    with explaining_storage(f"{url} cannot be read", READ_REMEDY):
        try:
            return files.cat_file(path)
        except (FileNotFoundError, NotADirectoryError):
            return None


def stamped_line(timespec: str, row: Mapping[str, Any]) -> tuple[str, str]:
    """The time (UTC, ISO 8601), and the line of a log of such rows that begins with it."""
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec=timespec)
    return time, json.dumps(to_jsonable({"time": time, **row}), allow_nan=False) + "\n"


def append_event(run_dir: Path, event: str, step: int, **details: Any) -> None:
    """Write one event (`start`, `resume`, `stop`, `preempted`, `fork`, `warm_start`, `allow_change`, `data`,
    `partial_checkpoint`, `guard:<name>`, ...) at the end of a run's history, and wait until it is on disk."""
    _, line = stamped_line("milliseconds", {"event": event, "step": int(step), **details})
    path = run_dir / HISTORY_FILE
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            append_whole_line(file, line)


def read_events(run_dir: Path | str) -> list[Event]:
    """The events of a run, a folder or URL, in the order they were written; a damaged line is left out."""
    return read_history(run_dir)[0]


def read_history(run_dir: Path | str) -> tuple[list[Event], tuple[int, ...]]:
    """The events of a run as `read_events` gives them, and the numbers, from 1, of lines that are no events."""
    content = file_content(f"{str(run_dir).rstrip('/')}/{HISTORY_FILE}")
    return parse_events((content or b"").decode(errors="replace"))


def last_event(events: Sequence[Event], name: str) -> Event | None:
    """The last event of that name; None where there is none."""
    return next((event for event in reversed(events) if event["event"] == name), None)


def recorded_contents(events: Sequence[Event]) -> Contents | None:
    """The hashes of its data that a run's history holds; None for a run from before they were recorded."""
    event = last_event(events, DATA_EVENT)
    return None if event is None else {f"data.{name}": event.get(name) for name in ("train", "validation")}


def parse_metrics(text: str) -> tuple[list[Row], tuple[int, ...]]:
    """The rows of a `metrics.jsonl` in the order they stand, and the numbers, from 1, of lines that are no rows."""
    return _parsed(text, lambda row: _is_step(row.get("step")))


def parse_events(text: str) -> tuple[list[Event], tuple[int, ...]]:
    """The events of a `history.jsonl`, as `parse_metrics`."""
    return _parsed(text, lambda row: isinstance(row.get("event"), str) and _is_step(row.get("step", 0)))


def parse_log(text: str) -> tuple[list[Row], tuple[int, ...]]:
    """The lines of a `log.jsonl`, as `parse_metrics`."""
    names = ("time", "kind", "name", "event")
    return _parsed(text, lambda row: all(isinstance(row.get(name), str) for name in names))


def read_metrics(path: Path) -> list[Row]:
    """The lines of a `metrics.jsonl` in order of step; a last line cut short is left out, any other damage refused."""
    rows, unreadable = parse_metrics(read_bytes(path).decode(errors="replace"))
    damaged = [number for number in unreadable if number < len(rows) + len(unreadable)]
    if damaged:
        said = f"{path}: line {damaged[0]} is no JSON object with a step ({len(damaged)} such lines in all)"
        raise TomatError(f"{said}. Delete them, or restore the file; `tomat runs verify` names every line.")
    return sorted(rows, key=lambda row: row["step"])


def truncate_metrics(path: Path, first_step: int) -> int:
    """Drop the lines of `path` at and after `first_step`, and damaged ones, so that a resumed run logs every step
    exactly once; return how many were dropped."""
    if not path.exists():
        return 0
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.splitlines()
    kept = [line for line in lines if (row := metrics_row(line)) and row["step"] < first_step]
    # A last line cut short by its newline alone is whole, but the next step's must not become part of it.
    if len(kept) < len(lines) or not text.endswith("\n"):
        write_text(path, "".join(line + "\n" for line in kept))
    return len(lines) - len(kept)


def metrics_row(line: str) -> Row:
    """A line of a `metrics.jsonl`; empty where it is no JSON object with a step from 0 to `MAX_STEP`."""
    row = _json_object(line)
    return row if _is_step(row.get("step")) else {}


def _parsed(text: str, is_one: Callable[[Row], bool]) -> tuple[list[Row], tuple[int, ...]]:
    rows = [row if is_one(row) else {} for row in map(_json_object, text.splitlines())]
    return list(filter(None, rows)), tuple(number for number, row in enumerate(rows, start=1) if not row)


def _json_object(line: str) -> Row:
    """The object of a line; empty where it is none, or is damaged."""
    row = None
    try:
        # For a line of 22 metrics this takes a quarter of the time of json: 3 s for a million steps, not 13.
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        # NaN, infinity and halves of surrogate pairs, which Python writes and JSON has not.
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
    return row if isinstance(row, dict) else {}


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_STEP
