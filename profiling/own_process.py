"""Runs a call in its own process."""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tomat.base.errors import TomatError


def in_own_process[Result](call: Callable[[], Result], what: str, remedy: str) -> Result:
    """The result of `call` (a function of a module, or a `partial` of one) in a new process, so that its imports and
    peak memory are its own. `what` names the process in an error; `remedy` says what to do if memory ran out."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(call).result()
        except (BrokenProcessPool, MemoryError):
            raise TomatError(f"{what} did not finish: it was killed, or memory ran out; then {remedy}.") from None
