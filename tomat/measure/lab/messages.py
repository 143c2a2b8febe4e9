"""What the lab and the process of a row tell each other; without JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from tomat.base.overrides import COMMAND_LINE

Status = Literal["measured", "out of memory", "too long", "failed"]
"""Of a row."""
MEASURED, OUT_OF_MEMORY, TOO_LONG, FAILED = get_args(Status)

DEVICE, PROCESS = "device", "process"
"""What says how much memory a row used: the statistics of its fullest device, or its process's resident memory."""


READY = "ready"
"""What is said of a row, in the place of a stage, where nothing is under way that anybody waits for."""


@dataclass(frozen=True)
class Request:
    """One setting to measure."""

    config_path: str
    words: list[str]
    data_dir: str
    """Holds what the embedded densities are tokenized to."""
    cache_dir: str
    scratch_dir: str
    """Gets what the trainer writes, and is removed."""
    log: str
    words_of: str = COMMAND_LINE
    """Who has the words, in messages."""
    warmup_steps: int = 4
    """After the first step, which compiles."""
    window_seconds: float = 1.0
    """About how long a window is to take."""
    settle_steps: int = 1
    """Before each window, not counted: other processes have run in between."""
    steps: int | None = None
    """Steps of a window; None: as many as `window_seconds` hold, at least 2."""


@dataclass(frozen=True)
class Limits:
    """What the process of a row may take."""

    seconds: float = 600.0
    """From its start to its end."""
    memory_bytes: int | None = None
    """Of a device, or where devices do not say, of the process (resident); None: as much as there is."""


class RowError(Exception):
    """A row has no answer: `OUT_OF_MEMORY`, `TOO_LONG` or `FAILED`, and the reason in words."""

    def __init__(self, status: Status, reason: str):
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
