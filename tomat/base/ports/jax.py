"""Private names of JAX, which has no public ones for these."""

from collections.abc import Callable
from typing import Any

from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

VERSION = "0.11.1"


def kinds_of_cluster() -> list[Any]:
    """Every kind of cluster that JAX looks for as it starts its distributed service; Levanter reads the same list."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv._cluster_types


class ManagerWithLastAct(GlobalAsyncCheckpointManager):
    """JAX's manager of checkpoints, with an act between the last array, of every host, and the callback.

    It calls `_start_async_commit` once all arrays of a process are on their way, and has no hook there. `last_act` is
    called with the checkpoint's path on the first process, once all have committed.
    """

    path: str = ""
    """Folder or URL of the checkpoint that is saved next."""

    def __init__(self, last_act: Callable[[str], None], timeout_seconds: int) -> None:
        super().__init__(timeout_seconds)
        self._last_act = last_act

    def _start_async_commit(self, on_commit_callback: Callable[[], None]) -> None:
        path = self.path

        def complete() -> None:
            self._last_act(path)
            on_commit_callback()

        super()._start_async_commit(complete)
