"""The runs of a folder or bucket as one row each, read from the two ends of their logs, so that 200 runs can be listed.

Rows are cached, also for this user's next dashboard, with the sizes and times of the files that they were read from.
"""

import contextlib
import hashlib
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from fsspec.implementations.local import LocalFileSystem

from tomat import __version__
from tomat.base.documents import is_figure, mapping, parse_json
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, HISTORY_FILE, METRICS_FILE
from tomat.base.reporting import first_line, write_text
from tomat.base.storage import explaining_storage, files_at, is_remote
from tomat.train.runs.checkpoints import survey
from tomat.train.runs.devices import asked_but_not_found
from tomat.train.runs.record import find_runs, read_record
from tomat.train.runs.summary import MFU_STEPS, RunSummary, last_written, summarise

PLAN_FILE = "plan.json"
"""A plan that a user may put into a run's folder with `tomat plan --like RUN --json RUN/plan.json`."""
HEAD_BYTES, TAIL_BYTES = 2**14, 2**16
"""Parts of a log that are read: the head for the first loss, the tail for the last steps and the newest validation."""
FRESH_SECONDS = 5.0
"""How long a listing is served to all requests before the place is read again."""
LET_PASS_SECONDS = 0.01
"""Pause between two looks. Without it, this thread would take the lock again before a waiting thread could."""
SURVEY_SECONDS = 30.0
"""How long a run with unchanged files is not read again. After that it is, since a checkpoint may have become whole."""
REREAD_SECONDS = 0.1
"""Time in one look for reading such runs again; the rest wait for the next look. A run takes 8 ms (5 for its YAML)."""
DAMAGED = "damaged"
UNREAD = "reading"
"""State of a run of which only the name is known until a later look."""
ANSWER_SECONDS = 0.25
"""Time in one look for reading runs that are not known yet; the rest come with later looks."""


@dataclass(frozen=True)
class RunRow:
    name: str
    """Name of the run's folder, by which requests name the run."""
    url: str
    state: str
    detail: str
    """Why the run has this state, or how long ago it wrote."""
    summary: RunSummary | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    """Medians of the last 50 steps."""
    planned_step_seconds: float | None = None
    """The estimate of the plan in the run's folder; None where there is no plan."""
    planned_slice: str | None = None
    ran_as_planned: bool = False
    """Whether the run is known to have run on `planned_slice`, so that measured and planned steps may be compared."""

    @property
    def measured_over_planned(self) -> float | None:
        """Measured step time over planned; None where the run did not run as planned, or one of the two is unknown."""
        if not self.ran_as_planned or self.step_seconds is None or not self.planned_step_seconds:
            return None
        return self.step_seconds / self.planned_step_seconds

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "summary": None if self.summary is None else self.summary.to_dict()}

    def aged(self) -> "RunRow":
        if self.state != "open" or self.summary is None or self.summary.written_utc is None:
            return self
        detail = last_written(self.summary.written_utc, time.time())
        return replace(self, detail=detail, summary=replace(self.summary, state_detail=detail))


@dataclass(frozen=True)
class KeptRow:
    mark: Sequence[str | None]
    row: RunRow


class Listing:
    """The runs of a folder or bucket. A request reads the place again, but at most every `FRESH_SECONDS`; in a local
    folder also at once when a run has appeared or gone."""

    def __init__(self, place: str, cache_dir: Path | None = None) -> None:
        """`cache_dir`: where rows are kept for the next process (None: they are not kept)."""
        self.place = place
        whole = place if is_remote(place) else os.path.abspath(place)
        name = hashlib.sha256(f"{__version__} {whole}".encode()).hexdigest()
        self._cache = None if cache_dir is None else cache_dir / f"{name}.json"
        self._lock = threading.Lock()
        self._rows: dict[str, RunRow] = {}
        self._looked = float("-inf")
        self._known: dict[str, KeptRow] = {}
        self._read_at: dict[str, float] = {}
        if self._cache is not None:
            # If the cache is missing or has another form, all runs are read again.
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                self._known = msgspec.json.decode(self._cache.read_bytes(), type=dict[str, KeptRow])

    def rows(self, whole: bool = True) -> dict[str, RunRow]:
        """Every run by the name of its folder, sorted. Unless `whole`, a run may still have the state `UNREAD`."""
        while True:
            # The lock is held for one look only, so a request with `whole=False` does not wait longer than that.
            with self._lock:
                if not self._is_fresh() or (whole and self._unread):
                    self._look()
                if not (whole and self._unread):
                    return self._rows
            time.sleep(LET_PASS_SECONDS)

    def look_ahead(self) -> None:
        """Read all runs before the first request. Errors are not raised here: the next request meets them again."""
        with contextlib.suppress(TomatError):
            self.rows()

    @property
    def _unread(self) -> bool:
        return any(row.state == UNREAD for row in self._rows.values())

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._looked < FRESH_SECONDS and (
            is_remote(self.place) or find_runs(self.place) == [row.url for row in self._rows.values()]
        )

    def _look(self) -> None:
        """Look at the place and read what is new there, including at least one of the runs that were never read."""
        urls, before, began = find_runs(self.place), dict(self._known), time.monotonic()
        found: dict[str, RunRow] = {}
        n_new = 0
        for url in sorted(urls, key=lambda url: self._read_at.get(url, float("-inf"))):
            name = url.rsplit("/", 1)[-1]
            n_new += url not in self._known
            if url not in self._known and n_new > 1 and time.monotonic() > began + ANSWER_SECONDS:
                found[url] = self._rows.get(name) or RunRow(name, url, UNREAD, "")
            else:
                found[url] = self._row(name, url, began + REREAD_SECONDS)
        self._rows = {url.rsplit("/", 1)[-1]: found[url].aged() for url in urls}
        self._looked = time.monotonic()
        if self._cache is not None and self._known != before:
            kept = {url: one for url, one in self._known.items() if url in found}
            # If the cache cannot be written, the next start only takes some seconds longer.
            with contextlib.suppress(TomatError):
                write_text(self._cache, msgspec.json.encode(kept).decode())

    def _row(self, name: str, url: str, reread_until: float) -> RunRow:
        if url not in self._known:
            # Also set for a damaged run, which never becomes known: runs that were not read yet come before it.
            self._read_at[url] = time.monotonic()
        try:
            files, root = files_at(url)
            files.invalidate_cache()
            mark: list[str | None] = []
            with explaining_storage(f"{url} cannot be read"):
                for one in (CONFIG_FILE, METRICS_FILE, HISTORY_FILE, PLAN_FILE):
                    path = own_path(files, root, one)
                    mark.append(f"{files.size(path)} {files.modified(path)}" if files.exists(path) else None)
            known, now = self._known.get(url), time.monotonic()
            fresh = now - self._read_at.get(url, float("-inf")) < SURVEY_SECONDS
            if known is not None and known.mark == mark and (fresh or now > reread_until):
                return known.row
            self._read_at[url] = now
            row = _read_row(name, url)
        except TomatError as error:
            return RunRow(name, url, DAMAGED, str(error))
        # Whatever is in the files of one run must not hide all other runs.
        except Exception as error:
            return RunRow(name, url, DAMAGED, f"{type(error).__name__}: {first_line(error)}")
        self._known[url] = KeptRow(mark, row)
        return row


def own_path(files: Any, root: str, name: str) -> str:
    """The path of a run's file. A link that leads out of the run is an error, since everyone could read its target."""
    path = f"{root}/{name}"
    if isinstance(files, LocalFileSystem) and os.path.lexists(path):
        real = os.path.realpath(path)
        if not Path(real).is_relative_to(os.path.realpath(root)):
            raise TomatError(f"{path} is a link that leads out of the run; put the file itself there.")
        if os.path.exists(real) and not os.path.isfile(real) and not os.path.isdir(real):
            raise TomatError(f"{path} is not a file.")
    return path


def _read_row(name: str, url: str) -> RunRow:
    record = read_record(url, (HEAD_BYTES, TAIL_BYTES))
    whole, partial = survey(url, record.temporary_url)
    summary = summarise(record, whole, len(partial), time.time())
    ran = record.ran
    speeds = {}
    for key in ("tokens_per_second", "step_seconds"):
        values = [row[key] for row in ran.rows[-MFU_STEPS:] if is_figure(row.get(key))]
        speeds[key] = statistics.median(values) if values else None
    files, root = files_at(url)
    plan_url = f"{url}/{PLAN_FILE}"
    plan = {}
    with explaining_storage(f"{plan_url} cannot be read"):
        if files.exists(f"{root}/{PLAN_FILE}"):
            plan = mapping(parse_json(files.cat_file(f"{root}/{PLAN_FILE}"), plan_url))
    seconds = mapping(plan.get("step_seconds")).get("estimate")
    slice_name = plan["slice"] if isinstance(plan.get("slice"), str) else None
    return RunRow(
        name, url, summary.state, summary.state_detail, summary, **speeds,
        planned_step_seconds=float(seconds) if is_figure(seconds) else None,
        planned_slice=slice_name,
        ran_as_planned=slice_name is not None and not asked_but_not_found(ran.devices, slice_name),
    )  # fmt: skip
