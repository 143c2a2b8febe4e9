"""The entries of a log: each run once, with the pieces that it was continued in, and each measured row once.

Lines of the log say how a run was asked for; its folder, while it is there, says what it has come to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tomat.base.documents import mapping
from tomat.base.errors import TomatError
from tomat.train.runs.figures import Figures
from tomat.train.runs.log_lines import Row
from tomat.train.runs.record import RunRecord, find_runs, read_record
from tomat.train.runs.run_log import END, LAB, RESUME, RUN, START, read_lines
from tomat.train.runs.summary import outcome

ABOUT = ("command", "recipe", "settings", "purpose", "commit", "host", "processors", "devices", "hosts",
         "asked_slice", "configuration")  # fmt: skip
"""What a line says of how its piece was asked for, and of where it ran."""


@dataclass(frozen=True)
class Piece:
    """One process of a run, or one measurement of a row."""

    time: str
    """UTC, ISO 8601."""
    step: int | None
    """That a run began with; None of a row."""
    about: Mapping[str, Any]
    """By `ABOUT`; what is not on record is not there."""


@dataclass(frozen=True)
class Entry:
    kind: str
    """`RUN` or `LAB`."""
    name: str
    sweep: str | None
    """Of a row."""
    pieces: tuple[Piece, ...]
    status: str
    """`finished`, `preempted`, ... of a run (`tomat runs list`); `measured`, `out of memory`, ... of a row."""
    detail: str = ""
    """Why."""
    figures: Figures = field(default_factory=dict)
    folder: bool = False
    """Whether the run's folder is there, which the figures are read from; if not, they are those of its last end."""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """Of a run whose folder is there: the headline of its configuration."""

    @property
    def began(self) -> str:
        """UTC, ISO 8601; empty where it is not known."""
        return self.pieces[0].time if self.pieces else ""

    def about(self, key: str) -> Any:
        """What the newest piece says that says anything; None where none does."""
        return next((piece.about[key] for piece in reversed(self.pieces) if piece.about.get(key)), None)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "began_utc": self.began}


@dataclass(frozen=True)
class Log:
    """All entries of an output folder, those that began first at the top."""

    place: str
    entries: tuple[Entry, ...]
    damaged_lines: int
    """Left out; the last line of a process that was killed is such a one."""
    unreadable: Mapping[str, str]
    """Runs below the folder that cannot be read, with the reason."""


def read_log(place: str, now_utc: float) -> Log:
    """The log of an output folder or bucket, with the runs in it that are on no line: those of earlier versions."""
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
    """One entry from each start on; the last of a name is the one in the folder."""
    starts: dict[str, list[list[Row]]] = {}
    for line in lines:
        if line["kind"] != RUN:
            continue
        groups = starts.setdefault(line["name"], [])
        if line["event"] == START or not groups:
            groups.append([])
        groups[-1].append(line)
    entries = []
    for name, groups in starts.items():
        for number, group in enumerate(groups, 1):
            record = records.get(name) if number == len(groups) else None
            began = [line for line in group if line["event"] in (START, RESUME)]
            if record and (not began or began[0]["event"] != START):
                # An earlier version began it, and wrote that into its history alone.
                until = group[0]["time"]
                began = [one for one in _begun(record) if str(one.get("time", "")) < until] + began
            pieces = tuple(map(_piece, began))
            entries.append(_there(record, pieces, now_utc) if record else _gone(name, group, pieces))
    unlisted = [record for name, record in records.items() if name not in starts]
    return entries + [_there(record, tuple(map(_piece, _begun(record))), now_utc) for record in unlisted]


def _begun(record: RunRecord) -> list[Row]:
    return [event for event in record.events if event["event"] in (START, RESUME)]


def _there(record: RunRecord, pieces: tuple[Piece, ...], now_utc: float) -> Entry:
    summary, figures = outcome(record, record.url, now_utc)
    purpose = record.config.get("purpose")
    if purpose and not any(piece.about.get("purpose") for piece in pieces):
        pieces = tuple(Piece(piece.time, piece.step, {**piece.about, "purpose": purpose}) for piece in pieces)
    return Entry(
        RUN, record.name, None, pieces, summary.state, summary.state_detail, figures, True, headline(record.config)
    )


def _gone(name: str, group: Sequence[Row], pieces: tuple[Piece, ...]) -> Entry:
    """From what its last end has left in the log; a piece that began after that has left none."""
    last = next((line for line in reversed(group) if line["event"] == END), {})
    if group[-1]["event"] != END or last.get("status") == "lost":
        last = {**last, "status": "lost", "reason": "its folder is gone, and no end is on record"}
    return _as_said(RUN, name, None, pieces, {"status": "ended", **last})


def _rows(lines: Sequence[Row]) -> list[Entry]:
    """One entry for each question of a sweep; its newest line has the figures of all its windows."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for line in lines:
        if line["kind"] == LAB:
            groups.setdefault((line.get("sweep"), line["name"], line.get("key")), []).append(line)
    return [
        _as_said(LAB, name, str(sweep or ""), tuple(map(_piece, group)), group[-1])
        for (sweep, name, _), group in groups.items()
    ]


def _as_said(kind: str, name: str, sweep: str | None, pieces: tuple[Piece, ...], line: Row) -> Entry:
    status, reason = (str(line.get(key) or "") for key in ("status", "reason"))
    return Entry(kind, name, sweep, pieces, status, reason, dict(mapping(line.get("figures"))))


def _piece(line: Row) -> Piece:
    step = line.get("step")
    about = {key: line[key] for key in ABOUT if line.get(key) not in (None, "", {})}
    return Piece(str(line.get("time", "")), step if isinstance(step, int) else None, about)


def headline(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that name a run in one paragraph, those of them that it has."""
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
