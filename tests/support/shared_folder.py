"""A folder that all workers of one run of the tests share, for what is dear to make."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def shared_folder(factory: pytest.TempPathFactory, name: str) -> Path:
    """The same for every worker; pytest removes it with its other folders."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other worker is in such a block of the same folder: the second finds what the first has made."""
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
