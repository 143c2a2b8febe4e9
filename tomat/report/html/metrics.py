"""`metrics.jsonl` as one curve a metric, read line by line (a run of a million steps is no million dictionaries), and
of a million points some thousands that look the same: no peak and no dip is lost."""

from array import array
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tomat.base.documents import is_figure
from tomat.base.layout import METRICS_FILE
from tomat.base.storage import explaining_storage, files_at
from tomat.train.runs.history import metrics_row

NOT_CURVES = ("step", "global_step", "run_progress")


@dataclass(frozen=True)
class Curve:
    steps: np.ndarray
    """int64 `[n]`, rising."""
    values: np.ndarray
    """float64 `[n]`, finite."""


@dataclass(frozen=True)
class Metrics:
    curves: Mapping[str, Curve]
    """By name, sorted; a value that was not finite is left out."""
    lines: int
    unreadable: int
    """Lines that are no JSON object with a step: a last one cut short by a kill, or damage."""
    steps_done: int
    """One more than the largest step."""
    written_utc: float | None
    """When the file was last written, seconds since 1970; None where there is none."""


SMOOTHED_PARTS = 100
"""Stretches of a curve of at least twice as many points, whose means are drawn over it."""
BUCKETS = 600
"""Stretches of a curve that is thinned: one or two pixels of a figure each."""


class CurveReader:
    def __init__(self) -> None:
        self._points: dict[str, tuple[array[int], array[float]]] = defaultdict(lambda: (array("q"), array("d")))
        self._lines = self._unreadable = 0
        self._last = -1

    def feed(self, line: bytes) -> None:
        row = metrics_row(line.decode(errors="replace"))
        if not row:
            self._unreadable += 1
            return
        self._lines += 1
        step = row["step"]
        self._last = max(self._last, step)
        for name, value in row.items():
            if is_figure(value) and name not in NOT_CURVES:
                steps, values = self._points[name]
                steps.append(step)
                values.append(value)

    def metrics(self, written_utc: float | None) -> Metrics:
        curves = {}
        for name, points in sorted(self._points.items()):
            steps, values = map(np.array, points)
            order = np.argsort(steps, kind="stable")
            curves[name] = Curve(steps[order], values[order])
        return Metrics(curves, self._lines, self._unreadable, self._last + 1, written_utc)


def read_curves(run_url: str) -> Metrics:
    """The curves of a run's folder or URL; none where it has no log yet."""
    files, root = files_at(run_url)
    path = f"{root}/{METRICS_FILE}"
    reader, written = CurveReader(), None
    with explaining_storage(f"{run_url}/{METRICS_FILE} cannot be read", "Give this user the right to read it."):
        if files.exists(path):
            written = files.modified(path).timestamp()
            with files.open(path, "rb") as file:
                for line in file:
                    reader.feed(line)
    return reader.metrics(written)


def kept_points(values: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Which points of a curve `[n]` to draw: of each of `buckets` equal stretches the smallest and the largest, and the
    ends, at most `2 * buckets + 2`, rising; all of a curve of at most twice as many points as stretches."""
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    size = -(-n // buckets)
    # The last stretch is filled up with the last point, whose place is then cut back to it.
    stretches = np.pad(values, (0, size * buckets - n), mode="edge").reshape(buckets, size)
    starts = np.arange(buckets) * size
    found = np.concatenate([starts + stretches.argmin(axis=1), starts + stretches.argmax(axis=1), [0, n - 1]])
    return np.unique(np.minimum(found, n - 1))


def smoothed(curve: Curve) -> tuple[int, np.ndarray, np.ndarray] | None:
    """How many points a mean is of, the steps in the middle of each stretch, and the means `[m]` over a curve of many
    points; None of one with few, which needs none."""
    width = len(curve.values) // SMOOTHED_PARTS
    if width < 2:
        return None
    means = curve.values[: len(curve.values) // width * width].reshape(-1, width).mean(axis=1)
    return width, curve.steps[width // 2 :: width][: len(means)], means
