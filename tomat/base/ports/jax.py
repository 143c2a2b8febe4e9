"""Private names of JAX, which has no public ones for these."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.array_serialization.serialization import GlobalAsyncCheckpointManager

VERSION = "0.11.1"


def kinds_of_cluster() -> list[Any]:
    """Every kind of cluster that JAX looks for as it starts its distributed service; Levanter reads the same list."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv._cluster_types


def hosts_of_slice(kind: Any) -> tuple[str, ...]:
    """Addresses of the hosts of a TPU slice in their order, by one of `kinds_of_cluster`."""
    return tuple(kind._get_worker_list_in_slice())


def joined_as() -> tuple[int, int]:
    """This process's number and how many there are, as `jax.distributed` knows them; (0, 1) before it has started.
    `jax.process_index` says this too, but opens the devices for it."""
    from jax._src.distributed import global_state

    return global_state.process_id or 0, global_state.num_processes or 1


def coordination() -> Any:
    """The client of the coordination service, with keys and values, and barriers that time out; None where no process
    has been joined. Levanter's `multihost_allgather_sync` uses it."""
    from jax._src.distributed import global_state

    return global_state.client


class ManagerWithLastAct(GlobalAsyncCheckpointManager):
    """JAX's manager of checkpoints, with an act between the last array of all hosts and the callback.

    The manager calls `_start_async_commit` once all arrays of a process are on their way, and has no hook there. On the
    first process, once all have committed, `last_act` is called with the checkpoint's path and with the callback that
    it must call.
    """

    path: str = ""
    """Folder or URL of the checkpoint that is saved next."""

    def __init__(self, last_act: Callable[[str, Callable[[], None]], None], timeout_seconds: int) -> None:
        super().__init__(timeout_seconds)
        self._last_act = last_act

    @property
    def uncommitted(self) -> int:
        """Arrays of the last save that have not reached the storage, of this process."""
        return sum(not future.done() for future in self._commit_futures or ())

    def _start_async_commit(self, on_commit_callback: Callable[[], None]) -> None:
        path = self.path

        super()._start_async_commit(lambda: self._last_act(path, on_commit_callback))


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """cuDNN's causal attention of one device's `[B, S, H, D]`: the output, and the log-sum-exp of each row of scores,
    float32 `[B, H, S]`. `jax.nn.dot_product_attention` does not return the latter, so no checkpoint policy can keep it.
    It asks this machine for its cuDNN, so nothing can be lowered on another one. And XLA has to ask Python how the mesh
    splits it. `window`: positions that each position sees, including itself."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    unused = [jnp.zeros(0, q.dtype)] * 7
    out, log_sum = cudnn._dot_product_attention_fwd_p.bind(q, k, v, *unused, **_cudnn(scale, window), is_training=True)
    return out, log_sum


def cudnn_attention_backward(
    kept: tuple[jax.Array, ...], d_out: jax.Array, *, scale: float, window: int | None
) -> tuple[jax.Array, ...]:
    """The gradients by `q`, `k` and `v`. `kept`: these three, and what `cudnn_attention` returned."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    q, k, v, out, log_sum = kept
    unused = [jnp.zeros(0, q.dtype)] * 7
    operands = q, k, v, *unused, log_sum, out, d_out
    return tuple(cudnn._dot_product_attention_bwd_p.bind(*operands, **_cudnn(scale, window)))


def _cudnn(scale: float, window: int | None) -> dict[str, Any]:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, and no gradient of one
        "mask_type": cudnn.MaskType.CAUSAL,
        "layout": cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
