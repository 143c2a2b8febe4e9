"""A run's own record, `history.jsonl`: when it started, resumed, stopped, and what was changed under its name.

One JSON object a line, in order of time, only ever appended to: `time` (UTC, ISO 8601), `event`, `step`, and what the
event needs besides. It is published with the run and shown in the run's page.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec

from tomat.base.documents import append_whole_line
from tomat.base.layout import HISTORY_FILE
from tomat.base.reporting import to_jsonable, writing
from tomat.base.storage import explaining_storage
from tomat.train.runs.log_lines import parse_events

Event = dict[str, Any]
"""`time`, `event`, `step`, and the details of the event."""

REMEDY = "Give this user the right to read it."
"""Of a file of a run that this user may not read."""


def append_event(run_dir: Path, event: str, step: int, **details: Any) -> None:
    """Write one event at the end of the run's history, and wait until it is on disk.

    Args:
        run_dir: The run's local folder, which is made where it is missing.
        event: What happened: `start`, `resume`, `stop`, `preempted`, `fork`, `warm_start`, `allow_change`,
            `partial_checkpoint`, `data`, `guard:<name>`, ...
        step: Steps done when it happened.
        details: Whatever belongs to the event, in values that JSON has.
    """
    time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    row = to_jsonable({"time": time, "event": event, "step": int(step), **details})
    line = json.dumps(row, allow_nan=False) + "\n"
    path = run_dir / HISTORY_FILE
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            append_whole_line(file, line)


def read_events(run_dir: Path | str) -> list[dict[str, Any]]:
    """The events of a run in the order they were written; none where the run has no history.

    Args:
        run_dir: The run's folder, or its URL in a bucket. A line cut short by a kill, or damaged, is left out.

    Raises:
        TomatError: The history cannot be read; a `RetryableError` if the storage does not answer.
    """
    return read_history(run_dir)[0]


def last_event(events: Sequence[Event], name: str) -> Event | None:
    """The last event of that name; None where there is none."""
    return next((event for event in reversed(events) if event["event"] == name), None)


def read_history(run_dir: Path | str) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """The events of a run as `read_events` gives them, and the numbers, from 1, of lines that are none.

    Raises:
        TomatError: As for `read_events`.
    """
    url = f"{str(run_dir).rstrip('/')}/{HISTORY_FILE}"
    files, path = fsspec.core.url_to_fs(url)
    with explaining_storage(f"{url} cannot be read", REMEDY):
        try:
            text = files.cat_file(path).decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError):
            return [], ()
    return parse_events(text)
