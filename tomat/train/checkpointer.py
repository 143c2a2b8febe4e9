"""Levanter's checkpointer, changed so that the newest whole checkpoint of a run stays whole at every moment."""

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from levanter.checkpoint import Checkpointer, CheckpointerConfig, CheckpointInterval, CheckpointRetention

from tomat.base.ports.jax import ManagerWithLastAct
from tomat.base.ports.levanter import kept_every, replace_manager, since_last_save
from tomat.base.storage import is_remote
from tomat.train.guards.storage import NEVER, StorageWatch, bytes_written
from tomat.train.runs.checkpoints import Checkpoint, examine, mark_permanent, remove, unmark, write_checksums

logger = logging.getLogger(__name__)

SAVE_TIMEOUT_SECONDS = 600
"""How long a host waits for the others to have written, while they are alive; Levanter waits half an hour."""
CLEAN_SECONDS = 600.0
"""How long the removal of a checkpoint may take; storage reports no progress meanwhile."""


class RunCheckpointer(Checkpointer):
    """Saves as Levanter's does, but never into a folder that has something in it.

    Levanter 0.2.227 writes a step that is already saved a second time into the same folder (its forced save of the last
    step), and opens the database that a killed save left behind. A second kill there would lose a whole checkpoint, or
    leave two saves mixed in a folder that an older `metadata.json` calls complete. `partial` checkpoints, known not to
    be whole, are removed after the next complete save; `before_save` is called on every process.
    """

    def __init__(
        self,
        config: CheckpointerConfig,
        run_id: str,
        partial: Sequence[Checkpoint] = (),
        before_save: Callable[[], None] = lambda: None,
        storage: StorageWatch | None = None,
    ):
        self._before_save = before_save
        self._storage = storage or StorageWatch(str(config.base_path))
        self._partial = [found.path for found in partial]
        self._cleaning = False
        """Whether checkpoints that a newer one replaces are being removed, which has a time limit of its own."""
        self._saved: tuple[str, bool] | None = None
        """Path of the last save and whether it is temporary."""
        if jax.process_index() == 0:
            # Before Levanter looks for temporary checkpoints to keep and to remove.
            for found in partial:
                unmark(found)
        super().__init__(
            base_path=config.expanded_path(run_id),
            save_interval=config.save_interval,
            step_policies=[CheckpointInterval(**interval) for interval in config.keep or []],
            temporary_base_path=config.expanded_temporary_path(run_id),
            dt_now_injection=_monotonic_now,
            delete_old_temp_checkpoints=config.delete_old_temp_checkpoints,
            keep_last_temporary_checkpoints=config.keep_last_temporary_checkpoints,
            debug=config.debug,
            write_config=config.write,
        )
        # Checksums come before `metadata.json`, the first thing that Levanter 0.2.227 writes in the manager's callback.
        self._manager_with_checksums = ManagerWithLastAct(self._complete, SAVE_TIMEOUT_SECONDS)
        replace_manager(self, self._manager_with_checksums)

    def is_due(self, step: int) -> bool:
        """Whether the settings require a save of `step` (its index, as for `on_step`), whatever the clock says."""
        every = kept_every(self, step)
        return step > 0 and every is not None and step % every == 0

    @property
    def interval_is_over(self) -> bool:
        """Whether `on_step` would save by this process's clock."""
        return bool(self.save_interval) and since_last_save(self) >= self.save_interval

    def on_stop(self, *, tree: Any, step: int) -> None:
        """Save the step that a stop falls on, as a temporary checkpoint: it goes when the resumed run has saved
        another. Otherwise a run on spot machines would keep a checkpoint of every preemption. It lies beside the
        permanent ones, since a storage of temporary ones may be emptied before the run goes on."""
        self.temporary_base_path = None
        self.request_checkpoint(CheckpointRetention.TEMPORARY)
        self.on_step(tree=tree, step=step, force=step == 0)  # Levanter saves step 0 by force alone

    def save_checkpoint(
        self,
        tree: Any,
        step: int,
        destination: str,
        commit_callback: Callable[[], None] | None = None,
        *,
        is_temporary: bool = False,
        base_path_override: str | None = None,
    ) -> None:
        path = os.path.join(base_path_override if base_path_override is not None else self.base_path, destination)
        commit = commit_callback or (lambda: None)
        if self._saved is not None and self._saved[0] == path:
            if self._saved[1] and not is_temporary:
                self._manager_with_checksums.wait_until_finished()
                if jax.process_index() == 0:
                    mark_permanent(path)
                commit()
                self._saved = (path, False)
            return
        with self._storage.watching(f"publishing the log before the save of step {step}"):
            self._before_save()
        self.wait_until_finished()  # time spent waiting for other hosts does not count as a storage that stalls
        if not self._clear(path, step):
            logger.warning("%s exists and is whole; it is kept.", path)
            return

        def finished() -> None:
            self._cleaning = True
            try:
                with self._storage.watching(f"removing what step {step} replaces", end_seconds=CLEAN_SECONDS):
                    commit()
                    # Remove the checkpoints that were never whole, now that a newer one is.
                    while self._partial:
                        if (partial := self._partial.pop()) != path and jax.process_index() == 0:
                            try:
                                remove(partial)
                            except OSError as error:  # they cost space and nothing else
                                logger.warning("%s could not be removed: %s", partial, error)
            finally:
                self._cleaning = False

        self._manager_with_checksums.path = path
        with self._storage.watching(f"saving step {step}", self._progress):
            super().save_checkpoint(
                tree, step, destination, finished, is_temporary=is_temporary, base_path_override=base_path_override
            )
        threading.Thread(target=self._watch_commits, args=(step,), name="commits", daemon=True).start()
        self._saved = (path, is_temporary)

    def wait_until_finished(self) -> None:
        with self._storage.watching("waiting for the last save to be whole on all hosts", end_seconds=NEVER):
            super().wait_until_finished()

    def _progress(self) -> tuple[int, int]:
        return self._manager_with_checksums.uncommitted, bytes_written()

    def _watch_commits(self, step: int) -> None:
        """Watch over a save that goes on while the run trains, until this process has written all of its part."""
        with self._storage.watching(f"saving step {step}", self._progress):
            while self._manager_with_checksums.uncommitted:
                time.sleep(0.1)

    def _complete(self, path: str, then: Callable[[], None]) -> None:
        """Write the checksums, then call `then`: it writes Levanter's metadata and removes what is replaced."""
        # On a disk every file is read for its checksum, and its size has no limit.
        limit = None if is_remote(path) else CLEAN_SECONDS
        with self._storage.watching(f"writing the checksums of {path}", end_seconds=limit):
            write_checksums(path)
        with self._storage.watching(f"writing the metadata of {path}", lambda: self._cleaning and time.monotonic()):
            then()

    def _clear(self, path: str, step: int) -> bool:
        """Remove what a killed process left at `path`, before any host writes there; False if it is a whole save."""
        clear = True
        if jax.process_index() == 0:
            with self._storage.watching(f"looking for what is left at {path}"):
                clear = not examine(path, step).whole
            if clear:
                with self._storage.watching(f"removing what is left at {path}", end_seconds=CLEAN_SECONDS):
                    remove(path)
        if jax.process_count() > 1:
            clear = bool(multihost_utils.broadcast_one_to_all(np.array(clear)))
        return clear


def _monotonic_now() -> datetime.datetime:
    """A time that only ever goes on, for `save_interval`. Levanter's own (0.2.227) is naive local time: a clock set
    back, or the end of summer time, stops the saves for an hour."""
    return datetime.datetime.min + datetime.timedelta(seconds=time.monotonic())
