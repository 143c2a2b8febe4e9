"""Watches for storage that takes nothing any more: says so after half a minute, and ends the process after 75 s, with
the status on which a launch starts it again.

TensorStore (0.1.84) tries a request that gets no answer for a quarter of an hour, gcsfs (2026.7) for half an hour, and
neither says so; on a pod every other host waits as long for the one whose network is cut. What counts is that nothing
moves, not how long a save takes.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import tensorstore as ts

from tomat.base.layout import RETRY_STATUS
from tomat.base.ports.jax import joined_as
from tomat.base.reporting import tell

SAY_SECONDS = 30.0
"""Without progress for so long a stall is reported, and again after each such time."""
END_SECONDS = 75.0
"""Without progress for so long the process ends. tomat's own requests are tried for half a minute (`STORAGE_TRIES`),
and a chunk of a checkpoint, 512 MiB at most, takes 67 s at 8 MB/s."""
NEVER = 0.0
_WRITTEN = "/tensorstore/kvstore/"


def bytes_written() -> int:
    """Bytes that TensorStore has brought to any storage so far, in this process."""
    metrics = ts.experimental_collect_matching_metrics(_WRITTEN)
    wanted = (one for one in metrics if one["name"].endswith("/bytes_written"))
    return sum(value["value"] for one in wanted for value in one["values"])


@dataclass
class StorageWatch:
    place: str
    _: KW_ONLY
    say_seconds: float = SAY_SECONDS
    end_seconds: float = END_SECONDS
    leave: Callable[[int], None] = os._exit
    on_end: Callable[[str], None] | None = None
    """Called with one sentence before the process ends."""

    @contextlib.contextmanager
    def watching(
        self, what: str, progress: Callable[[], Any] | None = None, end_seconds: float | None = None
    ) -> Iterator[None]:
        """Watch over what is being done, such as `saving step 40`, while the context is open. `progress` gives anything
        that changes while it goes on; None: nothing shows progress. `end_seconds` replaces the usual limit; `NEVER` is
        for what waits for other hosts."""
        closed = threading.Event()
        limit = self.end_seconds if end_seconds is None else end_seconds
        thread = threading.Thread(target=self._watch, args=(closed, what, progress, limit), name="storage", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closed.set()

    def _watch(self, closed: threading.Event, what: str, progress: Callable[[], Any] | None, limit: float) -> None:
        known, moved, said = progress and progress(), time.monotonic(), 0.0
        while not closed.wait(min(1.0, self.say_seconds / 4)):
            now, found = time.monotonic(), progress and progress()
            if found != known:
                known, moved, said = found, now, 0.0
            elif limit and now - moved >= limit:
                self._end(what, now - moved)
                return
            elif now - moved >= said + self.say_seconds:
                said = now - moved
                end = f"; after {limit:.0f} s this process ends, to be started again" if limit else ""
                seconds = f"{said:.0f} s" + ("" if progress is None else " without progress")
                tell(f"{_who()}still {what} ({seconds}){end}", highlight=False, soft_wrap=True)

    def _end(self, what: str, seconds: float) -> None:
        said = f"{_who()}{self.place}: {what} made no progress for {seconds:.0f} s"
        remedy = "Check that this machine can reach it; the same command continues from the last whole checkpoint"
        print(f"error: {said}. {remedy}. Exiting with status {RETRY_STATUS}.", file=sys.stderr, flush=True)
        if self.on_end is not None:
            with contextlib.suppress(Exception):  # whatever happens, the process must end now
                self.on_end(said)
        self.leave(RETRY_STATUS)


def _who() -> str:
    index, count = joined_as()
    return f"host {index} of {count}: " if count > 1 else ""
