"""The stages of a start: a line for each on every host, repeated while it lasts, from before `jax.distributed` on.

A start mostly waits for something else: another host, a coordinator, libtpu, a bucket, a compiler. None of these says
anything meanwhile, so a thread does.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from tomat.base.layout import HUNG_STATUS
from tomat.base.reporting import tell

REPEAT_SECONDS = 30.0
"""Time between two lines while a stage lasts."""


def no_more() -> str:
    """Nothing more is known about what a stage waits for."""
    return ""


class StartStages:
    """The stages of one start, each begun where the one before it ends."""

    def __init__(self, repeat_seconds: float = REPEAT_SECONDS, leave: Callable[[int], None] = os._exit) -> None:
        self._repeat, self._leave = repeat_seconds, leave
        self._who = ""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._what, self._since, self._said_at = "", time.monotonic(), time.monotonic()
        self._limit, self._missing = 0.0, no_more

    @property
    def now(self) -> str:
        """The present stage, for other hosts to name."""
        return self._what

    def known_as(self, index: int, count: int) -> None:
        """From now on each line begins with which host this is. A single host says only what takes long."""
        self._who = f"host {index} of {count}: " if count > 1 else ""

    def begin(self, what: str, limit_seconds: float = 0.0, missing: Callable[[], str] = no_more) -> None:
        """Begin another stage; `what` says what is being done. After `limit_seconds` (0: never) the process ends with
        `HUNG_STATUS` and what `missing` says."""
        with self._lock:
            self._what, self._since, self._said_at = what, time.monotonic(), time.monotonic()
            self._limit, self._missing = limit_seconds, missing
        if self._who and what:
            tell(f"{self._who}{what}", highlight=False, soft_wrap=True)

    def end(self) -> None:
        """The start is over: the first step is done, or an error has ended it."""
        self._closed.set()

    @contextlib.contextmanager
    def watching(self) -> Iterator["StartStages"]:
        """While the context is open, say how long a stage lasts, and end the process if that is too long."""
        poll = min(1.0, self._repeat / 4)
        thread = threading.Thread(target=self._watch, args=(poll,), name="start", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.end()

    def _watch(self, poll_seconds: float) -> None:
        while not self._closed.wait(poll_seconds):
            with self._lock:
                what, limit, missing, now = self._what, self._limit, self._missing, time.monotonic()
                lasted, silent = now - self._since, now - self._said_at
                if silent >= self._repeat:
                    self._said_at = now
            if what and limit and lasted >= limit:
                said = f"error: {self._who}{what} for {lasted:.0f} s, the limit: {missing() or 'nothing came of it'}"
                print(f"{said}. Exiting with status {HUNG_STATUS}.", file=sys.stderr, flush=True)
                self._leave(HUNG_STATUS)
                return
            if what and silent >= self._repeat:
                more = missing()
                still = f"{self._who}still {what} ({lasted:.0f} s)" + (f": {more}" if more else "")
                tell(still, highlight=False, soft_wrap=True)
