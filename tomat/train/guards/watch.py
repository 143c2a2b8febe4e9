"""The guards of a run, put together: what refuses to begin, what watches, what ends the run in time.

| guard | module | when |
|---|---|---|
| hosts that were started unlike one another | `alike` | as they join, and once the data are open |
| regions, clocks | `start` | before the first step |
| room for checkpoints | `room` | before the first step, and wherever it runs out |
| loss and update | `loss` | every step, before it can be saved |
| recompilation | here | every step |
| hang | `hang` | from the start, in a thread |

That a data set is complete is checked as it is opened, and its checksums as it is read (`data/tokens/shards.py`).
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
import levanter.tracker
from levanter.callbacks import Callback, ProgressEvent
from levanter.callbacks.progress_watchdog import ProgressWatchdog
from levanter.tracker import CompositeTracker
from levanter.trainer import Trainer

from tomat.base.reporting import warn, writing
from tomat.train.datasets import Datasets
from tomat.train.folder import RunFolder
from tomat.train.guards.hang import HangGuard
from tomat.train.guards.loss import BadLossGuard
from tomat.train.guards.room import check_free_space, checkpoint_bytes, explaining_full_storage
from tomat.train.guards.start import check_clocks, check_run_regions
from tomat.train.loader import ShardDataset
from tomat.train.phases import BACKEND_COMPILE_EVENT, listening_to_durations
from tomat.train.tracking import JsonLinesTracker


class RunGuards:
    def __init__(self, folder: RunFolder):
        self._folder, self._config = folder, folder.config
        self._hang = HangGuard(folder)
        self._recompile = RecompileGuard(folder)
        self._watchdog: ProgressWatchdog | None = None
        self._log: JsonLinesTracker | None = None
        self._checkpoint_bytes = 0
        self._warnings: list[tuple[str, str]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch for hangs, recompilations and full storage while the context is open."""
        with (
            explaining_full_storage(self._folder.path, self._config.run_dir, lambda: self._checkpoint_bytes),
            self._hang.watching() as self._watchdog,
            self._recompile.listening(),
        ):
            yield
            self.check_log()

    def check_start(self, datasets: Datasets) -> None:
        """Refuse regions and clocks that the run must not begin with, and warn of what may be."""
        self._warnings = [("clock_skew", text) for text in check_clocks(self._config)]
        if (across := check_run_regions(self._config, datasets)) is not None:
            self._warnings.append(("regions", across))
        if jax.process_index() == 0:
            for _, text in self._warnings:
                warn(text)

    def record_start(self) -> None:
        """Write what `check_start` warned of into the run's history; on the first process, once the run goes on."""
        for name, text in self._warnings:
            self._folder.record(f"guard:{name}", 0, message=text)

    def attach(self, trainer: Trainer, state: Any, dataset: ShardDataset, datasets: Datasets) -> None:
        """Put the guards between the steps; before any other hook, since the first that raises stops the rest."""
        self._checkpoint_bytes = checkpoint_bytes(state)
        if isinstance(trainer.tracker, CompositeTracker):
            logs = [tracker for tracker in trainer.tracker.loggers if isinstance(tracker, JsonLinesTracker)]
            self._log = next(iter(logs), None)
        if jax.process_index() == 0:
            check_free_space(self._config.output_dir, self._checkpoint_bytes)
        self._hang.step = int(state.step)
        bad_loss = BadLossGuard(self._folder, trainer.checkpoint_path, dataset, datasets.train)
        for hook in (bad_loss, self._recompile, self._hang.count, self._watchdog):
            if hook is not None:
                trainer.add_hook(hook, every=1)

    def check_log(self) -> None:
        """Raise what kept a line of `metrics.jsonl` from being written; before a save, whose log would have a hole."""
        if self._log is not None and self._log.failure is not None:
            with writing(self._log.path):
                raise self._log.failure


WATCHED = ("jit(_train_step)", "jit(validation_loss)")
"""The two large programs of a run, Levanter's training step and the evaluation's; helpers are compiled for many."""


class RecompileGuard(Callback):
    """Reports each compilation of the large programs that follows the one each of them needs: a batch of another shape,
    a weak type or a layout that changes makes JAX compile anew, on a TPU for minutes in which the chips do nothing."""

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
