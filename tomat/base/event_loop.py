"""Calling libraries that start an event loop of their own where one runs already, as in every notebook."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def outside_event_loop[Result](work: Callable[[], Result]) -> Result:
    """What `work` returns or raises. Where this thread runs an event loop, `work` runs in a thread of its own, where
    `asyncio.run` is allowed; so it relies on nothing that is set for a thread alone, such as a JAX mesh."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none runs
        return work()
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(work).result()
