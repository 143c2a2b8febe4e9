"""Stopping a run in good order when the machine is about to be taken away."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import jax
from jax.experimental import multihost_utils

EXIT_STATUS = 128 + signal.SIGTERM
"""What the process exits with after it stopped in good order: 143, which launchers know as "ended by SIGTERM"."""


class StopRequest:
    """Whether the run has been asked to stop; all hosts of a slice get the same answer at the same step."""

    def __init__(self) -> None:
        self._signalled = False
        self.agreed = False
        """`reached` has answered yes."""

    def reached(self, step: int) -> bool:
        """Whether to stop after `step`. Every host must ask after every step.

        Of several hosts each may be told at another moment; stopping there would leave the others in a collective.
        JAX's preemption service, which listens to SIGTERM itself where `jax.distributed` runs, picks one step for all.
        """
        if jax.process_count() > 1:
            self.agreed = self.agreed or multihost_utils.reached_preemption_sync_point(step)
        else:
            self.agreed = self.agreed or self._signalled
        return self.agreed

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take SIGTERM while the context is open, in the main thread; a second one ends the process at once."""
        if jax.process_count() > 1:
            yield
            return
        before = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signalled:
            sys.exit(EXIT_STATUS)
        self._signalled = True
