"""Stopping a run in good order when the machine is about to be taken away, or a person presses Ctrl-C."""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils

from tomat.base.layout import INTERRUPTED_STATUS, STOPPED_STATUS
from tomat.base.regions import instance_metadata

CTRL_C = "Ctrl-C"

SAME_PRESS_SECONDS = 0.5
"""SIGINTs so close together are one Ctrl-C: the terminal sends it to every process, and a parent such as `uv run` may
pass it on once more."""

NOTICES = {"preempted": ("TRUE",), "maintenance-event": ("TERMINATE_ON_HOST_MAINTENANCE",)}
"""Keys of `http://metadata.google.internal/computeMetadata/v1/instance/` and their values that announce the end of the
machine (Compute Engine documentation: "Create and use Spot VMs", "Monitor and plan for a host maintenance event")."""


class StopRequest:
    """Whether the process has been asked to stop; all hosts of a slice get the same answer at the same step.

    Before the first step, and after the last checkpoint, nothing would be lost: there SIGTERM ends the process at once,
    by an exception that closes whatever is open. Between them (`defer`) the signal is only noted, and the loop calls
    `reached` after every step. A thread that no compilation can hold up watches the grace and a second signal.

    Ctrl-C (SIGINT) is taken the same way, but nobody takes the machine away: the step and its checkpoint may take as
    long as they need, and a second Ctrl-C ends the process at once.
    """

    def __init__(self, grace_seconds: float = 25.0) -> None:
        self.grace_seconds = grace_seconds
        self.on_overrun: Callable[[str], None] | None = None
        """Called with one sentence when the grace is over, before the process is ended."""
        self.cause = ""
        """`SIGTERM`, `Ctrl-C`, or the notice that was read; empty while nobody asked."""
        self.agreed = False
        self.unsaved = False
        """Steps have been done since the last checkpoint that is complete."""
        self.step = 0
        self._deferred = False
        self._asked_at: float | None = None
        self._signals_allowed = 1
        self._signals = 0
        self._interrupted_at: float | None = None
        self._raised = False
        # Reentrant: a second signal may be handled while the main thread, in the handler of the first, holds it.
        self._lock = threading.RLock()
        self._closed = threading.Event()

    @property
    def asked(self) -> bool:
        return self._asked_at is not None

    @property
    def remaining_seconds(self) -> float:
        """Seconds left of the grace; infinite while nobody asked. After Ctrl-C its end only stops an evaluation."""
        return math.inf if self._asked_at is None else self._asked_at + self.grace_seconds - time.monotonic()

    def reached(self) -> bool:
        """Whether to stop after the step just done; every host must call this after the same steps. All stop after the
        first step at whose end one of them had been asked, so that no host is left in a collective."""
        mine = self.asked
        if jax.process_count() > 1:
            mine = bool(np.any(multihost_utils.process_allgather(np.array(mine))))
        self.agreed = self.agreed or mine
        return self.agreed

    def defer(self, step: int) -> None:
        """From now on there are steps to save (`step` are done): a signal is only noted, until `reached` is called."""
        self.step = step
        self._deferred = True
        self.unsaved = True

    def resume_at_once(self) -> None:
        """From now on nothing would be lost: a signal ends the process, as does one that was noted and not answered."""
        self._deferred = False
        self.unsaved = False
        if self.asked and not self.agreed:
            self._raise()

    @property
    def status(self) -> int:
        return INTERRUPTED_STATUS if self.cause == CTRL_C else STOPPED_STATUS

    @contextlib.contextmanager
    def limiting_exit_on_error(self) -> Iterator[None]:
        """After an error on one of several hosts, end the process when the grace is over (`limit_exit`)."""
        try:
            yield
        except BaseException:
            if jax.process_count() > 1:
                self.limit_exit(1)
            raise

    def limit_exit(self, status: int) -> None:
        """End the process with `status` after the grace, if it has not ended by then: closing what is open may wait for
        hosts that are gone."""
        timer = threading.Timer(self.grace_seconds, _leave, (status, "the hosts that are left did not answer"))
        timer.daemon = True
        timer.start()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM and Ctrl-C while the context is open. Python gives signals to the main thread alone, so another
        thread takes none."""
        main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        read_end, write_end = os.pipe()
        os.set_blocking(write_end, False)
        wakeup_before = -1
        if main:
            # The signal itself writes the byte, whatever the main thread is doing. The handler below runs only once
            # Python code does, which a compilation of minutes delays.
            wakeup_before = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
            self.take_over()
        watcher = threading.Thread(target=self._watch, args=(read_end,), name="preemption", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._closed.set()
            if main:
                signal.set_wakeup_fd(wakeup_before)
                for number, handler in before.items():
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            with contextlib.suppress(OSError):
                os.write(write_end, b"\0")
            watcher.join()
            os.close(read_end)
            os.close(write_end)

    def poll_notices(self, poll_seconds: float) -> None:
        """From now on ask the machine's metadata server for a notice, in a thread; one counts as a first SIGTERM."""
        threading.Thread(target=self._poll_notices, args=(poll_seconds,), name="notices", daemon=True).start()

    def take_over(self) -> None:
        """Install the signal handlers; call it again after a library has put its own in their place."""
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_signal)
            # Where Ctrl-C is ignored, as in a background job of a shell, it stays so.
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._ask(CTRL_C if number == signal.SIGINT else "SIGTERM")
        if not self._deferred:
            self._raise()

    def _raise(self) -> None:
        """End the process by an exception, once: a copy of the signal must not interrupt what the first one closes,
        such as a lease. A second press, a second SIGTERM and the end of the grace are left to the watching thread."""
        if not self._raised:
            self._raised = True
            raise KeyboardInterrupt if self.cause == CTRL_C else SystemExit(STOPPED_STATUS)

    def _ask(self, cause: str) -> None:
        with self._lock:
            if self._asked_at is None or (self.cause == CTRL_C and cause != CTRL_C):  # now there is a deadline
                self._asked_at = time.monotonic()
                self.cause = cause

    def _watch(self, read_end: int) -> None:
        waiter = threading.Thread(target=self._watch_grace, name="grace", daemon=True)
        waiter.start()
        while not self._closed.is_set():
            for number in os.read(read_end, 64):
                if number == signal.SIGINT and signal.getsignal(signal.SIGINT) == self._on_signal:
                    self._count_interrupt()
                if number != signal.SIGTERM:
                    continue
                self._signals += 1
                self._ask("SIGTERM")
                if self._signals > self._signals_allowed:
                    _leave(STOPPED_STATUS, "a second SIGTERM: leaving at once")

    def _count_interrupt(self) -> None:
        now = time.monotonic()
        if self._interrupted_at is None:
            self._interrupted_at = now
            self._ask(CTRL_C)
            if self._deferred:
                message = "Ctrl-C: the step is finished and saved first; again, and the process ends at once"
                print(message, file=sys.stderr, flush=True)
        elif now - self._interrupted_at > SAME_PRESS_SECONDS:
            message = "a second Ctrl-C: leaving at once; the run goes on from its last whole checkpoint"
            _leave(INTERRUPTED_STATUS, message)

    def _watch_grace(self) -> None:
        while not self._closed.wait(min(0.2, max(self.remaining_seconds, 0.01))):
            if self.remaining_seconds > 0 or self.cause == CTRL_C:
                continue
            what = "no step was left unsaved"
            if self.unsaved:
                what = "the step was not saved in time; the run goes on from its last whole checkpoint"
            message = f"{self.cause}: {self.grace_seconds:.0f} s of grace are over: {what}"
            if self.on_overrun is not None:
                with contextlib.suppress(Exception):  # whatever happens, the process must end now
                    self.on_overrun(message)
            _leave(STOPPED_STATUS, message)

    def _poll_notices(self, poll_seconds: float) -> None:
        """Ask the metadata server until it announces something that it did not announce at the start."""
        known = {key: instance_metadata(key) for key in NOTICES}
        while not self._closed.wait(poll_seconds):
            for key, ends in NOTICES.items():
                value = instance_metadata(key)
                if value in ends and value != known[key]:
                    self._signals_allowed += 1  # for the kill below; the signal of the machine going down may follow
                    self._ask(f"{key} {value}")
                    os.kill(os.getpid(), signal.SIGTERM)
                    return
                if value is not None:
                    known[key] = value


def _leave(status: int, message: str) -> None:
    print(message, file=sys.stderr, flush=True)
    os._exit(status)
