"""What the lab and the process of a row tell each other; without JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tomat.base.overrides import COMMAND_LINE

Status = Literal["measured", "out of memory", "too long", "failed"]
"""Of a row."""
MEASURED, OUT_OF_MEMORY, TOO_LONG, FAILED = get_args(Status)

DEVICE, PROCESS = "device", "process"
"""What says how much memory a row used: the statistics of its fullest device, or its process's resident memory."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 600.0
    """From its start to its end."""
    memory_bytes: int | None = None
    """Of a device, or where devices do not say, of the process (resident); None: as much as there is."""


@dataclass(frozen=True)
class LabConfig:
    rounds: int = 2
    """Starts of each row."""
    repeats: int = 4
    """Windows of each start."""
    window_seconds: float = 1.0
    """About how long each window is; at least 2 steps."""
    steps: int | None = None
    """Steps of a window, instead of seconds."""
    warmup_steps: int = 4
    """After the step that compiles."""
    minutes: float | None = None
    """No start begins that would not end by then, from the lab's own start, were it as long as the longest so far; a
    base that cannot live beside its rows is measured once a round. None: no limit."""
    limits: Limits = Limits()
    """Of each start of a row; a base has them once for each row that it stands beside."""


@dataclass(frozen=True)
class Request:
    config_path: str
    words: list[str]
    work_dir: Path
    """Absolute: data, compiled programs, and of this setting by its `label` the log and a scratch folder."""
    label: str
    config: LabConfig
    settle_steps: int = 1
    """Before each window, not counted: other processes have run in between."""
    words_of: str = COMMAND_LINE
    """Who has the words, in messages."""

    @property
    def log(self) -> Path:
        return self.work_dir / "logs" / f"{self.label}.log"

    @property
    def scratch_dir(self) -> Path:
        """Gets what the trainer writes, and is removed."""
        return self.work_dir / "scratch" / self.label


class RowError(Exception):
    """A row has no answer: `OUT_OF_MEMORY`, `TOO_LONG` or `FAILED`, and the reason in words."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
