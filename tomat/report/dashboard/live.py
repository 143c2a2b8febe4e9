"""The curves of a run that is being written. Each look reads only what was added to the log since the last one."""

import threading
from typing import Any

from tomat.base.layout import METRICS_FILE
from tomat.base.storage import explaining_storage, files_at
from tomat.report.dashboard.listing import own_path
from tomat.report.html.metrics import CurveReader, Metrics, kept_points, smoothed

_SEAM_BYTES = 256
"""Bytes before the offset where reading continues. If a resume replaced them by others, the log is read anew."""


class LiveLog:
    def __init__(self, url: str) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._reader, self._offset, self._seam = CurveReader(), 0, b""

    def read(self) -> tuple[str, Metrics]:
        """The state of the log: a version, which changes whenever the log does, and the curves. An incomplete last line
        is left for the next look."""
        files, root = files_at(self.url)
        path, written = own_path(files, root, METRICS_FILE), None
        with self._lock, explaining_storage(f"{self.url}/{METRICS_FILE} cannot be read"):
            files.invalidate_cache()
            if not files.exists(path):
                self._start_over()
            else:
                written = files.modified(path).timestamp()
                size = files.size(path)
                start = self._offset - len(self._seam)
                if size < self._offset or files.cat_file(path, start=start, end=self._offset) != self._seam:
                    self._start_over()
                with files.open(path, "rb") as file:
                    file.seek(self._offset)
                    while self._offset < size and (line := file.readline()).endswith(b"\n"):
                        self._reader.feed(line)
                        self._offset += len(line)
                        self._seam = (self._seam + line)[-_SEAM_BYTES:]
            return f"{self._offset}-{written}", self._reader.metrics(written)


def drawn_curves(metrics: Metrics) -> dict[str, dict[str, Any]]:
    """Steps and values of each metric as they are drawn, as on a run's own page: a long curve is thinned but keeps
    every peak and dip, and has means over stretches of `mean_of` points."""
    found: dict[str, dict[str, Any]] = {}
    for name, curve in metrics.curves.items():
        kept = kept_points(curve.values)
        found[name] = {"x": curve.steps[kept].tolist(), "y": curve.values[kept].tolist()}
        if (over := smoothed(curve)) is not None:
            width, steps, means = over
            found[name] |= {"mean_of": width, "mean_x": steps.tolist(), "mean_y": means.tolist()}
    return found
