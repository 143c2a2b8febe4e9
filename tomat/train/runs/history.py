"""A run's own record, `history.jsonl`: when it started, resumed, stopped, and what was changed under its name.

One JSON object a line, in order of time, only ever appended to: `time` (UTC, ISO 8601), `event`, `step`, and what the
event needs besides. It is published with the run and shown in the run's page.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec

from tomat.base.documents import append_whole_line
from tomat.base.layout import HISTORY_FILE
from tomat.base.reporting import to_jsonable, writing
from tomat.base.storage import READ_REMEDY, explaining_storage
from tomat.train.runs.log_lines import parse_events

Event = dict[str, Any]
"""`time`, `event`, `step`, and the details of the event."""

DATA_EVENT = "data"
"""The event that holds the hashes of a run's data; the last one counts."""

Contents = dict[str, str | None]
"""Content hash by key of the configuration, `data.train` and `data.validation`; None where there is no such set."""


def file_content(url: str) -> bytes | None:
    """What a file of a run holds, in a folder or in a bucket; None where there is none."""
    files, path = fsspec.core.url_to_fs(url)
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
    """Write one event at the end of the history in the run's local folder, and wait until it is on disk.

    Args:
        event: What happened: `start`, `resume`, `stop`, `preempted`, `fork`, `warm_start`, `allow_change`,
            `partial_checkpoint`, `data`, `guard:<name>`, ...
    """
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
    """The events of a run as `read_events` gives them, and the numbers, from 1, of lines that are none."""
    content = file_content(f"{str(run_dir).rstrip('/')}/{HISTORY_FILE}")
    return parse_events((content or b"").decode(errors="replace"))


def last_event(events: Sequence[Event], name: str) -> Event | None:
    """The last event of that name; None where there is none."""
    return next((event for event in reversed(events) if event["event"] == name), None)


def recorded_contents(events: Sequence[Event]) -> Contents | None:
    """The hashes of its data that a run's history holds; None for a run from before they were recorded."""
    event = last_event(events, DATA_EVENT)
    return None if event is None else {f"data.{name}": event.get(name) for name in ("train", "validation")}
