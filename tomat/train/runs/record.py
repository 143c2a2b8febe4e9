"""What a run has written about itself, read from its folder or bucket."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tomat.base.documents import mapping, parse_yaml
from tomat.base.errors import TomatError
from tomat.base.layout import CONFIG_FILE, METRICS_FILE
from tomat.base.storage import READ_REMEDY, explaining_storage, files_at
from tomat.train.runs.devices import RanSteps, ran_steps
from tomat.train.runs.history import Event, Row, file_content, parse_metrics, read_history


@dataclass(frozen=True)
class RunRecord:
    url: str
    """Folder or URL, without a final slash."""
    config: Mapping[str, Any]
    rows: list[Row]
    unreadable_lines: tuple[int, ...]
    """Numbers, from 1, of lines that are no rows."""
    events: list[Event]
    written_utc: float | None
    """When `metrics.jsonl` was last written, seconds since 1970; None where it has not been."""
    unreadable_events: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return str(self.config.get("run_name") or self.url.rsplit("/", 1)[-1])

    @property
    def shown_name(self) -> str:
        """Its name, with that of its folder where it is another, as of a copy."""
        folder = self.url.rsplit("/", 1)[-1]
        return self.name if folder in (self.name, ".", "..") else f"{self.name} (in {folder})"

    @property
    def total_steps(self) -> int | None:
        steps = mapping(self.config.get("trainer")).get("num_train_steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    @property
    def asked_slice(self) -> str | None:
        """The slice that its configuration names, whatever it ran on."""
        asked = self.config.get("slice")
        return None if asked is None else str(asked)

    @property
    def ran(self) -> RanSteps:
        """The steps that the run's speeds are taken from, and the devices that those steps ran on."""
        return ran_steps(self.rows, self.events, self.asked_slice)

    @property
    def temporary_url(self) -> str | None:
        return temporary_place(self.config, self.name)


def temporary_place(config: Mapping[str, Any], run_name: str) -> str | None:
    """Where a run's configuration sends its temporary checkpoints; None: beside the permanent ones."""
    base = mapping(mapping(config.get("trainer")).get("checkpointer")).get("temporary_base_path")
    return f"{str(base).rstrip('/')}/{run_name}" if base else None


def find_runs(place: str) -> list[str]:
    """The runs at `place`: itself, or the folders right below it that hold a `config.yaml`; sorted, at least one."""
    place = place.rstrip("/") or "/"
    files, root = files_at(place)
    files.invalidate_cache()
    with explaining_storage(f"{place} cannot be read", READ_REMEDY):
        if files.exists(f"{root}/{CONFIG_FILE}"):
            return [place]
        try:
            # A link to a folder is neither file nor directory.
            below = [entry["name"].rstrip("/") for entry in files.ls(root, detail=True) if entry["type"] != "file"]
        except (FileNotFoundError, NotADirectoryError) as error:
            said = f"{place} does not exist; give a run's folder or URL, or the one that holds runs."
            raise TomatError(said) from error
        names = sorted(path.rsplit("/", 1)[-1] for path in below if files.exists(f"{path}/{CONFIG_FILE}"))
    if not names:
        raise TomatError(f"{place} holds no run: no folder in it has a {CONFIG_FILE}. Give the `output_dir` of runs.")
    return [f"{place}/{name}" for name in names]


def read_record(url: str, ends: tuple[int, int] | None = None) -> RunRecord:
    """Read the record of a run. `ends`: bytes to read at the begin and at the end of a longer log; None: all of it."""
    place, content, written = f"{url}/{CONFIG_FILE}", b"", None
    config = mapping(parse_yaml(needed(place, "; give a folder or URL that `tomat train` made"), place))
    files, path = files_at(f"{url}/{METRICS_FILE}")
    files.invalidate_cache()
    with explaining_storage(f"{url}/{METRICS_FILE} cannot be read", READ_REMEDY):
        if files.exists(path):
            modified, size = files.modified(path), files.size(path)
            written = (modified if modified.tzinfo else modified.replace(tzinfo=datetime.UTC)).timestamp()
            if ends is None or size <= sum(ends):
                content = files.cat_file(path)
            else:  # both are cut inside a line
                head = files.cat_file(path, start=0, end=ends[0]).rpartition(b"\n")[0]
                content = head + b"\n" + files.cat_file(path, start=size - ends[1], end=size).partition(b"\n")[2]
    rows, unreadable = parse_metrics(content.decode(errors="replace"))
    events, unreadable_events = read_history(url)
    return RunRecord(url, config, rows, unreadable, events, written, unreadable_events)


def read_config(path: str) -> dict[str, Any]:
    content = needed(path, "; name a run that has been started")
    values = parse_yaml(content, path, "Restore it or use another run_name.")
    if not isinstance(values, dict):
        raise TomatError(f"{path} holds no settings, but {values!r:.80}; restore it or use another run_name.")
    return values


def needed(url: str, if_missing: str) -> bytes:
    """The content of a run's file, which must be there; `if_missing` completes the error message."""
    content = file_content(url)
    if content is None:
        raise TomatError(f"{url} does not exist{if_missing}.")
    return content
