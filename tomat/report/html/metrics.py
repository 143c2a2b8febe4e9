"""`metrics.jsonl` as one curve a metric, read line by line: a run of a million steps is no million dictionaries."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

import fsspec
import numpy as np

from tomat.base.documents import is_figure
from tomat.base.layout import METRICS_FILE
from tomat.base.storage import explaining_storage
from tomat.train.runs.log_lines import metrics_row

NOT_CURVES = ("step", "global_step", "run_progress")
"""Keys of a line that are the step in other words."""


@dataclass(frozen=True)
class Curve:
    """One metric over the steps that have it."""

    steps: np.ndarray
    """int64 `[n]`, rising."""
    values: np.ndarray
    """float64 `[n]`, finite."""


@dataclass(frozen=True)
class Metrics:
    """What a run has logged."""

    curves: Mapping[str, Curve]
    """By name, sorted; a value that was not finite is left out."""
    lines: int
    unreadable: int
    """Lines that are no JSON object with a step: a last one cut short by a kill, or damage."""
    steps_done: int
    """One more than the largest step."""
    written_utc: float | None
    """When the file was last written, seconds since 1970; None where there is none."""


class CurveReader:
    """Gathers lines of a log, as they come."""

    def __init__(self) -> None:
        self._points: dict[str, tuple[array[int], array[float]]] = {}
        self._lines = self._unreadable = 0
        self._last = -1

    def feed(self, line: bytes) -> None:
        """Take one line."""
        row = metrics_row(line.decode(errors="replace"))
        if row is None:
            self._unreadable += 1
            return
        self._lines += 1
        step = row["step"]
        self._last = max(self._last, step)
        for name, value in row.items():
            if is_figure(value) and name not in NOT_CURVES:
                points = self._points.get(name)
                if points is None:
                    points = self._points[name] = array("q"), array("d")
                points[0].append(step)
                points[1].append(value)

    def metrics(self, written_utc: float | None) -> Metrics:
        """What has been taken so far."""
        curves = {
            name: _in_order(np.array(steps), np.array(values)) for name, (steps, values) in sorted(self._points.items())
        }
        return Metrics(curves, self._lines, self._unreadable, self._last + 1, written_utc)


def read_curves(run_url: str) -> Metrics:
    """The curves of a run's folder or URL; none where it has no log yet.

    Raises:
        TomatError: The log cannot be read; a `RetryableError` if the storage does not answer.
    """
    files, root = fsspec.core.url_to_fs(run_url)
    reader, written = CurveReader(), None
    path = f"{root}/{METRICS_FILE}"
    with explaining_storage(f"{run_url}/{METRICS_FILE} cannot be read", "Give this user the right to read it."):
        if files.exists(path):
            written = files.modified(path).timestamp()
            with files.open(path, "rb") as file:
                for line in file:
                    reader.feed(line)
    return reader.metrics(written)


def _in_order(steps: np.ndarray, values: np.ndarray) -> Curve:
    if (np.diff(steps) < 0).any():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    return Curve(steps, values)
