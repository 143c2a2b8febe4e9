"""The guards of a run, put together: what refuses to begin, what watches, what ends the run in time.

| guard | module | when |
|---|---|---|
| hosts that were started unlike one another | `alike` | as they join, and once the data are open |
| regions, clocks, room for checkpoints | `start` | before the first step, and wherever room runs out |
| loss and update | `loss` | every step, before it can be saved |
| recompilation | `process` | every step |
| hang | `process` | from before the processes join, in a thread |
| another host that is gone or has ended | `hosts` | once they have joined, in a thread |

A data set is checked for completeness as it is opened, and for its checksums as it is read (`data/tokens/shards.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from levanter.callbacks.progress_watchdog import ProgressWatchdog
from levanter.tracker import CompositeTracker
from levanter.trainer import Trainer

from tomat.base.reporting import warn, writing
from tomat.train.datasets import Datasets
from tomat.train.folder import RunFolder
from tomat.train.guards.loss import BadLossGuard
from tomat.train.guards.process import HangGuard, RecompileGuard
from tomat.train.guards.start import check_clocks, check_free_space, check_run_regions, explaining_full_storage
from tomat.train.loader import ShardDataset
from tomat.train.tracking import JsonLinesTracker


class RunGuards:
    def __init__(self, folder: RunFolder, hang: HangGuard, watchdog: ProgressWatchdog | None):
        """`hang` watches already, and `watchdog` is what it gave."""
        self._folder, self._config = folder, folder.config
        self._hang, self._watchdog = hang, watchdog
        self._recompile = RecompileGuard(folder)
        self._log: JsonLinesTracker | None = None
        self._checkpoint_bytes = 0
        self._warnings: list[tuple[str, str]] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Watch for recompilations and full storage while the context is open."""
        with (
            explaining_full_storage(self._folder.path, self._config.run_dir, lambda: self._checkpoint_bytes),
            self._recompile.listening(),
        ):
            yield
            self.check_log()

    def check_start(self, datasets: Datasets) -> None:
        self._warnings = [("clock_skew", text) for text in check_clocks(self._config)]
        if (across := check_run_regions(self._config, datasets)) is not None:
            self._warnings.append(("regions", across))
        if jax.process_index() == 0:
            for _, text in self._warnings:
                warn(text)

    def record_start(self) -> None:
        for name, text in self._warnings:
            self._folder.record(f"guard:{name}", 0, message=text)

    def attach(self, trainer: Trainer, state: Any, dataset: ShardDataset, datasets: Datasets) -> None:
        """Put the guards between the steps; before any other hook, since the first that raises stops the rest."""
        # Parameters, optimizer state and counters over all hosts, uncompressed.
        leaves = jax.tree.leaves(state.saveable_state)
        self._checkpoint_bytes = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, jax.Array))
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
