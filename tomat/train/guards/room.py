"""Room for checkpoints: checked before the first step, and one clear error where it runs out."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from tomat.base.errors import FULL_ERRNOS, RetryableError, TomatError
from tomat.base.reporting import first_line, readable_bytes
from tomat.base.storage import is_passing, is_remote, storage_errors

FREE_CHECKPOINTS = 2
"""Checkpoints that must fit before a run begins: a save is whole before the one it replaces is removed."""

FULL_WORDS = ("no space left on device", "disk quota exceeded", "resource_exhausted", "quota exceeded", "quotaexceeded")
"""How TensorStore, the operating system and Cloud Storage (reasons of its JSON API: `quotaExceeded`) say it."""


def checkpoint_bytes(state: Any) -> int:
    """Bytes of a checkpoint of `state`, uncompressed: parameters, optimizer state, counters, over all hosts."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state.saveable_state) if isinstance(leaf, jax.Array))


def check_free_space(output_dir: str, needed: int) -> None:
    """Refuse to begin a run whose disk has no room for its checkpoints; a bucket has no limit to ask for."""
    if is_remote(output_dir):
        return
    free = shutil.disk_usage(output_dir).free
    if free < FREE_CHECKPOINTS * needed:
        raise TomatError(
            f"{output_dir} has {readable_bytes(free)} free; a checkpoint of this run takes up to "
            f"{readable_bytes(needed)}, and {FREE_CHECKPOINTS} must fit, one being written before another is removed. "
            "Free space or set another output_dir."
        )


@contextmanager
def explaining_full_storage(run_dir: Path, run_url: str, needed: Callable[[], int]) -> Iterator[None]:
    """Turn whatever a full disk or bucket, or one that does not answer, raises into one error.

    Args:
        needed: Gives the bytes of a checkpoint, 0 while that is not known.
    """
    try:
        yield
    except Exception as error:
        cause = full_storage_cause(error)
        if cause is None and not isinstance(error, TomatError) and (passing := passing_cause(error)) is not None:
            raise RetryableError(
                f"{run_url}: the storage did not answer ({first_line(passing)}). The checkpoints written before are "
                "whole, and the same command continues from the last of them."
            ) from error
        if cause is None:
            raise
        path = str(getattr(cause, "filename", None) or run_url)
        free = "" if is_remote(path) else f"; {readable_bytes(shutil.disk_usage(run_dir).free)} are free"
        checkpoint = f" A checkpoint takes up to {readable_bytes(needed())}." if needed() else ""
        raise TomatError(
            f"{path}: no room left while writing{free} ({first_line(cause)}).{checkpoint} The checkpoints written "
            "before are whole, and the same command continues from the last of them once there is room."
        ) from error


def full_storage_cause(error: BaseException) -> BaseException | None:
    """The error among `error` and what led to it that says a disk or a quota is full; None where none does."""
    seen = _causes(error)
    # The operating system's own error names the file; what quotes it in its text comes second.
    exact = [item for item in seen if getattr(item, "errno", None) in FULL_ERRNOS]
    return next(iter(exact + [item for item in seen if _says_full(item)]), None)


def passing_cause(error: BaseException) -> BaseException | None:
    """The error among `error` and what led to it that storage raised which does not answer now; None where none is."""
    # XLA's errors begin with the same codes: there they are said of another host.
    storage = (ValueError, *storage_errors())
    return next((item for item in _causes(error) if isinstance(item, storage) and is_passing(item)), None)


def _causes(error: BaseException) -> list[BaseException]:
    """`error`, and what led to it, the nearest first."""
    seen = [error]
    for current in seen:
        # What Levanter's trainer gathers while it closes is in the arguments of one RuntimeError.
        nested = [item for arg in current.args if isinstance(arg, list) for item in arg]
        for item in (current.__cause__, current.__context__, *nested):
            if isinstance(item, BaseException) and item not in seen:
                seen.append(item)
    return seen


def _says_full(error: BaseException) -> bool:
    # XLA says RESOURCE_EXHAUSTED too, of a device's memory; that is no storage, and its own text is the better one.
    if isinstance(error, TomatError | jax.errors.JaxRuntimeError):
        return False
    text = str(error).lower()
    return any(words in text for words in FULL_WORDS)
