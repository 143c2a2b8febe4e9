"""Keeps the hosts of a run together: all of them know within a minute or two who is gone, or has ended and why, say so
in one line and write it into the history; and they wait for one another at barriers that have a name.

JAX (0.11.1) ends the others too, by SIGABRT after a page of stacks. So every host writes a sign of life into JAX's
key-value service and reads those of the others. Host 0 has the service; if it is gone, `model.relay` tells.
"""

import contextlib
import itertools
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax

from tomat.base.errors import RetryableError, TomatError
from tomat.base.layout import INTERRUPTED_STATUS, LOST_STATUS, REFUSED_STATUS, RETRY_STATUS
from tomat.base.ports.jax import coordination, joined_as
from tomat.base.reporting import first_line
from tomat.base.stages import StartStages
from tomat.model.joining import when_coordinator_is_cut
from tomat.train.guards.alike import NO_LIMIT_SECONDS

BEAT_SECONDS = 5.0
"""Seconds between two signs of life of a host."""
LOST_SECONDS = 90.0
"""Without a sign of life for so long a host counts as gone. This is longer than a compiler or a copy keeps Python from
running, and shorter than JAX's own limit (`HEARTBEAT_SECONDS`)."""
FAILED_STATUS = 1
TELL_SECONDS = 5.0
"""How long a process that must end at once may take to tell the others."""
LONGEST_ERROR = 300
"""Characters of an error that another host repeats."""
DONE = "done"

_starts = itertools.count()
"""Number of starts of this process; every process of a run has as many, so that their keys agree."""


@dataclass
class _Host:
    name: str
    at: str
    """The stage that it is in; empty once it trains."""
    beat: int
    seen: float
    """When the last sign of life was new, by this host's clock."""


@dataclass(eq=False)
class HostWatch:
    """Watches the other hosts of a run, from one of them. Does nothing in a run on one host."""

    stages: StartStages
    _: KW_ONLY
    beat_seconds: float = BEAT_SECONDS
    lost_seconds: float = LOST_SECONDS
    leave: Callable[[int], None] = os._exit
    on_loss: Callable[[str], None] | None = None
    """Called with one sentence before another host's end ends the process; on host 0 or, if that is lost, host 1."""

    def __post_init__(self) -> None:
        self._index, self._count = joined_as()
        self._service: Any = coordination() if self._count > 1 else None
        self._place = f"tomat/{next(_starts)}"
        self._hosts: dict[int, _Host] = {}
        self._ended: dict[int, dict[str, Any]] = {}
        self._closed = threading.Event()
        self._ending = threading.Lock()
        """Taken by whoever ends this process, once and for all."""
        self._failed: bool | None = None
        """Whether an error here may follow from another host's end; None: there is no error."""
        self._noticed: dict[int, float] = {}
        """When this host first saw that another has ended, by this host's clock."""

    @contextlib.contextmanager
    def watching(self) -> Iterator["HostWatch"]:
        """Give signs of life, and end with the others, while the context is open."""
        if self._service is None:
            yield self
            return
        began = time.monotonic()
        self._hosts = {n: _Host("", "", -1, began) for n in range(self._count) if n != self._index}
        when_coordinator_is_cut(self._coordinator_cut)
        thread = threading.Thread(target=self._watch, name="hosts", daemon=True)
        thread.start()
        try:
            with self.explaining_errors():
                yield self
            self._tell({"status": DONE})
        finally:
            self._closed.set()
            thread.join(TELL_SECONDS)  # or the thread may ask a service that the interpreter takes down

    @contextlib.contextmanager
    def explaining_errors(self) -> Iterator[None]:
        """Tell the other hosts of an error inside. An error that another host's end may have caused, such as a broken
        collective, waits until it is known whether that is so."""
        try:
            yield
        except BaseException as error:
            if self._service is not None and self._failed is None:
                self._failed = follows = isinstance(error, jax.errors.JaxRuntimeError)
                self._tell({"status": _status(error), "error": _why(error), "follows": follows})
                if follows:
                    self._wait_for_a_cause()
            raise

    def barrier(self, name: str, limit_seconds: float = 0.0) -> None:
        """Wait until every host has come to `name`, such as `the first step`; each must call it, once a start."""
        if self._service is None:
            return
        key = f"{self._place}/at/{name}"
        self._service.key_value_set(f"{key}/{self._index}", "1")
        self.stages.begin(f"waiting for the other hosts before {name}", missing=lambda: self._absent(key))
        seconds = limit_seconds or NO_LIMIT_SECONDS
        try:
            self._service.wait_at_barrier(f"{self._place}: before {name}", int(1000 * seconds))
        except jax.errors.JaxRuntimeError as error:
            said = f"host {self._index} of {self._count} has waited {seconds:.0f} s for the other hosts before {name}"
            raise RetryableError(f"{said}: {self._absent(key) or first_line(error)}. See their logs.") from None

    def _absent(self, key: str) -> str:
        """Who has not come, and what each is doing instead."""
        try:
            here = {int(name.rpartition("/")[2]) for name, _ in self._service.key_value_dir_get(key)}
        except Exception:  # the service of a host that is gone; the watch says so
            return ""
        absent = [(n, host) for n, host in self._hosts.items() if n not in here]
        return ", ".join(f"host {n} ({host.name or 'unknown'}) is {host.at or 'silent'}" for n, host in absent[:8])

    def tell(self, status: int, error: str) -> None:
        """Let the others know that this process ends, and why; within `TELL_SECONDS`, since its network may be gone."""
        if self._service is not None:
            self._tell_soon({"status": status, "error": error[:LONGEST_ERROR], "follows": False})

    def _tell_soon(self, ended: dict[str, Any]) -> None:
        teller = threading.Thread(target=self._tell, args=(ended,), daemon=True)
        teller.start()
        teller.join(TELL_SECONDS)
        if self._index == 0:  # the others read it from this host at their next beat
            time.sleep(1.5 * self.beat_seconds)

    def _tell(self, ended: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # the service may be gone, and this must not hide why
            self._service.key_value_set(f"{self._place}/ended/{self._index}", json.dumps(ended))

    def _watch(self) -> None:
        for beat in itertools.count():
            if self._closed.is_set():
                return
            try:
                self._exchange(beat)
            except Exception as error:
                if self._index > 0 and not self._closed.is_set():
                    why = f"it no longer answers ({first_line(error)[:200]})"
                    self._end(f"host 0 ({self._hosts[0].name}) is gone: {why}", LOST_STATUS, coordinator_lost=True)
                return
            if (found := self._lost()) is not None:
                self._end(*found)
                return
            self._closed.wait(self.beat_seconds)

    def _coordinator_cut(self) -> bool:
        """Act on the loss of host 0 and its service; return whether this process is ended here, and not by JAX."""
        if self._closed.is_set() or self._failed is False:
            return False
        name, ended = self._hosts[0].name or "never seen", self._ended.get(0)
        if ended is not None and ended["status"] != DONE:
            self._end(f"host 0 ({name}) has ended: {ended['error']}", int(ended["status"]))
        else:
            self._end(f"host 0 ({name}) is gone: its connection was cut", LOST_STATUS, coordinator_lost=True)
        return True

    def _exchange(self, beat: int) -> None:
        mine = json.dumps({"name": platform.node(), "at": self.stages.now, "beat": beat})
        self._service.key_value_set(f"{self._place}/beat/{self._index}", mine, allow_overwrite=True)
        now = time.monotonic()
        for key, value in self._service.key_value_dir_get(f"{self._place}/beat"):
            said, host = json.loads(value), self._hosts.get(int(key.rpartition("/")[2]))
            if host is not None and host.beat != said["beat"]:
                host.name, host.at, host.beat, host.seen = said["name"], said["at"], said["beat"], now
        for key, value in self._service.key_value_dir_get(f"{self._place}/ended"):
            number = int(key.rpartition("/")[2])
            self._ended[number] = json.loads(value)
            self._noticed.setdefault(number, now)

    def _lost(self) -> tuple[str, int] | None:
        """Why this process is to end because of another one, and with which status; None while there is no reason."""
        if self._failed is False:  # it ends by itself, with an error of its own
            return None
        others = {n: ended for n, ended in self._ended.items() if n != self._index and ended["status"] != DONE}
        causes = {n: ended for n, ended in others.items() if not ended["follows"]}
        now = time.monotonic()
        for n, ended in sorted((causes if self._failed else causes or others).items()):
            # Hosts that refuse the same input do so within moments, each in its own words.
            if now - self._noticed[n] >= 2 * self.beat_seconds:
                return f"host {n} ({self._hosts[n].name}) has ended: {ended['error']}", int(ended["status"])
        for n, host in sorted(self._hosts.items()):
            if n not in self._ended and now - host.seen >= self.lost_seconds:
                silent = f"no sign of life for {now - host.seen:.0f} s"
                doing = f", when it was {host.at}" if host.at else ""
                return f"host {n} ({host.name or 'never seen'}) is gone: {silent}{doing}", LOST_STATUS
        return None

    def _wait_for_a_cause(self) -> None:
        """Wait until every other host has ended; if one is the cause or counts as gone, `_watch` ends this process."""
        deadline = time.monotonic() + self.lost_seconds + 4 * self.beat_seconds
        while time.monotonic() < deadline:
            others = [self._ended.get(n) for n in self._hosts]
            if all(ended is not None and (ended["status"] == DONE or ended["follows"]) for ended in others):
                return  # none of them is the cause
            time.sleep(min(0.2, self.beat_seconds))

    def _end(self, cause: str, status: int, *, coordinator_lost: bool = False) -> None:
        if not self._ending.acquire(blocking=False):
            return
        said = f"host {self._index} of {self._count} ends, since {cause}"
        next_is = "the same command, on all hosts, continues the run, as `tomat launch` does by itself"
        print(f"error: {said}. Exiting with status {status}; {next_is}.", file=sys.stderr, flush=True)
        if not coordinator_lost:  # so that the host whose error this was does not wait for this one
            self._tell_soon({"status": status, "error": cause[:LONGEST_ERROR], "follows": True})
        if self.on_loss is not None and self._index == int(coordinator_lost):
            with contextlib.suppress(Exception):  # whatever happens, the process must end now
                self.on_loss(said)
        self.leave(status)


def _why(error: BaseException) -> str:
    if isinstance(error, SystemExit | KeyboardInterrupt):
        return f"it was stopped (status {_status(error)})"
    return f"{'' if isinstance(error, TomatError) else f'{type(error).__name__}: '}{first_line(error)}"[:LONGEST_ERROR]


def _status(error: BaseException) -> int:
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    if isinstance(error, RetryableError):
        return RETRY_STATUS
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_STATUS
    return REFUSED_STATUS if isinstance(error, TomatError) else FAILED_STATUS
