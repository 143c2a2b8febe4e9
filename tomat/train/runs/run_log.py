"""The log of an output folder, `log.jsonl`: what was begun in it, with which command, where, and with which result.

One JSON object a line, only ever appended to, by several processes at once. It holds what a run's own folder does not
say (the command, the recipe and what differs from it, the commit, the machine) and the last figures, for runs whose
folder is gone. In a bucket each line is an object of its own below `log/`, named by its time.

`read_log` gives one entry for each run, with the pieces that it was trained in, and one for each measured row.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from tomat.base.documents import append_whole_line, flatten, mapping
from tomat.base.errors import TomatError
from tomat.base.layout import LOG_FILE, LOG_FOLDER
from tomat.base.overrides import parse_overrides, read_yaml
from tomat.base.reporting import writing
from tomat.base.shipped import commit
from tomat.base.storage import READ_REMEDY, explaining_storage, files_at, is_remote
from tomat.train.runs.history import Row, parse_log, stamped_line
from tomat.train.runs.record import RunRecord, find_runs, read_record
from tomat.train.runs.summary import Figures, outcome

RUN, LAB = "run", "lab"
"""Kinds of lines: of a training run, of a measured row of a sweep."""
START, RESUME, END, ROW = "start", "resume", "end", "row"
"""Events: a run begins, goes on, or ends for now; a row was measured."""

NAMES = ("run_name", "purpose", "output_dir", "tracking_dir")
"""Keys that name a run and its places, and set nothing."""


@dataclass(frozen=True)
class Asked:
    """How something was started; nothing that it leaves behind says so."""

    command: str = ""
    """As it was typed; empty where Python called."""
    recipe: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys whose value is not the recipe's."""

    @classmethod
    def by_words(cls, words: Sequence[str], recipe: Path | None, overrides: Sequence[str]) -> "Asked":
        written = {} if recipe is None else flatten(read_yaml(recipe, "configs/train/"))
        given = flatten(parse_overrides(overrides))
        changed = (key for key in given if key not in NAMES and (key not in written or written[key] != given[key]))
        settings = {key: given[key] for key in changed}
        return cls(shlex.join(["tomat", *words]), None if recipe is None else str(recipe), settings)


def machine() -> dict[str, Any]:
    """What ran: commit of the code, and the host with its processors."""
    return {"commit": commit(), "host": platform.node(), "processors": os.cpu_count()}


def append_line(output_dir: str, kind: str, name: str, event: str, **details: Any) -> None:
    """Write one line of `kind` and `event` into the log of an output folder, and wait until it is there."""
    time, line = stamped_line("microseconds", {"kind": kind, "name": name, "event": event, **details})
    place = output_dir.rstrip("/")
    if is_remote(place):
        files, root = files_at(place)
        stamp = time[:26].translate(str.maketrans("", "", "-:."))
        path = f"{root}/{LOG_FOLDER}/{stamp}-{uuid.uuid4().hex[:8]}.json"
        with explaining_storage(f"{place}/{LOG_FOLDER} cannot be written", "Give this user the right to write it."):
            if isinstance(files, LocalFileSystem):  # a file:// URL; buckets have no folders to make
                files.makedirs(f"{root}/{LOG_FOLDER}", exist_ok=True)
            files.pipe_file(path, line.encode())
        return
    path = Path(place) / LOG_FILE
    with writing(path):
        Path(place).mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
            append_whole_line(file, line)


def read_lines(place: str) -> tuple[list[Row], int]:
    """The lines of the log of a folder or bucket in the order of their times, and how many are damaged."""
    place = place.rstrip("/") or "/"
    files, root = files_at(place)
    files.invalidate_cache()
    texts = []
    with explaining_storage(f"the log of {place} cannot be read", READ_REMEDY):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            texts.append(files.cat_file(f"{root}/{LOG_FILE}"))
        if is_remote(place):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found = files.cat(f"{root}/{LOG_FOLDER}/*.json")
                texts += [found] if isinstance(found, bytes) else [found[path] for path in sorted(found)]
    rows, damaged = parse_log(b"".join(texts).decode(errors="replace"))
    return sorted(rows, key=lambda row: row["time"]), len(damaged)


ABOUT = ("command", "recipe", "settings", "purpose", "commit", "host", "processors", "devices", "hosts",
         "asked_slice", "configuration")  # fmt: skip
"""Keys of a line that say how its piece was started, and where it ran."""


@dataclass(frozen=True)
class Piece:
    """One process of a run, or one measurement of a row."""

    time: str
    """UTC, ISO 8601."""
    step: int | None
    """The step that a piece of a run began with; None for a row."""
    about: Mapping[str, Any]
    """Values by the keys of `ABOUT`, without those that are not on record."""


@dataclass(frozen=True)
class Entry:
    kind: str
    name: str
    sweep: str | None
    pieces: tuple[Piece, ...]
    status: str
    """`finished`, `preempted`, ... of a run (`tomat runs list`); `measured`, `out of memory`, ... of a row."""
    detail: str = ""
    figures: Figures = field(default_factory=dict)
    folder: bool = False
    """Whether the run's folder is there, and the figures are read from it; if not, they are those of its last end."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """The headline of the configuration of a run whose folder is there."""

    @property
    def began(self) -> str:
        """UTC, ISO 8601; empty where it is not known."""
        return self.pieces[0].time if self.pieces else ""

    def about(self, key: str) -> Any:
        """The value of `key` in the newest piece that has one; None if no piece has."""
        return next((piece.about[key] for piece in reversed(self.pieces) if piece.about.get(key)), None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "began_utc": self.began}


@dataclass(frozen=True)
class Log:
    """All entries of an output folder, sorted by when they began."""

    place: str
    entries: tuple[Entry, ...]
    damaged_lines: int
    """Number of damaged lines, which are left out; a process that is killed may leave such a last line."""
    unreadable: Mapping[str, str]
    """Runs below the folder that cannot be read, with the reason."""


def read_log(place: str, now_utc: float) -> Log:
    """The log of an output folder or bucket, with the runs in it that it does not have: those of earlier versions."""
    lines, damaged = read_lines(place)
    try:
        urls = find_runs(place)
    except TomatError:
        if not lines:
            raise
        urls = []
    records: dict[str, RunRecord] = {}
    unreadable: dict[str, str] = {}
    for url in urls:
        try:
            records[url.rsplit("/", 1)[-1]] = read_record(url)
        except TomatError as error:
            unreadable[url] = str(error)
    entries = [*_rows(lines), *_runs(lines, records, now_utc)]
    return Log(place, tuple(sorted(entries, key=lambda entry: (entry.began, entry.name))), damaged, unreadable)


def _runs(lines: Sequence[Row], records: Mapping[str, RunRecord], now_utc: float) -> list[Entry]:
    """One entry for each start and what followed it; the last entry of a name is the run in the folder."""
    starts: dict[str, list[list[Row]]] = {name: [[]] for name in records}  # runs of earlier versions have no line
    for line in lines:
        if line["kind"] == RUN:
            groups = starts.setdefault(line["name"], [[]])
            if line["event"] == START and groups[-1]:
                groups.append([])
            groups[-1].append(line)
    entries = []
    for name, groups in starts.items():
        for group in groups:
            record = records.get(name) if group is groups[-1] else None
            began = [line for line in group if line["event"] in (START, RESUME)]
            if record and (not began or began[0]["event"] != START):
                # An earlier version began it, and wrote that into its history alone.
                before = [event for event in record.events if event["event"] in (START, RESUME)]
                until = group[0]["time"] if group else None
                began = [one for one in before if until is None or str(one.get("time", "")) < until] + began
            if record:
                entries.append(_there(record, began, now_utc))
                continue
            # What its last end has left; a piece that began after that end has left nothing.
            last = next((line for line in reversed(group) if line["event"] == END), {})
            if group[-1]["event"] != END or last.get("status") == "lost":
                last = {**last, "status": "lost", "reason": "its folder is gone, and no end is on record"}
            entries.append(_as_said(RUN, name, None, began, {"status": "ended", **last}))
    return entries


def _rows(lines: Sequence[Row]) -> list[Entry]:
    """One entry for each question of a sweep; its newest line has the figures of all its windows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        if line["kind"] == LAB:
            groups.setdefault((line.get("sweep"), line["name"], line.get("key")), []).append(line)
    return [_as_said(LAB, name, str(sweep or ""), group, group[-1]) for (sweep, name, _), group in groups.items()]


def _as_said(kind: str, name: str, sweep: str | None, begun: Sequence[Row], line: Row) -> Entry:
    status, reason = (str(line.get(key) or "") for key in ("status", "reason"))
    return Entry(kind, name, sweep, _pieces(begun), status, reason, dict(mapping(line.get("figures"))))


def _there(record: RunRecord, begun: Sequence[Row], now_utc: float) -> Entry:
    end, figures = outcome(record, record.url, now_utc)
    if not any(line.get("purpose") for line in begun):
        begun = [{**line, "purpose": record.config.get("purpose")} for line in begun]
    setup = headline(record.config)
    return Entry(RUN, record.shown_name, None, _pieces(begun), end.state, end.state_detail, figures, True, setup)


def _pieces(begun: Sequence[Row]) -> tuple[Piece, ...]:
    found = []
    for line in begun:
        step = line.get("step")
        about = {key: line[key] for key in ABOUT if line.get(key) not in (None, "", {})}
        found.append(Piece(str(line.get("time", "")), step if isinstance(step, int) else None, about))
    return tuple(found)


def headline(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that describe a run in one paragraph, as far as it has them."""
    trainer, optimizer, data = (mapping(config.get(key)) for key in ("trainer", "optimizer", "data"))
    found = {
        "preset": config.get("preset"),
        "data": data.get("input") or data.get("train") or data.get("source"),
        "layout": data.get("layout"),
        "steps": trainer.get("num_train_steps"),
        "batch": trainer.get("train_batch_size"),
        "optimizer": optimizer.get("type"),
        "learning rate": optimizer.get("learning_rate"),
        "loss": mapping(config.get("loss")).get("kind"),
        "precision": trainer.get("mp"),
        "seed": trainer.get("seed"),
    }
    return {key: value for key, value in found.items() if value is not None}
