"""The log of an output folder, `log.jsonl`: what was begun in it, by which words, where, and what came of it.

One JSON object a line, only ever appended to, by several processes at once. It holds what a run's own folder does not
say (the command, the recipe and what differs from it, the commit, the machine) and the last figures, so that a run
whose folder is gone is still known. In a bucket, where nothing can be appended to, each line is an object of its own
below `log/`, named by its time.
"""

import contextlib
import fcntl
import os
import platform
import shlex
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from tomat.base.documents import append_whole_line, flatten
from tomat.base.layout import LOG_FILE, LOG_FOLDER
from tomat.base.overrides import parse_overrides, read_yaml
from tomat.base.reporting import writing
from tomat.base.shipped import commit
from tomat.base.storage import READ_REMEDY, explaining_storage, is_remote
from tomat.train.runs.history import stamped_line
from tomat.train.runs.log_lines import Row, parse_log

RUN, LAB = "run", "lab"
"""Kinds of lines: of a training run, of a measured row of a sweep."""
START, RESUME, END, ROW = "start", "resume", "end", "row"
"""Events: a run begins, goes on, or ends for now; a row was measured."""

NAMES = ("run_name", "purpose", "output_dir", "tracking_dir")
"""Keys that name a run and its places, and set nothing."""


@dataclass(frozen=True)
class Asked:
    """How something was asked for, which nothing that it leaves says."""

    command: str = ""
    """As it was typed; empty where Python called."""
    recipe: str | None = None
    """The configuration file."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys whose value is not the recipe's."""

    @classmethod
    def by_words(cls, words: Sequence[str], recipe: Path | None, overrides: Sequence[str]) -> "Asked":
        written = {} if recipe is None else flatten(read_yaml(recipe, "configs/train/"))
        given = flatten(parse_overrides(overrides))
        settings = {
            key: value
            for key, value in given.items()
            if key not in NAMES and (key not in written or written[key] != value)
        }
        return cls(shlex.join(["tomat", *words]), None if recipe is None else str(recipe), settings)


def machine() -> dict[str, Any]:
    """What ran: commit of the code, and the host with its processors."""
    return {"commit": commit(), "host": platform.node(), "processors": os.cpu_count()}


def append_line(output_dir: str, kind: str, name: str, event: str, **details: Any) -> None:
    """Write one line of `kind` and `event` into the log of an output folder, and wait until it is there."""
    time, line = stamped_line("microseconds", {"kind": kind, "name": name, "event": event, **details})
    place = output_dir.rstrip("/")
    if is_remote(place):
        files, root = fsspec.core.url_to_fs(place)
        stamp = time[:26].translate(str.maketrans("", "", "-:."))
        path = f"{root}/{LOG_FOLDER}/{stamp}-{uuid.uuid4().hex[:8]}.json"
        with explaining_storage(f"{place}/{LOG_FOLDER} cannot be written", "Give this user the right to it."):
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
    files, root = fsspec.core.url_to_fs(place)
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
