"""What a run has written about itself, read from its folder or bucket."""

import datetime
import json
from dataclasses import dataclass
from typing import Any

import fsspec
import yaml

from tomat.errors import TomatError
from tomat.training.history import read_events

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class RunRecord:
    """A run's small files."""

    url: str
    """Folder or URL, without a final slash."""
    config: dict[str, Any]
    """`config.yaml`."""
    rows: list[dict[str, Any]]
    """The lines of `metrics.jsonl` in the order they were written."""
    unreadable_lines: tuple[int, ...]
    """Numbers, from 1, of lines that are no JSON object with a step."""
    events: list[dict[str, Any]]
    """`history.jsonl`."""
    written_utc: float | None
    """When `metrics.jsonl` was last written, seconds since 1970; None where it has not been."""

    @property
    def name(self) -> str:
        """The run's name."""
        return str(self.config.get("run_name") or self.url.rsplit("/", 1)[-1])

    @property
    def total_steps(self) -> int | None:
        """Steps the run is to have; None where its configuration does not say."""
        steps = (self.config.get("trainer") or {}).get("num_train_steps")
        return int(steps) if isinstance(steps, int) else None

    @property
    def temporary_url(self) -> str | None:
        """Where temporary checkpoints go, if elsewhere."""
        checkpointer = (self.config.get("trainer") or {}).get("checkpointer") or {}
        base = checkpointer.get("temporary_base_path")
        return f"{str(base).rstrip('/')}/{self.name}" if base else None


def find_runs(place: str) -> list[str]:
    """The runs at `place`: itself, or the folders right below it that hold a `config.yaml`; sorted.

    Raises:
        TomatError: There is no such place, or no run in it.
    """
    place = place.rstrip("/") or "/"
    files, root = fsspec.core.url_to_fs(place)
    files.invalidate_cache()
    try:
        if files.exists(f"{root}/{CONFIG_FILE}"):
            return [place]
        below = [entry["name"].rstrip("/") for entry in files.ls(root, detail=True) if entry["type"] == "directory"]
        names = sorted(path.rsplit("/", 1)[-1] for path in below if files.exists(f"{path}/{CONFIG_FILE}"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise TomatError(f"{place} does not exist; give a run's folder or URL, or the one that holds runs.") from error
    except OSError as error:
        raise TomatError(f"{place} cannot be read: {error}. Try again.") from error
    if not names:
        raise TomatError(f"{place} holds no run: no folder in it has a {CONFIG_FILE}. Give the `output_dir` of runs.")
    return [f"{place}/{name}" for name in names]


def read_record(url: str) -> RunRecord:
    """Read a run's small files.

    Raises:
        TomatError: The configuration cannot be read.
    """
    files, root = fsspec.core.url_to_fs(url)
    try:
        config = yaml.safe_load(files.cat_file(f"{root}/{CONFIG_FILE}"))
    except yaml.YAMLError as error:
        raise TomatError(f"{url}/{CONFIG_FILE} is not YAML ({error}); restore it.") from error
    except OSError as error:
        raise TomatError(f"{url}/{CONFIG_FILE} cannot be read: {error}.") from error
    rows: list[dict[str, Any]] = []
    unreadable: list[int] = []
    written = None
    metrics = f"{root}/{METRICS_FILE}"
    if files.exists(metrics):
        for number, line in enumerate(files.cat_file(metrics).decode(errors="replace").splitlines(), start=1):
            try:
                row = json.loads(line)
                rows.append({**row, "step": int(row["step"])})
            except (ValueError, KeyError, TypeError):
                unreadable.append(number)
        modified = files.modified(metrics)
        if modified.tzinfo is None:
            modified = modified.replace(tzinfo=datetime.UTC)
        written = modified.timestamp()
    config = config if isinstance(config, dict) else {}
    return RunRecord(url, config, rows, tuple(unreadable), read_events(url), written)
