"""The messages between the lab and the process of a row. This module does not import JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from tomat.base.overrides import COMMAND_LINE

Status = Literal["measured", "out of memory", "too long", "failed"]
"""Result of a row."""
MEASURED, OUT_OF_MEMORY, TOO_LONG, FAILED = get_args(Status)

DEVICE, PROCESS = "device", "process"
"""Source of a row's memory use: the statistics of its fullest device, or the resident memory of its process."""


@dataclass(frozen=True)
class Limits:
    seconds: float = 600.0
    """Longest time from the start of a process to its end."""
    memory_bytes: int | None = None
    """Most memory of a device, or of the process (resident) if devices do not report theirs; None: no limit."""


@dataclass(frozen=True)
class LabConfig:
    rounds: int = 2
    """Number of starts of each row."""
    repeats: int = 4
    """Number of windows of each start."""
    window_seconds: float = 1.0
    """Approximate length of each window, which has at least 2 steps."""
    steps: int | None = None
    """Steps of a window, in place of `window_seconds`."""
    warmup_steps: int = 4
    """Untimed steps after the step that compiles."""
    minutes: float | None = None
    """Time limit since the start of the lab. A row is not started if it would end later, judged by the longest row so
    far. With a limit, a base that cannot run beside its rows is measured once a round. None: no limit."""
    limits: Limits = Limits()
    """Limits of each start of a row. For a base they begin anew for each row that it is measured beside."""


@dataclass(frozen=True)
class Request:
    config_path: str
    words: list[str]
    work_dir: Path
    """Absolute path of the folder with data, compiled programs, and the setting's log and scratch folder by `label`."""
    label: str
    config: LabConfig
    settle_steps: int = 1
    """Untimed steps before each window, because other processes have run in between."""
    words_of: str = COMMAND_LINE
    """Where the words come from, for messages."""

    @property
    def log(self) -> Path:
        return self.work_dir / "logs" / f"{self.label}.log"

    @property
    def scratch_dir(self) -> Path:
        """Folder for what the trainer writes; it is removed at the end."""
        return self.work_dir / "scratch" / self.label


class RowError(Exception):
    """A row could not be measured: `OUT_OF_MEMORY`, `TOO_LONG` or `FAILED`, and the reason in words."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
