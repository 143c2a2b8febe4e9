"""A step that is compiled again after the first: the run goes on, slower than anybody thinks, so it says so.

A batch of another shape, a weak type or a layout that changes makes JAX compile the step anew. On a TPU that is
minutes, during which the chips do nothing.
"""

from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import jax
import levanter.tracker
from levanter.callbacks import Callback, ProgressEvent

from tomat.base.reporting import warn
from tomat.train.folder import RunFolder
from tomat.train.phases import BACKEND_COMPILE_EVENT, listening_to_durations

WATCHED = ("jit(_train_step)", "jit(validation_loss)")
"""The two large programs of a run, Levanter's training step and the evaluation's; helpers are compiled for many."""


class RecompileGuard(Callback):
    """Counts compilations of the large programs, and reports each that follows the one each of them needs."""

    def __init__(self, folder: RunFolder):
        self._folder = folder
        self._compiled: Counter[str] = Counter()
        self._unreported: list[tuple[int, str, float]] = []
        self._dispatched = self._read = self._total = 0

    def listening(self) -> AbstractContextManager[None]:
        """Take note of compilations while the context is open."""

        def listen(event: str, duration_secs: float, **details: str | int) -> None:
            name = str(details.get("fun_name"))
            if event != BACKEND_COMPILE_EVENT or name not in WATCHED:
                return
            self._compiled[name] += 1
            if self._compiled[name] > 1:
                self._unreported.append((self._dispatched, name, duration_secs))

        return listening_to_durations(listen)

    def on_event(self, event: ProgressEvent) -> None:
        """Count the steps that are dispatched: a compilation is reported with its step, once that is read."""
        self._dispatched += event is ProgressEvent.TRAIN_STEP_STARTED

    def on_step(self, info: Any, force: bool = False) -> None:
        """The hook after each step."""
        del force
        step = int(info.step)
        self._read += 1
        reported = [one for one in self._unreported if one[0] <= self._read]
        del self._unreported[: len(reported)]
        self._total += len(reported)
        if self._total:
            levanter.tracker.log({"guards/recompilations": self._total}, step=step)
        if jax.process_index() != 0:
            return
        for _, name, seconds in reported:
            self._folder.record("guard:recompilation", step, function=name, seconds=round(seconds, 3))
            warn(
                f"{name} was compiled again at step {step}, which took {seconds:.1f} s; "
                "shapes or types of its input have changed. `jax_log_compiles` in trainer.jax_config says which."
            )
