"""Reads `metrics.jsonl` as one curve for each metric, line by line, so that a run of a million steps does not become a
million dictionaries. Thins a curve for drawing to about a thousand points that look the same and keep every extreme."""

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
    """The curve of each metric, sorted by name. Values that are not finite are left out."""
    lines: int
    unreadable: int
    """Number of lines that are not a JSON object with a step: damage, or a last line that a kill cut short."""
    steps_done: int
    """One more than the largest step."""
    written_utc: float | None
    """When the file was last written, in seconds since 1970; None where there is no file."""


SMOOTHED_PARTS = 100
"""Number of stretches whose means are drawn over a curve, if it has at least twice as many points."""
BUCKETS = 600
"""Number of stretches of a thinned curve: each is one or two pixels of a figure."""


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
    """The curves of the run in a folder or at a URL; no curves where it has no log yet."""
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
    """The rising indices of the points of a curve `[n]` to draw: the smallest and largest of each of `buckets` equal
    stretches and both ends, at most `2 * buckets + 2`. A curve of at most `2 * buckets` points keeps them all."""
    n = len(values)
    if n <= 2 * buckets:
        return np.arange(n)
    size = -(-n // buckets)
    # The last stretch is padded with copies of the last point; an index into the padding becomes that of this point.
    stretches = np.pad(values, (0, size * buckets - n), mode="edge").reshape(buckets, size)
    starts = np.arange(buckets) * size
    found = np.concatenate([starts + stretches.argmin(axis=1), starts + stretches.argmax(axis=1), [0, n - 1]])
    return np.unique(np.minimum(found, n - 1))


def smoothed(curve: Curve) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Means of a long curve: the number of points of each mean, the step in the middle of each stretch, and the means
    `[m]`. None for a short curve, which needs no smoothing."""
    width = len(curve.values) // SMOOTHED_PARTS
    if width < 2:
        return None
    means = curve.values[: len(curve.values) // width * width].reshape(-1, width).mean(axis=1)
    return width, curve.steps[width // 2 :: width][: len(means)], means
